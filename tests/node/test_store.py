"""Where the workers of an attempt meet: the address they are told, and a port that may be the same for all attempts."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from raylaunch.core.events import WorkersExited, WorkersStarted
from raylaunch.node import interfaces, store
from raylaunch.node.messages import StoreOpen
from raylaunch.node.store import MeetingPlace, meeting_place
from tests.node.harness import ADDRESS, SECONDS, Ears, Node, send, until
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
HAS_IPV6 = "::1" in interfaces.interfaces().get("lo", ())
NOT_OURS = "198.51.100.7"  # kept for documentation: nobody has it


@pytest.fixture
def here(node: Node) -> Iterator[Node]:
    """The shared node, with its own address and without a port after the test."""
    yield node
    node.set(address=ADDRESS, master_addr="", master_port=0)


# What workers are told.


def test_interfaces_of_this_machine():
    """As `ip address` has them: by name, numeric, IPv4 and IPv6."""
    found = interfaces.interfaces()
    assert "127.0.0.1" in found["lo"]
    listed = subprocess.run(["cat", "/proc/net/if_inet6"], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    assert names == {name for name, addresses in found.items() if any(":" in address for address in addresses)}
    assert all(interfaces.is_numeric(address) for addresses in found.values() for address in addresses)


@pytest.mark.parametrize(
    ("address", "numeric", "loopback", "ours"),
    [
        ("127.0.0.1", True, True, True),
        (NOT_OURS, True, False, False),
        ("localhost", False, False, True),
        ("no.such.host.invalid", False, False, False),
        ("fd00:dead::beef", True, False, False),
        ("0.0.0.0", True, False, False),
        ("::", True, False, False),
    ],
)
def test_what_an_address_is(address, numeric, loopback, ours):
    """A number, one that only this machine means, one that a socket can listen at."""
    assert interfaces.is_numeric(address) is numeric
    assert interfaces.is_loopback(address) is loopback
    assert interfaces.is_ours(address) is ours


def test_names_are_resolved():
    """A number stays what it is, a name that nobody knows has none."""
    assert interfaces.resolved(NOT_OURS) == (NOT_OURS,)
    assert "127.0.0.1" in interfaces.resolved("localhost")
    assert interfaces.resolved("no.such.host.invalid") == ()
    assert interfaces.resolved("x" * 300) == ()


@pytest.mark.parametrize(
    ("own", "wanted", "several", "told", "listens", "why"),
    [
        ("127.0.0.2", "", False, "127.0.0.2", "127.0.0.2", ""),
        ("127.0.0.2", "127.0.0.3", False, "127.0.0.3", "127.0.0.3", ""),
        (NOT_OURS, "localhost", False, "localhost", "127.0.0.1", ""),
        (NOT_OURS, "localhost", True, NOT_OURS, NOT_OURS, "`master_addr: localhost` means another machine on each"),
        ("127.0.0.2", "localhost", True, "127.0.0.1", "127.0.0.1", ""),
        ("127.0.0.1", NOT_OURS, False, "127.0.0.1", "127.0.0.1", f"`{NOT_OURS}`"),
        ("127.0.0.1", "no.such.host.invalid", False, "127.0.0.1", "127.0.0.1", "means nothing there"),
        ("127.0.0.1", "0.0.0.0", False, "127.0.0.1", "127.0.0.1", "is not an address of that node"),
    ],
)
def test_what_the_workers_are_told(own, wanted, several, told, listens, why):
    """What the job wants, where that is node 0 for all of them; else node 0's own address, and why."""
    found = meeting_place(own, wanted, several_nodes=several)
    assert (found.told, found.listens) == (told, listens)
    assert why.strip("`") in found.why
    assert bool(found.why) is bool(why)


def test_several_nodes_are_told_a_number(monkeypatch):
    """A name may mean nothing on another node, or that node itself."""
    monkeypatch.setattr(interfaces, "resolved", lambda _: ("127.0.1.1", "10.0.0.7"))
    monkeypatch.setattr(interfaces, "is_ours", lambda _: True)
    assert meeting_place("10.0.0.1", "n0", several_nodes=True) == MeetingPlace(told="10.0.0.7", listens="10.0.0.7")
    assert meeting_place("10.0.0.1", "n0", several_nodes=False) == MeetingPlace(told="n0", listens="127.0.1.1")


def test_the_store_listens_where_the_workers_are_told(here: Node) -> None:
    """And only there: the node's own address is another."""
    here.set(address="127.0.0.2", master_addr="localhost")
    here.supervisor.open_store(here.attempt + 1)
    word = here.wait(StoreOpen)
    assert (word.address, word.why) == ("localhost", "")
    socket.create_connection(("127.0.0.1", word.port), timeout=SECONDS).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", word.port), timeout=SECONDS)


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")
def test_the_store_listens_at_the_nodes_own_address_only(here: Node) -> None:
    """Not on the machine's other interfaces, where nobody of the job is."""
    here.set(address="127.0.0.2")
    port = here.open_store()
    socket.create_connection(("127.0.0.2", port), timeout=SECONDS).close()
    for other in {"127.0.0.1", *itertools.chain(*interfaces.interfaces().values())}:
        if ":" not in other:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((other, port), timeout=SECONDS)


def test_an_address_that_is_none_of_this_machines(here: Node) -> None:
    """Nobody knows who else could reach a store that listens everywhere, so there is none, and the node says why."""
    with pytest.raises(OSError, match="Cannot assign"):
        store.listen(NOT_OURS)
    here.set(address=NOT_OURS)
    here.supervisor.open_store(1)
    word = here.wait(StoreOpen)
    assert (word.port, word.why) == (0, "Cannot assign requested address")


def test_workers_meet_by_ipv6(here: Node) -> None:
    """A node that is known by an IPv6 address: `env://` with two workers, several attempts."""
    here.set(address="::1")
    script = here.script(GROUP.format(then=""))
    for _ in range(2):
        outcome = here.run(script, nproc=2, port=here.open_store())
        assert [outcome.stdout(rank) for rank in (0, 1)] == ["::1 2\n"] * 2, outcome.stderr()


# The same port for all attempts.


def test_a_fixed_port_survives_many_restarts(here: Node, ears: Ears) -> None:
    """A worker is killed each time while all are connected to the store; the next attempt has the same port."""
    (port,) = free_ports(1)
    here.set(master_port=port)
    script = here.script(GROUP.format(then="import time; time.sleep(60)"))
    for _ in range(8):
        assert here.open_store() == port
        here.launch(script, nproc=2, port=port)
        here.wait(WorkersStarted)
        pids = dict(line.split() for line in ears.hear(2))
        send(int(pids["1"]))
        here.wait(WorkersExited, lambda event: event.attempt == here.attempt)
    assert here.open_store() == port
    outcome = here.run(here.script(GROUP.format(then="")), nproc=2, port=port)
    assert outcome.exit_codes == {0: 0, 1: 0}, outcome.stderr()


def test_a_fixed_port_is_free_at_once(here: Node) -> None:
    """One store after the other, as fast as they can be asked for."""
    (port,) = free_ports(1)
    here.set(master_port=port)
    assert {here.open_store() for _ in range(100)} == {port}


def test_a_fixed_port_is_left_by_what_hangs(here: Node, ears: Ears) -> None:
    """Stopped workers and a stopped store are killed: neither can keep the port from the next attempt."""
    (port,) = free_ports(1)
    here.set(master_port=port)
    script = here.script(GROUP.format(then="import time; time.sleep(60)"))
    assert here.open_store() == port
    here.launch(script, nproc=2, port=port)
    ears.hear(2)
    before = here.children()
    assert len(before) == 3
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    assert here.open_store() == port
    until(lambda: not before & here.children(), "what hung is still there")
    assert here.run(here.script(GROUP.format(then="")), nproc=2, port=port).exit_codes == {0: 0, 1: 0}


def test_a_fixed_port_that_somebody_else_has(here: Node) -> None:
    """Port 0 says that it could not be, with the address and the reason."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        here.set(master_port=other.getsockname()[1])
        here.supervisor.open_store(here.attempt + 1)
        word = here.wait(StoreOpen)
    assert (word.port, word.address, word.why) == (0, "127.0.0.1", "Address already in use")


def test_a_fixed_port_that_is_about_to_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where agents share a machine, the store of one that is gone may still be going."""
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


@pytest.mark.parametrize("own", [("torch",)], indirect=True, ids=["torch"])
def test_a_fixed_port_outlives_the_fork_server(own: Node) -> None:
    """Another fork server opens the store again, at the same port."""
    (port,) = free_ports(1)
    own.set(master_port=port)
    assert own.open_store() == port
    send(own.supervisor.server_pid)
    word = own.wait(StoreOpen)
    assert (word.attempt, word.port) == (1, port)
    assert own.run(own.script(GROUP.format(then="")), nproc=2, port=port).exit_codes == {0: 0, 1: 0}


def test_a_store_that_was_killed_does_not_take_the_fork_server_along(node: Node) -> None:
    """It is gone when its end is ordered; the attempt after it starts in the same warm process."""
    node.open_store()
    until(lambda: len(node.children()) == 1, "the store of a test before is left")
    (store,) = node.children()
    os.kill(store, signal.SIGKILL)
    until(lambda: not node.children(), "the store is still there")
    server = node.supervisor.server_pid
    for _ in range(2):
        assert node.run(node.script("print('hi')")).stdout() == "hi\n"
    assert node.supervisor.server_pid == server
