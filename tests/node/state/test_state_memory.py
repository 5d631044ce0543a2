"""The memory that a node holds for `State`: who gets it, how much there is, and what outlives the agent."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from raylaunch.core.machine.commits import Commit, HeldCommit, RestoreOrder
from raylaunch.core.placement.environment import Member, assign
from raylaunch.node.linux.fd_store import FdStore, FdStoreClient
from raylaunch.node.linux.ram_folder import RamFolder
from raylaunch.node.state.fast_dir import FastDir
from raylaunch.node.state.state_files import FIRST_COPY, MemoryFile, StateFiles
from raylaunch.node.state.state_memory import StateMemory
from raylaunch.worker.heartbeats import shared_page as fields
from raylaunch.worker.heartbeats.shared_page import SharedPage
from raylaunch.worker.state import buffer_client
from raylaunch.worker.state.buffer_client import Request
from raylaunch.worker.state.commit_agreement import orders
from raylaunch.worker.state.commit_buffer import COMPLETED_BUFFER, LIGHT_BUFFERS, OWN_BUFFERS, CommitBuffer
from tests.node.harness import restore_alone

SIZE = 100_000


def part(rank: int = 0, steps: int = 5) -> HeldCommit:
    return HeldCommit(rank=rank, world_size=2, commit=Commit(1, steps))


def own_name(monkeypatch, memory: StateMemory) -> None:
    monkeypatch.setenv(buffer_client.ADDRESS_VARIABLE, memory.address)


@contextmanager
def memory_of(monkeypatch, secret: str = "", most: int | None = None, attempt: int = 1, **more):
    """A node with both workers of a world, whose memory is served by a thread, as the agent's event loop does."""
    page, fd = SharedPage.create()
    memory = StateMemory(page, secret, most, **more)
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


def test_what_to_restore_is_on_the_page(monkeypatch):
    with memory_of(monkeypatch) as (memory, page):
        assert page.numbers[fields.RESTORE_DECIDED] == 0
        memory.announce(RestoreOrder(commit=Commit(4, 8), world_size=6))
        found = [page.numbers[field] for field in range(fields.RESTORE_DECIDED, fields.RESTORE_WORLD_SIZE + 1)]
        assert found == [1, 4, 8, 6]


def test_the_first_rank_learns_what_the_node_holds_when_all_workers_are_there(monkeypatch):
    """Before, a survivor may still complete a light commit."""
    with memory_of(monkeypatch) as (memory, page):
        restore_alone(memory)
        for rank in (0, 1):
            buffer_of(rank).header.seal(part(rank), tensors=0, pickled=0)
        memory.begin(assign(2, [Member(node="node-0", address="", nproc=1)])[0])
        ask = Request(attempt=2, rank=0, index=0, asks_held=True)
        assert buffer_client.ask(ask) == (None, "")
        memory.is_final = True
        order = orders([buffer_client.ask(ask)[1]], 1)[0]
        assert buffer_client.ask(Request(attempt=2, rank=0, index=0, order=order)) == (None, "")
        assert page.numbers[fields.RESTORE_DECIDED : fields.RESTORE_WORLD_SIZE + 1].tolist() == [2, 1, 5, 2]


@pytest.mark.parametrize("order", ["{", "[]", '{"commit": 3}'])
def test_what_is_no_order_is_refused(monkeypatch, order):
    with memory_of(monkeypatch) as (memory, page):
        restore_alone(memory)
        memory.is_final = True
        with pytest.raises(ConnectionError):
            buffer_client.ask(Request(attempt=1, rank=0, index=0, order=order))
        assert page.numbers[fields.RESTORE_DECIDED] == 0


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
        memory.announce(RestoreOrder(commit=Commit(1, 5), world_size=2))
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
        memory.announce(RestoreOrder(commit=Commit(1, 5), world_size=2))
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
        file, found = memory.file_to_complete(1, 0, dead)
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
        file, _ = memory.file_to_complete(1, 1, [])
        CommitBuffer(os.dup(file.fd)).header.seal(completed(1), **OWN)
        memory.begin(assign(2, [Member(node="node-0", address="", nproc=2)])[0])
        assert [memory.file_to_complete(2, rank, []) for rank in (0, 1)] == [(None, 0)] * 2
        assert completed(1) in memory.held()


def test_before_the_first_attempt_nothing_is_completed():
    page, fd = SharedPage.create()
    memory = StateMemory(page, "", None)
    assert memory.file_to_complete(1, 0, []) == (None, 0)
    memory.close()
    os.close(fd)


def test_a_copy_of_a_light_part_is_not_completed(monkeypatch):
    """It is of a rank that was elsewhere."""
    with memory_of(monkeypatch) as (memory, _):
        sealed(memory, light(0, 6), OWN_BUFFERS)
        sealed(memory, part(0, 5))
        assert memory.file_to_complete(1, 0, []) == (None, 0)


# What the next agent of a run on the host gets.


def stored(client: FdStoreClient) -> FdStore:
    """Return a store as the subreaper has it, with all that the agent has put into it."""
    store = FdStore(client.connect().detach())
    client.send_all()
    store.receive()
    return store


@contextmanager
def killed_agent(monkeypatch) -> Iterator[tuple[str, RamFolder]]:
    """Give the secret of a run of which an agent was killed that had a commit of both ranks, and its folder."""
    secret, folder, client = secrets.token_hex(8), RamFolder(), FdStoreClient()
    folder.create()
    with memory_of(monkeypatch, secret, folder=folder, store=client):
        for rank in (0, 1):
            buffer_of(rank=rank).header.seal(part(rank), tensors=0, pickled=0)
        store = stored(client)
    folder.abandon()
    with contextlib.closing(store), contextlib.closing(client):
        yield secret, folder
    folder.remove()


def test_the_next_agent_gets_the_files_of_one_that_was_killed(monkeypatch):
    with killed_agent(monkeypatch) as (secret, folder), memory_of(monkeypatch, secret, attempt=2) as (memory, _):
        assert memory.held() == (part(0), part(1))
        assert not os.path.exists(folder.root)
        assert [key for key, _ in memory.files] == [(0, 0), (1, 0)]


def test_an_agent_of_another_run_gets_nothing_of_them(monkeypatch):
    with killed_agent(monkeypatch) as (_, folder):
        for secret in (secrets.token_hex(8), ""):
            with memory_of(monkeypatch, secret) as (memory, _):
                assert memory.held() == ()
        assert os.path.exists(folder.root)


def test_the_agent_after_the_next_one_gets_them_too(monkeypatch):
    folder, client = RamFolder(), FdStoreClient()
    folder.create()
    with (
        killed_agent(monkeypatch) as (secret, _),
        memory_of(monkeypatch, secret, attempt=2, folder=folder, store=client),
    ):
        store = stored(client)
    folder.abandon()
    with contextlib.closing(store), memory_of(monkeypatch, secret, attempt=3) as (memory, _):
        assert memory.held() == (part(0), part(1))
    client.close()


def test_nothing_is_taken_from_an_agent_that_lives(monkeypatch):
    """Several agents of a run may be on one host."""
    secret, folder, client = secrets.token_hex(8), RamFolder(), FdStoreClient()
    folder.create()
    with memory_of(monkeypatch, secret, folder=folder, store=client) as (first, _):
        buffer_of().header.seal(part(), tensors=0, pickled=0)
        with contextlib.closing(stored(client)), memory_of(monkeypatch, secret) as (second, _):
            assert (first.held(), second.held()) == ((part(),), ())
    client.close()
    folder.remove()


def test_nothing_is_taken_from_processes_of_another_agent(monkeypatch):
    """They do not have the folder of the one that was killed."""
    with killed_agent(monkeypatch) as (secret, _):
        run = StateFiles(secret, None, FastDir()).folder.run
        file = MemoryFile.create(run, 3)
        os.ftruncate(file.fd, SIZE)
        file.header().seal(part(0, steps=9), tensors=0, pickled=0)
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[file.fd]) as other:
            file.close()
            with memory_of(monkeypatch, secret, attempt=2) as (memory, _):
                assert memory.held() == (part(0), part(1))
            other.communicate()


def test_the_file_of_a_survivor_is_found_once(monkeypatch):
    """Though another rank had it before."""
    secret, folder, client = secrets.token_hex(8), RamFolder(), FdStoreClient()
    folder.create()
    with memory_of(monkeypatch, secret, folder=folder, store=client) as (memory, _):
        memory.files.reserve_completed((0, COMPLETED), SIZE)
        file = memory.files.reserve_completed((1, COMPLETED), SIZE)
        CommitBuffer(os.dup(file.fd)).header.seal(completed(1), **OWN)
        store = stored(client)
    folder.abandon()
    with contextlib.closing(store), memory_of(monkeypatch, secret, attempt=2) as (heir, _):
        assert heir.held() == (completed(1),)
        assert heir.files.find(1, Commit(1, 5), 2).held() == completed(1)
    client.close()


def test_what_is_freed_is_not_in_the_store(monkeypatch):
    """A closed descriptor may be another file's by then."""
    secret, client = secrets.token_hex(8), FdStoreClient()
    with memory_of(monkeypatch, secret, store=client) as (memory, _):
        buffer_of(rank=0), buffer_of(rank=1)
        with contextlib.closing(stored(client)) as store:
            assert store.fds.keys() == {"0 0", "1 0"}
            memory.files.drop(lambda key, _: key[0] == 0)
            store.receive()
            assert store.fds.keys() == {"1 0"}
            memory.files.close()
            assert memory.files.reserve((2, FIRST_COPY), SIZE) == ""
            store.receive()
            assert store.fds == {}
    client.close()


def test_what_cannot_be_put_into_the_store_is_told_to_the_worker(monkeypatch):
    """Once it can, there is no such note."""
    request = Request(attempt=1, rank=0, index=0, bytes=SIZE)
    with memory_of(monkeypatch, secrets.token_hex(8)):
        with monkeypatch.context() as patch:
            patch.setattr(FdStoreClient, "keep", lambda *_: (_ for _ in ()).throw(OSError(24, "Too many open files")))
            fd, note = buffer_client.ask(request)
            os.close(fd)
            assert "what `State` holds will not survive the agent: Too many open files" in note
        fd, note = buffer_client.ask(replace(request, rank=1))
        os.close(fd)
        assert note == ""
