"""The memory that a node holds for `State`: who gets it, how much there is, and what outlives the agent."""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.core.placement.environment import Member, assign
from raylaunch.node.linux import processes
from raylaunch.node.protocol.messages import AnnounceCommit
from raylaunch.node.state.fd_store_client import FdStoreClient
from raylaunch.node.state.state_memory import StateMemory
from raylaunch.worker.heartbeats import shared_page as fields
from raylaunch.worker.heartbeats.shared_page import SharedPage
from raylaunch.worker.state import buffer_client
from raylaunch.worker.state.buffer_client import Request
from raylaunch.worker.state.commit_buffer import COMPLETED_BUFFER, LIGHT_BUFFERS, OWN_BUFFERS, CommitBuffer
from tests.node.harness import until

SIZE = 100_000


def part(rank: int = 0, steps: int = 5) -> HeldCommit:
    return HeldCommit(rank=rank, world_size=2, commit=Commit(1, steps))


def own_name(monkeypatch, memory: StateMemory) -> None:
    monkeypatch.setenv(buffer_client.ADDRESS_VARIABLE, memory.address)


@contextmanager
def memory_of(monkeypatch, secret: str = "", most: int | None = None, attempt: int = 1):
    """A node with both workers of a world, whose memory is served by a thread, as the agent's event loop does."""
    page, fd = SharedPage.create()
    memory = StateMemory(page, secret, most)
    memory.begin(assign(attempt, [Member(node="node-0", address="", nproc=2)])[0])
    own_name(monkeypatch, memory)
    wake, end = os.pipe()

    def serve() -> None:
        while wake not in select.select([memory.fileno(), wake], [], [])[0]:
            memory.poll()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield memory, page
    finally:
        os.write(end, b"x")
        thread.join()
        memory.close()
        for each in (wake, end, fd):
            os.close(each)


def buffer_of(
    rank: int = 0, index: int = 0, size: int = SIZE, attempt: int = 1, node_bytes: int = 0
) -> CommitBuffer | None:
    request = Request(attempt=attempt, rank=rank, index=index, bytes=size, node_bytes=node_bytes)
    fd, _ = buffer_client.ask(request)
    return CommitBuffer(fd) if fd is not None else None


def test_a_sealed_buffer_is_held_and_a_torn_one_is_not(monkeypatch):
    with memory_of(monkeypatch) as (memory, _):
        buffer = buffer_of(rank=1)
        buffer.write_pickle(b"pickle", tensors=64)
        assert memory.held() == ()
        buffer.header.seal(part(1), tensors=64, pickled=6)
        assert memory.held() == (part(1),)
        again = buffer_of(rank=1, size=0)
        assert again.read_pickle() == b"pickle"
        again.header.unseal()
        assert memory.held() == ()


def test_a_damaged_header_is_noticed(monkeypatch):
    with memory_of(monkeypatch):
        buffer = buffer_of()
        buffer.header.seal(part(), tensors=SIZE, pickled=SIZE)
        with pytest.raises(ValueError, match="its header says more"):
            buffer.read_pickle()


def test_a_buffer_grows_and_keeps_what_it_has(monkeypatch):
    with memory_of(monkeypatch) as (memory, _):
        buffer_of().header.seal(part(), tensors=0, pickled=0)
        assert buffer_of(size=5 * SIZE).size == 5 * SIZE
        assert buffer_of(size=1).size == 5 * SIZE
        assert memory.held() == (part(),)


@pytest.mark.parametrize("request_of", [{"attempt": 2}, {"rank": 2}, {"index": OWN_BUFFERS}])
def test_only_workers_of_the_attempt_get_memory(monkeypatch, request_of):
    with memory_of(monkeypatch), pytest.raises(ConnectionError):
        buffer_of(**request_of)


def test_another_user_gets_no_connection(monkeypatch):
    """Which would use up a descriptor of the agent for as long as that user wants."""
    with memory_of(monkeypatch) as (memory, _):
        monkeypatch.setattr("os.geteuid", lambda: 12345)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(60)
            stranger.connect("\0" + memory.address)
            assert stranger.recv(1) == b""


def test_a_buffer_that_was_never_made_is_none(monkeypatch):
    with memory_of(monkeypatch):
        assert buffer_of(size=0) is None


@pytest.mark.parametrize("most", [SIZE * 3, None])
def test_too_little_memory_is_an_error_that_says_how_much_is_needed(monkeypatch, most):
    """`node_bytes` counts what the other workers of the node will need."""
    node_bytes = SIZE * 4 if most else 1 << 60
    needed = r"[1-9]\d*\.\d\d [KMG]iB"
    with memory_of(monkeypatch, most=most) as (memory, _):
        with pytest.raises(MemoryError, match=rf"need {needed} of this node's memory.*`state_memory` sets"):
            buffer_of(node_bytes=node_bytes)
        assert memory.held() == ()
        assert buffer_of(size=0) is None


def test_what_to_restore_is_on_the_page_for_the_attempt_alone(monkeypatch):
    with memory_of(monkeypatch) as (memory, page):
        assert page.numbers[fields.RESTORE_DECIDED] == 0
        memory.announce(AnnounceCommit(attempt=2, commit=Commit(1, 8)))
        assert page.numbers[fields.RESTORE_DECIDED] == 0
        memory.announce(AnnounceCommit(attempt=1, commit=Commit(4, 8), world_size=6))
        found = [page.numbers[field] for field in range(fields.RESTORE_DECIDED, fields.RESTORE_WORLD_SIZE + 1)]
        assert found == [1, 4, 8, 6]


def part_of(rank: int, attempt: int = 1) -> CommitBuffer | None:
    """Ask as rank 0 for the part that a rank of the chosen commit's world has written."""
    fd, _ = buffer_client.ask(Request(attempt=attempt, rank=0, index=0, part=rank))
    return CommitBuffer(fd) if fd is not None else None


def test_a_worker_gets_the_parts_of_the_chosen_commit_that_the_node_has(monkeypatch):
    """Whichever rank wrote them, and though this node does not have that rank any more."""
    with memory_of(monkeypatch) as (memory, _):
        for rank, steps, index in ((0, 5, 0), (1, 4, 0), (1, 5, 1)):
            buffer = buffer_of(rank=rank, index=index)
            buffer.write_pickle(b"rank %d" % rank, tensors=64 * steps)
            buffer.header.seal(part(rank, steps), tensors=64 * steps, pickled=6)
        memory.begin(assign(2, [Member(node="node-0", address="", nproc=1)])[0])
        assert part_of(1, attempt=2) is None
        memory.announce(AnnounceCommit(attempt=2, commit=Commit(1, 5), world_size=2))
        buffer_of(rank=0, index=1, attempt=2)
        assert [part_of(rank, attempt=2).read_pickle() for rank in (0, 1)] == [b"rank 0", b"rank 1"]
        assert part_of(2, attempt=2) is None


def test_ranks_of_another_node_are_dropped_when_memory_is_needed(monkeypatch):
    with memory_of(monkeypatch) as (memory, _):
        buffer_of(rank=0).header.seal(part(0), tensors=0, pickled=0)
        world = [Member(node="node-9", address="", nproc=1), Member(node="node-0", address="", nproc=2)]
        memory.begin(assign(2, world)[1])
        buffer_of(rank=1, attempt=2)
        memory.begin(assign(3, world[1:])[0])
        assert memory.held() == ()


# Light commits.

SHARED = 50_000
OWN = {"tensors": 64, "pickled": 6, "shared": SHARED}


def sealed(memory: StateMemory, one: HeldCommit, index: int = 0) -> None:
    """Have a rank write a part."""
    assert memory.files.reserve((one.rank, index), SIZE) == ""
    buffer = CommitBuffer(os.dup(memory.files.get((one.rank, index)).fd))
    buffer.write_pickle(b"rank %d" % one.rank, tensors=64)
    buffer.header.seal(one, **OWN)


COMPLETED = COMPLETED_BUFFER


def light(rank: int = 0, steps: int = 5, attempt: int = 1) -> HeldCommit:
    return HeldCommit(rank=rank, world_size=2, commit=Commit(attempt, steps), sharers=2, digest=3, light=True)


def completed(rank: int = 0, steps: int = 5) -> HeldCommit:
    return replace(light(rank, steps), light=False, first_sharer=rank, sharers=1)


def test_of_two_parts_of_a_rank_the_whole_one_is_found(monkeypatch):
    """Wherever it is: a survivor has written it besides the light one, or it is a copy."""
    with memory_of(monkeypatch) as (memory, _):
        commit = Commit(1, 5)
        sealed(memory, light(0), LIGHT_BUFFERS[1])
        sealed(memory, light(1), LIGHT_BUFFERS[0])
        assert [memory.files.find(rank, commit, 2).held() for rank in (0, 1)] == [light(0), light(1)]
        assert memory.files.find(0, commit, 2).is_light
        sealed(memory, completed(1), COMPLETED)
        sealed(memory, completed(0), OWN_BUFFERS)
        assert [memory.files.find(rank, commit, 2).held() for rank in (0, 1)] == [completed(0), completed(1)]
        assert not memory.files.find(0, commit, 2).is_light
        assert memory.files.find(0, commit, 4) is None
        assert memory.files.find(0, Commit(1, 4), 2) is None


def test_a_whole_part_has_all_tensors_that_are_equal_on_all_ranks(monkeypatch):
    """Not a light one, also of a rank that is alone on its node; nor a share, nor one of which nothing is equal."""
    with memory_of(monkeypatch) as (memory, _):
        commit, alone = Commit(1, 5), replace(light(0), sharers=1)
        parts = (light(0), alone, replace(light(0), light=False), part(0), completed(0, steps=6))
        for index, one in enumerate(parts):
            sealed(memory, one, index)
        assert memory.files.find_whole(commit, 2) is None
        sealed(memory, completed(1), COMPLETED)
        assert memory.files.find_whole(commit, 2).held() == completed(1)
        assert memory.files.find_whole(commit, 3) is None


def test_a_worker_gets_a_whole_part_of_the_chosen_commit_whichever_rank_completed_it(monkeypatch):
    with memory_of(monkeypatch) as (memory, _):
        sealed(memory, light(0), LIGHT_BUFFERS[0])
        sealed(memory, light(1), LIGHT_BUFFERS[0])
        memory.begin(assign(2, [Member(node="node-0", address="", nproc=2)])[0])
        assert part_of(buffer_client.WHOLE_PART, attempt=2) is None
        memory.announce(AnnounceCommit(attempt=2, commit=Commit(1, 5), world_size=2))
        assert part_of(buffer_client.WHOLE_PART, attempt=2) is None
        sealed(memory, completed(1), COMPLETED)
        assert part_of(buffer_client.WHOLE_PART, attempt=2).header.held() == completed(1)
        assert part_of(0, attempt=2).header.held() == light(0)


def test_a_node_has_one_file_for_what_survivors_complete(monkeypatch):
    """The next rank that survives gets that of the one before, in which nothing counts any more."""
    with memory_of(monkeypatch) as (memory, _):
        first = memory.files.reserve_completed((0, COMPLETED), SIZE)
        assert first.size == SIZE
        CommitBuffer(os.dup(first.fd)).header.seal(completed(0), **OWN)
        second = memory.files.reserve_completed((1, COMPLETED), SIZE // 2)
        assert second is first
        assert (memory.held(), memory.files.usage()) == ((), (SIZE, 0))
        assert memory.files.get((0, COMPLETED)) is None
        CommitBuffer(os.dup(second.fd)).header.seal(completed(1), **OWN)
        assert memory.files.reserve_completed((1, COMPLETED), 2 * SIZE) is second
        assert (memory.held(), second.size) == ((), 2 * SIZE)


def test_a_node_that_has_two_such_files_closes_one(monkeypatch):
    """As an agent that takes over what two agents of its host have left."""
    with memory_of(monkeypatch) as (memory, _):
        for rank in (0, 1):
            sealed(memory, completed(rank), COMPLETED)
        assert memory.files.reserve_completed((0, COMPLETED), SIZE).size == SIZE
        assert memory.files.usage() == (SIZE, 0)


def test_without_memory_nothing_is_completed(monkeypatch):
    """A file that is large enough is used all the same."""
    with memory_of(monkeypatch, most=SIZE) as (memory, _):
        assert memory.files.reserve_completed((0, COMPLETED), SIZE + 1) is None
        assert memory.files.get((0, COMPLETED)) is None
        assert memory.files.reserve_completed((0, COMPLETED), SIZE) is not None
        assert memory.files.reserve_completed((1, COMPLETED), SIZE + 1) is None
        assert memory.files.reserve_completed((1, COMPLETED), SIZE) is not None


@pytest.mark.parametrize(
    ("parts", "dead", "given", "newest"),
    [
        ([light(0, 5), light(0, 6)], [], True, 0),
        ([light(0, 5)], [], True, 0),
        ([light(0, 5), light(0, 6), light(1, 6)], [1], True, 6),
        ([light(0, 5), light(0, 6), light(1, 5)], [1], True, 5),
        ([light(0, 5), light(1, 6), light(2, 5)], [1, 2], True, 5),
        ([light(0, 5), light(1, 6)], [1], True, 6),
        ([light(0, 5), part(0, 6), light(1, 5)], [1], True, 5),
        ([light(0, 5), part(0, 6), light(1, 5), part(1, 6)], [1], False, 6),
        ([light(0, 5), light(1, 5, attempt=2)], [1], False, 0),
        ([part(0, 4), light(0, 5), light(1, 5)], [], True, 0),
        ([light(0, 5), part(0, 6)], [], False, 0),
        ([light(0, 5, attempt=2), light(0, 6, attempt=1)], [], True, 0),
        ([light(0, 5, attempt=2)], [], False, 0),
        ([light(1, 5)], [], False, 0),
        ([], [], False, 0),
    ],
    ids=[
        "two",
        "the first",
        "the dead has both",
        "the dead has the one before",
        "the second of the dead has the one before",
        "the dead has more",
        "the dead has no whole one",
        "the dead has a whole one",
        "the dead has none",
        "whole before",
        "whole",
        "one of another attempt",
        "of another attempt",
        "of another rank",
        "nothing",
    ],
)
def test_what_a_survivor_may_complete(monkeypatch, parts, dead, given, newest):
    """The newest light commit of the attempt that ends which all ranks can have, if there is no newer whole one.

    The file has room for all that is equal on all ranks, behind what is the rank's own.
    """
    with memory_of(monkeypatch) as (memory, _):
        for index, one in enumerate(parts):
            sealed(memory, one, index)
        file, found = memory.file_to_complete(0, dead)
        assert (file is not None, found) == (given, newest)
        if file is not None:
            buffer = CommitBuffer(os.dup(file.fd))
            buffer.header.seal(completed(0), **OWN)
            assert SHARED < buffer.header.part_bytes() <= buffer.size < buffer.header.part_bytes() + 4096


def test_what_an_attempt_goes_on_from_stays_if_that_attempt_makes_no_commit(monkeypatch):
    """No survivor is given the file in which another one has completed it."""
    with memory_of(monkeypatch) as (memory, _):
        for rank in (0, 1):
            sealed(memory, light(rank), LIGHT_BUFFERS[0])
        file, _ = memory.file_to_complete(1, [])
        CommitBuffer(os.dup(file.fd)).header.seal(completed(1), **OWN)
        memory.begin(assign(2, [Member(node="node-0", address="", nproc=2)])[0])
        assert [memory.file_to_complete(rank, []) for rank in (0, 1)] == [(None, 0)] * 2
        assert completed(1) in memory.held()


def test_before_the_first_attempt_nothing_is_completed():
    page, fd = SharedPage.create()
    memory = StateMemory(page, "", None)
    assert memory.file_to_complete(0, []) == (None, 0)
    memory.close()
    os.close(fd)


def test_a_copy_of_a_light_part_is_not_completed(monkeypatch):
    """It is of a rank that was elsewhere."""
    with memory_of(monkeypatch) as (memory, _):
        sealed(memory, light(0, 6), OWN_BUFFERS)
        sealed(memory, part(0, 5))
        assert memory.file_to_complete(0, []) == (None, 0)


# The state keeper.


@pytest.fixture(autouse=True)
def no_zombies(no_leaks):
    """Reap state keepers that have ended, as the end of the agent would."""
    before = children()
    yield

    def reaped() -> bool:
        for pid in children() - before:
            os.waitpid(pid, os.WNOHANG)
        return children() <= before

    until(reaped, "a state keeper is left")


def there_is_one(secret: str) -> bool:
    """Return whether a state keeper listens under a secret's name."""
    client = FdStoreClient(secret)
    try:
        return client.connect()
    except BlockingIOError:  # on a busy machine it has not accepted those who have asked before
        return True
    finally:
        client.leave()


def wait_for_its_end(secret: str) -> None:
    until(lambda: not there_is_one(secret), "the state keeper does not end")


def children() -> set[int]:
    return processes.children()


def killed(client: FdStoreClient) -> None:
    """Let the connection end as it does when the agent is killed."""
    client.disconnect()


def test_the_next_agent_gets_the_files_of_one_that_was_killed():
    secret = secrets.token_hex(8)
    file = os.memfd_create("x")
    os.write(file, b"state")
    first, second = FdStoreClient(secret), FdStoreClient(secret)
    assert not second.connect()
    first.start()
    first.keep(3, 1, file)
    first.keep(4, 0, file)
    os.close(file)
    killed(first)
    assert second.connect()
    found = [*second.take()]
    assert [(rank, index, os.pread(fd, 9, 0)) for rank, index, fd in found] == [(3, 1, b"state"), (4, 0, b"state")]
    for _, _, fd in found:
        os.close(fd)
    second.leave()
    wait_for_its_end(secret)


def test_the_state_keeper_ends_when_no_agent_comes_for_too_long():
    secret = secrets.token_hex(8)
    client = FdStoreClient(secret, seconds=0.1)
    client.start()
    assert there_is_one(secret)
    killed(client)
    wait_for_its_end(secret)


def test_a_second_agent_of_a_host_uses_the_same_state_keeper():
    secret = secrets.token_hex(8)
    clients = [FdStoreClient(secret), FdStoreClient(secret)]
    file = os.memfd_create("x")
    for client in clients:
        client.start()
        client.keep(0, 0, file)
    os.close(file)
    clients[0].leave()
    assert there_is_one(secret)
    clients[1].leave()
    wait_for_its_end(secret)


def test_without_a_secret_there_is_no_state_keeper():
    client = FdStoreClient("")
    client.start()
    assert client.fileno() == -1
    assert not client.connect()


def test_the_state_keeper_has_the_file_of_a_survivor_under_the_rank_that_has_it_now(monkeypatch):
    secret = secrets.token_hex(8)
    with memory_of(monkeypatch, secret) as (memory, _):
        memory.files.reserve_completed((0, COMPLETED), SIZE)
        file = memory.files.reserve_completed((1, COMPLETED), SIZE)
        CommitBuffer(os.dup(file.fd)).header.seal(completed(1), **OWN)
        with memory_of(monkeypatch, secret, attempt=2) as (heir, _):
            assert [key for key, _ in heir.files] == [(1, COMPLETED)]
            assert heir.held() == (completed(1),)
    wait_for_its_end(secret)


def test_an_agent_replaces_a_state_keeper_that_was_killed_and_the_next_agent_finds_all(monkeypatch):
    secret = secrets.token_hex(8)
    before = children()
    with memory_of(monkeypatch, secret):
        buffer_of().header.seal(part(), tensors=0, pickled=0)
        (keeper,) = children() - before
        os.kill(keeper, signal.SIGKILL)
        until(lambda: children() - before - {keeper}, "there is no new state keeper")
        time.sleep(0.05)
        with memory_of(monkeypatch, secret, attempt=2) as (memory, _):
            assert memory.held() == (part(),)
    wait_for_its_end(secret)
