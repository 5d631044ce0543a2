"""The store of an attempt: the MASTER_ADDR that workers get, where it listens, and a fixed port."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import socket
import struct
import subprocess
import textwrap
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raylaunch.core.machine.events_and_actions import WorkersExited, WorkersStarted
from raylaunch.node.forkserver import store
from raylaunch.node.forkserver.store import StoreAddress, meeting_place
from raylaunch.node.linux import interfaces
from raylaunch.node.protocol.forkserver_messages import StartStore
from raylaunch.node.protocol.node_goal import OpenStore
from raylaunch.node.protocol.node_status import StoreOpened
from tests import profiles
from tests.node.harness import ADDRESS, SECONDS, MessagePipe, Node, is_listening, send_signal, until
from tests.private_cluster import free_ports

GROUP = """
    import os
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print(os.environ["MASTER_ADDR"], int(total))
    say(os.environ["RANK"], os.getpid())
    {then}
    dist.destroy_process_group()
"""
HAS_IPV6 = "::1" in interfaces.addresses().get("lo", ())
FOREIGN_ADDRESS = "198.51.100.7"  # reserved for documentation (RFC 5737): no machine has it


# The master address.


def test_the_addresses_of_this_hosts_name(monkeypatch):
    """Only those that it has; none if the name server does not answer in time."""
    monkeypatch.setattr(interfaces, "resolve", lambda _: ("127.0.1.1", FOREIGN_ADDRESS))
    assert interfaces.host_addresses(10.0) == ("127.0.1.1",)
    answer = threading.Event()
    monkeypatch.setattr(interfaces, "resolve", lambda _: answer.wait() and ())
    assert interfaces.host_addresses(0.01) == ()
    answer.set()


def test_interfaces_of_this_machine():
    """By name, numeric, IPv4 and IPv6: the same as the kernel lists."""
    found = interfaces.addresses()
    assert "127.0.0.1" in found["lo"]
    listed = subprocess.run(["cat", "/proc/net/if_inet6"], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    assert names == {name for name, addresses in found.items() if any(":" in address for address in addresses)}
    assert all(interfaces.is_numeric(address) for addresses in found.values() for address in addresses)


@pytest.mark.parametrize(
    ("address", "numeric", "loopback", "ours"),
    [
        ("127.0.0.1", True, True, True),
        (FOREIGN_ADDRESS, True, False, False),
        ("localhost", False, False, True),
        ("no.such.host.invalid", False, False, False),
        ("fd00:dead::beef", True, False, False),
        ("0.0.0.0", True, False, False),
        ("::", True, False, False),
    ],
)
def test_what_an_address_is(address, numeric, loopback, ours):
    """Whether it is numeric, whether it is a loopback address, and whether this machine has it."""
    assert interfaces.is_numeric(address) is numeric
    assert interfaces.is_loopback(address) is loopback
    assert interfaces.is_local(address) is ours


def test_names_are_resolved():
    """A numeric address resolves to itself, an unknown name to nothing."""
    assert interfaces.resolve(FOREIGN_ADDRESS) == (FOREIGN_ADDRESS,)
    assert "127.0.0.1" in interfaces.resolve("localhost")
    assert interfaces.resolve("no.such.host.invalid") == ()
    assert interfaces.resolve("x" * 300) == ()


@pytest.mark.parametrize(
    ("own", "wanted", "several", "master_addr", "listens", "why"),
    [
        ("127.0.0.2", "", False, "127.0.0.2", "127.0.0.2", ""),
        ("127.0.0.2", "127.0.0.3", False, "127.0.0.3", "127.0.0.3", ""),
        (FOREIGN_ADDRESS, "localhost", False, "localhost", "127.0.0.1", ""),
        (
            FOREIGN_ADDRESS,
            "localhost",
            True,
            FOREIGN_ADDRESS,
            FOREIGN_ADDRESS,
            "`master_addr: localhost` means another machine on each",
        ),
        ("127.0.0.2", "localhost", True, "127.0.0.1", "127.0.0.1", ""),
        ("127.0.0.1", FOREIGN_ADDRESS, False, "127.0.0.1", "127.0.0.1", f"`{FOREIGN_ADDRESS}`"),
        ("127.0.0.1", "no.such.host.invalid", False, "127.0.0.1", "127.0.0.1", "means nothing there"),
        ("127.0.0.1", "0.0.0.0", False, "127.0.0.1", "127.0.0.1", "is not an address of that node"),
    ],
)
def test_the_master_address_and_where_the_store_listens(own, wanted, several, master_addr, listens, why):
    """The job's `master_addr` where it means node 0 on all nodes; else node 0's own address, and why."""
    found = meeting_place(own, wanted, several_nodes=several)
    assert (found.told, found.listens) == (master_addr, listens)
    assert why.strip("`") in found.why
    assert bool(found.why) is bool(why)


def test_several_nodes_get_a_numeric_master_address(monkeypatch):
    """A name may mean nothing on another node, or that node itself."""
    monkeypatch.setattr(interfaces, "resolve", lambda _: ("127.0.1.1", "10.0.0.7"))
    monkeypatch.setattr(interfaces, "is_local", lambda _: True)
    assert meeting_place("10.0.0.1", "n0", several_nodes=True) == StoreAddress(told="10.0.0.7", listens="10.0.0.7")
    assert meeting_place("10.0.0.1", "n0", several_nodes=False) == StoreAddress(told="n0", listens="127.0.1.1")


def test_the_store_listens_at_the_master_address_only(torch_node: Node) -> None:
    """And not at the node's own address, which is another."""
    torch_node.set(address="127.0.0.2", master_addr="localhost")
    torch_node.supervisor.handle(OpenStore(attempt=torch_node.attempt + 1))
    opened = torch_node.wait(StoreOpened)
    assert (opened.address, opened.why) == ("localhost", "")
    socket.create_connection(("127.0.0.1", opened.port), timeout=SECONDS).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", opened.port), timeout=SECONDS)


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")
def test_the_store_listens_at_the_nodes_own_address_only(torch_node: Node) -> None:
    """And not on the machine's other interfaces, where no worker of the job connects."""
    torch_node.set(address="127.0.0.2")
    port = torch_node.open_store()
    socket.create_connection(("127.0.0.2", port), timeout=SECONDS).close()
    for other in {"127.0.0.1", *itertools.chain(*interfaces.addresses().values())}:
        if ":" not in other:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((other, port), timeout=SECONDS)


def test_no_store_is_opened_at_an_address_of_another_machine(torch_node: Node) -> None:
    """A store that listened everywhere instead would be open to strangers; the reply says why there is none."""
    with pytest.raises(OSError, match="Cannot assign"):
        store.listen(FOREIGN_ADDRESS)
    torch_node.set(address=FOREIGN_ADDRESS)
    torch_node.supervisor.handle(OpenStore(attempt=1))
    opened = torch_node.wait(StoreOpened)
    assert (opened.port, opened.why) == (0, "Cannot assign requested address")


def test_workers_meet_by_ipv6(torch_node: Node) -> None:
    """The node has an IPv6 address: two workers use `env://`, in several attempts."""
    torch_node.set(address="::1")
    script = torch_node.script(GROUP.format(then=""))
    for _ in range(2):
        outcome = torch_node.run(script, nproc=2, port=torch_node.open_store())
        assert [outcome.stdout(rank) for rank in (0, 1)] == ["::1 2\n"] * 2, outcome.stderr()


# A store that ends.


def test_a_killed_store_is_there_when_it_is_needed(torch_node: Node, pipe: MessagePipe) -> None:
    """While it waits for its attempt, and again when the attempt has begun: at the same port, and workers meet."""
    before = torch_node.children()
    port = torch_node.open_store()
    (waiting,) = torch_node.children() - before
    send_signal(waiting)
    assert torch_node.wait(StoreOpened).port == port
    assert waiting not in torch_node.children()
    go = torch_node.folder / "go"
    os.mkfifo(go)
    waits = "say('up')\nimport os\nos.read(os.open('go', os.O_RDONLY), 1)\n"
    script = torch_node.script(waits + textwrap.dedent(GROUP.format(then="")))
    attempt = torch_node.launch(script, nproc=2, port=port)
    workers = torch_node.wait(WorkersStarted).pids
    pipe.read_lines(2)
    others = until(lambda: len(found := torch_node.children() - {*workers}) == 1 and found, "an earlier store is left")
    (in_use,) = others
    send_signal(in_use)
    assert torch_node.wait(StoreOpened).attempt == attempt
    with open(go, "r+b", buffering=0) as pipe_to_workers:  # one byte for each of them
        pipe_to_workers.write(b"..")
        assert torch_node.wait(WorkersExited).failures == ()


def test_a_store_that_dies_again_and_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not opened an eleventh time, and process ids that were reaped are never killed."""
    killed: list[int] = []
    pids = itertools.count(1000)
    monkeypatch.setattr(store, "fork", lambda _: next(pids))
    monkeypatch.setattr(store.processes, "kill_with_group", killed.append)
    table = store.StoreTable(lambda *_: 0)
    port = table.open(StartStore(attempt=2, address=ADDRESS)).port
    other = table.open(StartStore(attempt=3, address=ADDRESS)).port
    assert len({0, port, other}) == 3
    for _ in range(10):
        (pid,) = table.pids() - {1001}
        (opened,) = table.reaped({pid, 7})
        assert opened.port == port
        assert opened.why.startswith("the store of attempt 2 died and was opened again")
    (given_up,) = table.reaped(table.pids() - {1001})
    assert (given_up.attempt, given_up.port, given_up.why) == (2, 0, "its process dies again and again")
    assert table.pids() == {1001}
    table.close_all()
    assert killed == [1001]


# Strangers.


def test_workers_meet_whatever_strangers_do_at_the_port(torch_node: Node) -> None:
    """At a restart, the store of the next attempt has listened for long. They send nothing, garbage, or half a message.

    More of them stay than the fork server itself may have descriptors.
    """
    server = torch_node.supervisor.client.pid
    before = resource.prlimit(server, resource.RLIMIT_NOFILE)
    resource.prlimit(server, resource.RLIMIT_NOFILE, (100, before[1]))
    try:
        port = torch_node.open_store()
    finally:
        resource.prlimit(server, resource.RLIMIT_NOFILE, before)
    hello = struct.pack("<BI", 11, 0x3C85F7CE)  # VALIDATE and its number, as each client of TCPStore begins
    half_a_set = hello + b"\0" + struct.pack("<Q", 1 << 60) + b"key"
    with contextlib.ExitStack() as stack:
        for data in (*[b""] * 200, b"\0" * 1000, os.urandom(1000), b"GET / HTTP/1.1\r\n\r\n", hello, half_a_set):
            stranger = stack.enter_context(socket.create_connection((ADDRESS, port), timeout=SECONDS))
            stranger.sendall(data)
        for _ in range(50):
            rude = stack.enter_context(socket.create_connection((ADDRESS, port), timeout=SECONDS))
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a RST
            rude.close()
        outcome = torch_node.run(torch_node.script(GROUP.format(then="")), nproc=2, port=port)
    assert outcome.exit_codes == {0: 0, 1: 0}, outcome.stderr()


messages = st.tuples(
    st.sampled_from([b"", struct.pack("<BI", 11, 0x3C85F7CE)]),  # how each client begins
    st.integers(0, 14).map(lambda kind: bytes([kind])) | st.just(b""),  # a kind of query
    st.sampled_from([0, 1, 7, 1 << 20, 1 << 40, (1 << 64) - 1]).map(struct.Struct("<Q").pack) | st.just(b""),
    st.binary(max_size=40),
).map(b"".join)


@pytest.mark.skipif(not profiles.is_fuzzing(), reason="each case takes half a second; `make fuzz` draws some")
@settings(profiles.examples(6), suppress_health_check=list(HealthCheck))  # all cases use one node
@given(sent=st.lists(st.tuples(messages, st.booleans()), max_size=20))
def test_workers_meet_whatever_strangers_send(torch_node: Node, sent: list[tuple[bytes, bool]]) -> None:
    port = torch_node.open_store()
    with contextlib.ExitStack() as stack:
        for data, stays in sent:
            stranger = stack.enter_context(socket.create_connection((ADDRESS, port), timeout=SECONDS))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(data)
            if not stays:
                stranger.close()
        outcome = torch_node.run(torch_node.script(GROUP.format(then="")), nproc=2, port=port)
    assert outcome.exit_codes == {0: 0, 1: 0}, outcome.stderr()


# The same port for all attempts.


def test_a_fixed_port_survives_many_restarts(torch_node: Node, pipe: MessagePipe) -> None:
    """Each time a worker is killed while all are connected to the store; the next attempt has the same port."""
    (port,) = free_ports(1)
    torch_node.set(master_port=port)
    script = torch_node.script(GROUP.format(then="import time; time.sleep(280)"))
    for _ in range(8):
        assert torch_node.open_store() == port
        torch_node.launch(script, nproc=2, port=port)
        torch_node.wait(WorkersStarted)
        pids = dict(line.split() for line in pipe.read_lines(2))
        send_signal(int(pids["1"]))
        torch_node.wait(WorkersExited, lambda event: event.attempt == torch_node.attempt)
    assert torch_node.open_store() == port
    outcome = torch_node.run(torch_node.script(GROUP.format(then="")), nproc=2, port=port)
    assert outcome.exit_codes == {0: 0, 1: 0}, outcome.stderr()


def test_a_fixed_port_is_free_at_once(torch_node: Node) -> None:
    """A hundred stores are opened one after the other, without a pause."""
    (port,) = free_ports(1)
    torch_node.set(master_port=port)
    assert {torch_node.open_store() for _ in range(100)} == {port}


def test_stopped_processes_do_not_keep_a_fixed_port(torch_node: Node, pipe: MessagePipe) -> None:
    """Workers and a store stopped by SIGSTOP are killed before the next attempt opens its store."""
    (port,) = free_ports(1)
    torch_node.set(master_port=port)
    script = torch_node.script(GROUP.format(then="import time; time.sleep(280)"))
    assert torch_node.open_store() == port
    torch_node.launch(script, nproc=2, port=port)
    pipe.read_lines(2)
    before = torch_node.children()
    assert len(before) == 3
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    assert torch_node.open_store() == port
    until(lambda: not before & torch_node.children(), "the stopped processes are still there")
    assert torch_node.run(torch_node.script(GROUP.format(then="")), nproc=2, port=port).exit_codes == {0: 0, 1: 0}


def test_a_fixed_port_that_is_in_use(torch_node: Node) -> None:
    """The reply has port 0, the address and the reason."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        torch_node.set(master_port=other.getsockname()[1])
        torch_node.supervisor.handle(OpenStore(attempt=torch_node.attempt + 1))
        opened = torch_node.wait(StoreOpened)
    assert (opened.port, opened.address, opened.why) == (0, "127.0.0.1", "Address already in use")


def test_a_fixed_port_that_is_about_to_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where agents share a machine, the store of one that is gone may not have exited yet."""
    other = socket.create_server((ADDRESS, 0))
    port = other.getsockname()[1]
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            other.close()

    monkeypatch.setattr(store.time, "sleep", sleep)
    with store.listen_soon(ADDRESS, port) as found:
        assert found.getsockname()[1] == port
    assert len(waits) == 3


def test_a_fixed_port_outlives_the_fork_server(own_node: Node) -> None:
    """Another fork server opens the store again, at the same port."""
    (port,) = free_ports(1)
    own_node.set(master_port=port)
    assert own_node.open_store() == port
    send_signal(own_node.supervisor.client.pid)
    opened = own_node.wait(StoreOpened)
    assert (opened.attempt, opened.port) == (1, port)
    assert is_listening(port)
