"""Two agents without processes: one copies what its ranks commit to the other, and gets back what it lacks."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import NoneType, SimpleNamespace

import msgspec
import pytest
from msgspec import msgpack

from raylaunch.capabilities.state import commit_copies
from raylaunch.capabilities.state.agent import StateCopies
from raylaunch.capabilities.state.sections import StateGoal, StateStatus
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.commits import Commit, CopyAddress, HeldCommit, Holder, RestoreOrder
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.placement.environment import Member, assign
from raylaunch.node.linux.fd_store import FdStore, FdStoreClient
from raylaunch.node.state import inheritance, transfer
from raylaunch.node.state.fast_dir import FastDir
from raylaunch.node.state.part_server import PartServer
from raylaunch.node.state.state_files import FIRST_COPY, StateFiles
from raylaunch.node.state.state_memory import StateMemory
from raylaunch.node.state.transfer import CopyRefusedError, TornError
from raylaunch.worker.heartbeats import shared_page as fields
from raylaunch.worker.heartbeats.shared_page import SharedPage
from raylaunch.worker.state import commit_buffer
from raylaunch.worker.state.commit_buffer import COMPLETED_BUFFER, LIGHT_BUFFERS, CommitBuffer
from tests.fakes import agent_port
from tests.node.harness import until

SIZE = 3 * 2**20
SECRET = "1" * 64
JOB = Job(entrypoint=Entrypoint(script="train.py"))
SHARED = 2**20 + 100
INTERVAL = 7
WORLD = [Member(node=NodeId(f"node-{n}"), address="", nproc=2, host=f"host-{n}") for n in (0, 1)]


@dataclass
class Side:
    """One agent's part: the node of ranks 0 and 1, or that of 2 and 3."""

    number: int
    most: int | None = None
    job: Job = JOB
    secret: str = ""
    reports: list[StateStatus | str] = field(default_factory=list)
    """What it tells the driver, and a person, but where it serves."""

    def __post_init__(self) -> None:
        self.page, self.fd = SharedPage.create()
        self.store = FdStoreClient()
        self.memory = StateMemory(self.page, self.secret, self.most, store=self.store)
        port = agent_port(
            spec=SimpleNamespace(node=NodeId(f"node-{self.number}"), copy_secret=SECRET, job=self.job),
            address="127.0.0.1",
            host=HostId(f"host-{self.number}"),
            memory=self.memory,
            call=lambda work: work(),
            tell=lambda section: self.reports.append(msgpack.decode(section, type=StateStatus)),
            warn=self.reports.append,
        )
        self.copies = StateCopies(port)
        self.address = self.reports.pop().at
        self.begin(1)

    def show(self, attempt: int, **goal) -> None:
        self.copies.shown(msgpack.encode(StateGoal(attempt=attempt, **goal)))

    def begin(self, attempt: int) -> None:
        self.page.numbers[fields.ATTEMPT] = attempt
        self.copies.workers(assign(attempt, WORLD)[self.number], ())

    def copy_to(self, target: Side, attempt: int = 1) -> None:
        self.show(attempt, copies_to=target.address)

    @property
    def ranks(self) -> tuple[int, int]:
        return 2 * self.number, 2 * self.number + 1

    def commit(self, steps: int, *, attempt: int = 1, index: int = 0, kept: bool = True) -> None:
        for rank in self.ranks:
            self.seal(part(rank, steps, attempt), index, kept=kept)
        self.copies.workers_changed()

    def seal(self, one: HeldCommit, index: int = 0, *, kept: bool = True, size: int = SIZE) -> CommitBuffer:
        assert self.memory.files.reserve((one.rank, index), size) == ""
        buffer = CommitBuffer(os.dup(self.memory.files.get((one.rank, index)).fd))
        buffer.header.unseal()
        buffer.write_pickle(content(one), tensors=SIZE // 2)
        sizes = {"tensors": SIZE // 2, "pickled": len(content(one)), "shared": SHARED}
        start = commit_buffer.share_start(sizes["tensors"], sizes["pickled"])
        memoryview(buffer.memory).cast("B")[start : start + len(share(one))] = share(one)
        buffer.header.seal(one, **sizes, kept=kept, interval=INTERVAL)
        return buffer

    def restore(self, order: RestoreOrder) -> None:
        """The first rank says what its node restores."""
        self.memory.on_restore(msgspec.json.encode(order).decode())

    def wait_for_stop(self) -> None:
        """The workers of the node wait to be stopped."""
        for local_rank in range(len(self.ranks)):
            self.page.numbers[fields.slot_offset(local_rank) + fields.WAITING_FOR_STOP] = 1

    def told_of(self) -> list[Holder]:
        """Return what the first rank learns of what there is; empty: that is not known yet."""
        return msgspec.json.decode(self.memory.on_restore("") or "[]", type=list[Holder])

    def has(self, one: HeldCommit) -> bool:
        """Return whether the node has the part as it was committed."""
        file = self.memory.files.find(one.rank, one.commit, one.world_size)
        if file is None:
            return False
        buffer = CommitBuffer(os.dup(file.fd))
        start, part_of_it = buffer.header.share()
        found = bytes(memoryview(buffer.memory).cast("B")[start : start + len(part_of_it)])
        is_same = (buffer.read_pickle(), found, buffer.header.held()) == (content(one), share(one), one)
        return is_same and buffer.header.interval == INTERVAL

    def is_told(self) -> bool:
        """Return whether the workers know what to restore."""
        return self.page.numbers[fields.RESTORE_DECIDED] == self.page.numbers[fields.ATTEMPT]

    def copied(self) -> int:
        return self.page.numbers[fields.COPIED_STEPS]

    def close(self) -> None:
        self.copies.close()
        self.memory.close()
        os.close(self.fd)


def part(rank: int, steps: int, attempt: int = 1) -> HeldCommit:
    first = rank // 2 * 2
    return HeldCommit(
        rank=rank, world_size=4, commit=Commit(attempt, steps), first_sharer=first, sharers=2, digest=steps
    )


def light(rank: int, steps: int) -> HeldCommit:
    return replace(part(rank, steps), light=True)


def completed(rank: int, steps: int) -> HeldCommit:
    """Return the part to which a survivor has added what is equal on all."""
    return replace(part(rank, steps), first_sharer=rank, sharers=1)


def share(one: HeldCommit) -> bytes:
    """Return the rank's share of what is equal on all."""
    found = f"share {one.rank} {one.commit.steps} ".encode() * 2 * 10**5
    share_of_it = commit_buffer.share_of(SHARED, one.rank - one.first_sharer, one.sharers)
    return found[: 0 if one.light else len(share_of_it)]


def content(one: HeldCommit) -> bytes:
    return f"{one.rank} {one.commit}".encode() * 1000


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    found = Side(0), Side(1)
    yield found
    for side in found:
        side.close()


def serving(*sides: Side) -> None:
    for side in sides:
        side.commit(1, index=1, kept=False)


def test_what_all_ranks_of_a_node_have_marked_is_copied_and_an_older_copy_stays_until_the_next_one(sides):
    first, second = sides
    serving(first, second)
    assert (first.copied(), first.page.numbers[fields.COPYING]) == (0, 0)
    first.copy_to(second)
    assert first.page.numbers[fields.COPYING] == 1
    first.seal(part(0, 5), 0)
    first.seal(part(1, 4), 0)
    for steps, index in ((5, 0), (6, 2), (7, 3), (8, 0)):
        first.commit(steps, index=index)
        until(lambda steps=steps: first.copied() == steps, "the copy to be made")
        assert second.has(part(0, steps))
        assert second.has(part(1, steps))
        assert second.has(part(0, steps - 1)) == (steps > 5)
    start = commit_buffer.share_start(SIZE // 2, len(content(part(0, 8))))
    assert second.memory.files.usage() == (2 * SIZE, 4 * start + 2 * SHARED)
    assert {one.copied for one in second.memory.held() if one.rank < 2} == {True}


def test_a_node_without_state_copies_nothing_and_its_first_commit_begins_that(sides):
    """No thread looks for commits of a script that makes none."""
    first, second = sides
    first.copy_to(second)
    assert first.page.numbers[fields.COPYING] == 1
    assert "raylaunch-state-copies" not in {each.name for each in threading.enumerate()}
    assert first.reports == []
    first.commit(5)
    until(lambda: first.copied() == 5, "the copy to be made")
    assert first.reports == []


def test_a_part_that_is_copied_again_does_not_cost_the_one_before(sides):
    """As after a connection that broke before the answer came."""
    first, second = sides
    serving(first, second)
    for steps, index in ((5, 0), (6, 1), (6, 1)):
        first.seal(part(0, steps), index)
        commit_copies.push(first.memory.files, second.address, SECRET, (part(0, steps),))
    assert second.has(part(0, 5))
    assert second.has(part(0, 6))


def test_a_new_agent_fetches_the_parts_of_its_ranks_before_its_workers_are_told(sides):
    first, second = sides
    serving(first, second)
    first.copy_to(second)
    first.commit(5)
    until(lambda: first.copied() == 5, "the copy to be made")
    newcomer = Side(0)
    newcomer.begin(2)
    commit = Commit(1, 5)
    order = RestoreOrder(commit=commit, world_size=4, kept=commit, sources=((second.address, (0, 1)),))
    newcomer.restore(order)
    until(lambda: newcomer.page.numbers[fields.RESTORE_DECIDED] == 2, "the parts to be there")
    assert newcomer.has(part(0, 5))
    assert newcomer.has(part(1, 5))
    assert newcomer.page.numbers[fields.KEPT_STEPS] == 5
    newcomer.close()


def test_a_part_that_is_not_there_is_asked_for_again_until_the_next_attempt(sides):
    first, second = sides
    serving(first, second)
    order = RestoreOrder(commit=Commit(1, 9), world_size=4, sources=((second.address, (3,)),))
    first.restore(order)
    until(lambda: any(isinstance(report, str) for report in first.reports), "the failure to be said")
    assert first.reports[-1] == "a node cannot get its state from node-1: this node does not have the part"
    second.seal(part(3, 9))
    until(first.is_told, "the part to be there")
    first.begin(2)


def test_a_node_that_is_to_copy_to_another_one_than_before_still_gets_what_it_fetches(sides):
    """Another node has begun to serve, or is drained, while the attempt begins."""
    first, second = sides
    serving(first, second)
    first.copy_to(second)
    order = RestoreOrder(commit=Commit(1, 9), world_size=4, sources=((second.address, (3,)),))
    first.restore(order)
    first.copy_to(second)
    second.seal(part(3, 9))
    until(first.is_told, "the part to be there")
    assert first.has(part(3, 9))


def test_a_node_fetches_light_parts_and_the_whole_one_of_a_survivor_elsewhere(sides):
    """Also of a rank of which it has the light part. What it has whole, it does not fetch."""
    first, second = sides
    serving(first, second)
    for rank in (2, 3):
        second.seal(light(rank, 9), LIGHT_BUFFERS[0])
    second.seal(completed(2, 9), COMPLETED_BUFFER)
    first.seal(light(2, 9), FIRST_COPY)
    first.seal(completed(0, 9), COMPLETED_BUFFER)
    order = RestoreOrder(commit=Commit(1, 9), world_size=4, sources=((second.address, (0, 2, 3)),))
    first.restore(order)
    until(first.is_told, "the parts to be there")
    assert first.has(completed(0, 9))
    assert first.has(completed(2, 9))
    assert first.has(light(3, 9))
    assert [one for one in first.reports if isinstance(one, str)] == []


def test_light_commits_are_not_copied_to_other_hosts(sides):
    """Without what is equal on all ranks they are worth nothing there."""
    first, second = sides
    serving(first, second)
    first.copy_to(second)
    first.commit(5)
    for rank in first.ranks:
        first.seal(light(rank, 6), LIGHT_BUFFERS[0], kept=False)
    until(lambda: first.copied() == 5, "the copy to be made")
    assert {one.commit.steps for one in first.memory.to_copy(1)} == {5}
    assert not second.has(light(0, 6))


def test_workers_that_wait_to_be_stopped_make_no_other_commit(sides):
    """What they have committed is copied, though it was not to be; but nothing light."""
    first, second = sides
    serving(first, second)
    first.commit(5, kept=False)
    for rank in first.ranks:
        first.seal(light(rank, 6), LIGHT_BUFFERS[0], kept=False)
    first.copy_to(second)
    assert first.memory.to_copy(1) == ()
    first.page.numbers[fields.COMMITTED_STEP] = 9
    assert first.memory.to_copy(1) == ()  # they train on until then
    first.wait_for_stop()
    until(lambda: first.copied() == 5, "the copy to be made")
    assert second.has(part(0, 5))


def test_the_commit_of_the_step_after_which_workers_are_stopped_is_copied(sides):
    """None before it: that would cost the time for this one."""
    first, _ = sides
    first.commit(7, index=0)
    first.commit(8, index=1, kept=False)
    first.page.numbers[fields.COMMITTED_STEP] = 9
    assert {one.commit.steps for one in first.memory.to_copy(1)} == {7}
    first.commit(9, index=2, kept=False)
    assert {one.commit.steps for one in first.memory.to_copy(1)} == {9}


def copies_of_rank_0(*, most: int | None = None) -> set[int]:
    """Return of which steps a node has copies: of two marked commits, and of a last one that was not marked."""
    first, second = Side(0), Side(1, most=most)
    serving(first)
    for steps, index, is_marked in ((5, 0, True), (6, 2, True), (7, 3, False)):
        first.seal(part(0, steps), index, kept=is_marked)
        commit_copies.push(first.memory.files, second.address, SECRET, (part(0, steps),), is_marked=is_marked)
    found = {steps for steps in (5, 6, 7) if second.has(part(0, steps))}
    first.close()
    second.close()
    return found


def test_the_last_commit_costs_no_copy_of_one_that_is_on_two_hosts_everywhere():
    """Another node may not have copied the newest marked one yet, so all keep the one before it too."""
    assert copies_of_rank_0() == {5, 6, 7}


def test_without_memory_for_a_third_copy_the_last_commit_is_copied_all_the_same():
    """Nodes leave for certain; that another one is lost just then is less likely."""
    assert copies_of_rank_0(most=SIZE * 2) == {6, 7}


def test_before_the_second_marked_commit_of_an_attempt_the_last_one_costs_no_copy_of_what_was_restored(sides):
    first, second = sides
    serving(first, second)
    second.seal(part(0, 3), FIRST_COPY)
    second.begin(2)
    second.memory.announce(RestoreOrder(commit=Commit(1, 3), world_size=4))
    for steps, index, is_marked in ((5, 0, True), (7, 3, False)):
        first.seal(part(0, steps, 2), index, kept=is_marked)
        commit_copies.push(first.memory.files, second.address, SECRET, (part(0, steps, 2),), is_marked=is_marked)
    assert second.has(part(0, 3))
    assert second.has(part(0, 5, 2))
    assert second.has(part(0, 7, 2))


def test_what_a_node_fetches_costs_no_copy_of_what_is_on_two_hosts(sides):
    """If the newest commit has no copy, an older one must stay; and if the newest copy is not everywhere, one still older."""
    first, second = sides
    serving(first, second)
    for steps, index in ((5, FIRST_COPY), (6, FIRST_COPY + 1)):
        first.seal(part(2, steps), index)
    second.seal(part(2, 7), 2, kept=False)
    first.begin(2)
    order = RestoreOrder(commit=Commit(1, 7), kept=Commit(1, 5), world_size=4, sources=((second.address, (2,)),))
    first.restore(order)
    until(first.is_told, "the part to be there")
    assert first.has(part(2, 7))
    assert first.has(part(2, 5))


def test_copies_count_for_the_limit_and_the_lack_of_memory_is_said(sides):
    first, _ = sides
    small = Side(1, most=5 * SIZE // 2)
    small.commit(1, kept=False)
    serving(first)
    first.copy_to(small)
    first.commit(5)
    until(lambda: any(isinstance(report, str) for report in first.reports), "the failure to be said")
    assert "a node has no copy of its state on node-1: the buffers of `State` need" in first.reports[-1]
    assert first.copied() == 0
    small.close()


def test_stale_files_are_freed_when_newer_ones_are_copied_twice(sides):
    """Those of the last attempt's ranks that this node does not have any more, and copies that it has got."""
    first, second = sides
    serving(first, second)
    second.seal(part(0, 1), FIRST_COPY)
    second.memory.begin(assign(2, [WORLD[1], WORLD[0]])[0])
    second.memory.announce(RestoreOrder(commit=Commit(1, 1), world_size=4))
    second.seal(part(0, 3, 2), 0)
    second.seal(part(1, 3, 2), 0)
    second.memory.copied(Commit(2, 3))
    assert second.has(part(0, 1))
    assert second.has(part(2, 1))
    second.seal(part(0, 4, 2), 2)
    second.memory.copied(Commit(2, 4))
    assert second.page.numbers[fields.COPIED_STEPS] == 4
    assert not second.has(part(0, 1))
    assert not second.has(part(2, 1))


# A connection.


def test_a_part_that_is_overwritten_while_it_is_read_is_not_sealed(sides, monkeypatch):
    first, second = sides
    serving(first, second)
    whole = transfer.part_bytes
    looks = []

    def overwritten(fd: int, one: HeldCommit) -> int:
        looks.append(fd)
        if len(looks) == 2:
            first.seal(part(0, 6), 0)
        return whole(fd, one)

    monkeypatch.setattr(transfer, "part_bytes", overwritten)
    first.seal(part(0, 5), 0)
    with pytest.raises(CopyRefusedError, match="changed while it was copied"):
        commit_copies.push(first.memory.files, second.address, SECRET, (part(0, 5),))
    assert not second.has(part(0, 5))
    with pytest.raises(TornError, match="overwritten before it was copied"):
        commit_copies.push(first.memory.files, second.address, SECRET, (part(0, 5),))


def test_damaged_bytes_are_noticed(sides):
    first, second = sides
    serving(first, second)
    one = part(0, 5)
    with transfer.connection(second.address, SECRET) as line:
        transfer.ask(line, NoneType, "push", part=one, size=5000)
        line.sendall(bytes(5000) + transfer.TRAILER.pack(True, 1))
        with pytest.raises(CopyRefusedError, match="its checksum is wrong"):
            transfer.read_answer(line, NoneType)


@pytest.mark.parametrize(
    "garbage",
    [
        {"do": "push", "part": HeldCommit(rank=-1, world_size=4, commit=Commit(1, 1)), "size": 5000},
        {"do": "push", "part": HeldCommit(rank=0, world_size=4, commit=Commit(1, 1)), "size": 10},
        {"do": "push", "part": HeldCommit(rank=4, world_size=4, commit=Commit(1, 1)), "size": 5000},
        {"do": "push", "size": 5000},
        {"do": "push", "part": HeldCommit(rank="0", world_size=4, commit=Commit(1, 1)), "size": 5000},
        {"do": "fetch", "part": HeldCommit(rank=0, world_size=4, commit=Commit(1, 1 << 60))},
        {"do": "?"},
    ],
)
def test_nonsense_ends_the_connection(sides, garbage):
    serving(sides[0])
    with transfer.connection(sides[0].address, SECRET) as line, pytest.raises(ConnectionResetError):
        transfer.ask(line, NoneType, **garbage)


def test_more_than_the_node_may_hold_is_refused_before_it_is_sent(sides):
    serving(sides[0])
    with (
        transfer.connection(sides[0].address, SECRET) as line,
        pytest.raises(CopyRefusedError, match="of this node's memory"),
    ):
        transfer.ask(line, NoneType, "push", part=part(2, 5), size=1 << 39)


def test_without_the_secret_there_is_no_connection(sides):
    serving(sides[0])
    address = sides[0].address
    with socket.create_connection((address.host, address.port), timeout=60) as line:
        line.sendall(b"0" * 64 + b" copies\n")
        assert line.recv(1) == b""


@pytest.mark.parametrize("one", [light(1, 5), completed(3, 5), part(0, 5), replace(part(2, 5), copied=True)])
def test_what_is_said_of_a_part_in_a_list(one):
    """Nothing of it is lost on the way."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        transfer.answer(ours, [one, part(1, 4)])
        assert transfer.read_answer(theirs, tuple[HeldCommit, ...]) == (one, part(1, 4))


def held_by(address: CopyAddress, secret: str = SECRET) -> tuple[HeldCommit, ...]:
    with transfer.connection(address, secret) as line:
        return transfer.ask(line, tuple[HeldCommit, ...], "held")


@pytest.fixture
def killed() -> Iterator[Side]:
    """An agent whose ranks have made commits, and which was killed. Its subreaper serves in its place."""
    side = Side(0, secret=secrets.token_hex(8))
    for steps, index in ((5, 0), (6, 1)):
        side.commit(steps, index=index, kept=False)
    for rank in side.ranks:
        side.seal(light(rank, 9), LIGHT_BUFFERS[0], kept=False)
    side.seal(completed(0, 9), COMPLETED_BUFFER, kept=False)
    store = FdStore(side.store.connect().detach())
    side.store.send_all()
    store.receive()
    side.close()
    server = inheritance.serve(store.fds)
    yield side
    server.close()
    store.close()


def test_the_subreaper_of_an_agent_that_was_killed_gives_what_it_holds_to_others(killed):
    found = held_by(killed.address)
    whole = {part(rank, steps) for rank in (0, 1) for steps in (5, 6)} | {completed(0, 9)}
    assert {*found} == whole | {light(rank, 9) for rank in (0, 1)}
    other = Side(1)
    other.begin(2)
    source = replace(killed.address, outside=True)
    order = RestoreOrder(commit=Commit(1, 6), world_size=4, sources=((source, (0, 1)),))
    other.restore(order)
    until(lambda: other.page.numbers[fields.RESTORE_DECIDED] == 2, "the parts to be there")
    assert other.has(part(0, 6))
    assert other.has(part(1, 6))
    other.close()


def test_the_subreaper_of_an_agent_that_was_killed_gives_the_whole_part_of_a_survivor(killed):
    """Though it has the light one, too."""
    other = Side(1)
    other.begin(2)
    source = replace(killed.address, outside=True)
    order = RestoreOrder(commit=Commit(1, 9), world_size=4, sources=((source, (0, 1)),))
    other.restore(order)
    until(lambda: other.page.numbers[fields.RESTORE_DECIDED] == 2, "the parts to be there")
    assert other.has(light(1, 9))
    is_whole = other.has(completed(0, 9))
    other.close()
    assert is_whole


def test_the_subreaper_knows_who_may_ask_and_takes_nothing(killed):
    with pytest.raises(ConnectionError, match="does not admit"):
        held_by(killed.address, "0" * 64)
    with transfer.connection(killed.address, SECRET) as line:
        with pytest.raises(CopyRefusedError, match="may use 0"):
            transfer.ask(line, NoneType, "push", part=part(0, 7), size=5000)
        with pytest.raises(CopyRefusedError, match="this node does not have the part"):
            transfer.ask(line, int, "fetch", part=part(0, 4))


def test_silent_strangers_do_not_keep_out_those_who_know_the_secret_of_a_killed_agent(killed):
    """The rules of all ports hold here too."""
    held_by(killed.address)  # it has begun to serve
    with contextlib.ExitStack() as stack:
        for _ in range(80):
            stack.enter_context(socket.create_connection((killed.address.host, killed.address.port)))
        assert held_by(killed.address)


def test_what_no_other_agent_is_to_have_is_freed():
    """Not even a copy that is being made meanwhile stays. Else the subreaper would hold everything for a minute."""
    side = Side(0, secret=secrets.token_hex(8))
    side.commit(5, kept=False)
    store = FdStore(side.store.connect().detach())
    side.store.send_all()
    side.copies.close()
    side.memory.close()
    assert list(side.memory.files) == []
    assert side.memory.files.reserve((2, FIRST_COPY), SIZE) == ""
    store.receive()
    assert store.fds == {}
    store.close()
    os.close(side.fd)


def test_workers_are_told_even_where_the_subreaper_is_gone_meanwhile(sides):
    """They say what they lack; nobody waits for ever."""
    first, second = sides
    serving(first)
    gone = replace(first.address, outside=True)
    first.copies.close()
    order = RestoreOrder(commit=Commit(1, 6), world_size=4, sources=((gone, (0,)),))
    second.restore(order)
    until(lambda: second.page.numbers[fields.RESTORE_DECIDED] == 1, "the workers to be told")
    assert not second.has(part(0, 6))
    assert any("cannot get its state from node-0" in each for each in second.reports if isinstance(each, str))


def test_the_node_of_rank_0_asks_what_killed_agents_have_left(killed):
    """Before the ranks choose what to restore. A subreaper that is gone has nothing."""
    side = Side(1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = replace(killed.address, port=server.getsockname()[1], node=NodeId("gone"))
    side.show(2, lost=(replace(killed.address, outside=True), gone))
    side.begin(2)
    until(side.told_of, "the answer")
    own, found = side.told_of()
    assert (own.at, own.ranks, found.at) == (side.address, (2, 3), replace(killed.address, outside=True))
    assert {one.commit.steps for one in found.held} == {5, 6, 9}
    side.begin(3)
    assert side.told_of() == [own]
    side.close()


def test_one_that_has_not_answered_costs_the_next_attempts_little_time(sides, monkeypatch):
    """Its host is gone, most likely. But one that could not be reached for a while is asked again."""
    side, other = sides
    gone, waits = replace(other.address, node=NodeId("gone"), outside=True), []

    def connection(address: CopyAddress, _: str, *, seconds: float) -> contextlib.AbstractContextManager[socket.socket]:
        waits.append((address.node, seconds))
        raise TimeoutError

    monkeypatch.setattr(transfer, "connection", connection)
    for attempt in (2, 3, 4):
        side.show(attempt, lost=(gone,))
        side.begin(attempt)
        until(side.told_of, "the end of that")
    side.show(5, lost=(replace(gone, node=NodeId("other")),))
    side.begin(5)
    until(side.told_of, "the end of that")
    long, short = max(seconds for _, seconds in waits), min(seconds for _, seconds in waits)
    assert short < long / 5
    assert waits == [("gone", long), ("gone", short), ("gone", short), ("other", long)]


def test_one_that_answers_again_has_as_much_time_as_at_first(sides, monkeypatch):
    """As when its host was cut off for a while."""
    side, other = sides
    waits, connection = [], transfer.connection
    away = iter([True, True, False, True])

    def connect(address: CopyAddress, secret: str, *, seconds: float):
        waits.append(seconds)
        if next(away):
            raise TimeoutError
        return connection(address, secret)

    monkeypatch.setattr(transfer, "connection", connect)
    for attempt in (2, 3, 4, 5):
        side.show(attempt, lost=(replace(other.address, outside=True),))
        side.begin(attempt)
        until(side.told_of, "the end of that")
        assert len(side.told_of()) == (2 if attempt == 4 else 1)
    long, short = max(waits), min(waits)
    assert waits == [long, short, short, long]


def test_agents_that_are_killed_while_all_are_asked_at_once_are_asked_again():
    """Their subreapers answer then, at the same ports."""
    side = Side(1)
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        asked = tuple(
            CopyAddress(node=NodeId(f"killed-{number}"), host="127.0.0.1", port=one.getsockname()[1], outside=True)
            for number, one in enumerate(ports)
        )
        side.show(2, lost=asked)
        side.begin(2)
        for line in [one.accept()[0] for one in reversed(ports)]:  # the second, before the first is answered
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
            line.close()
        for one in ports:
            subreaper = PartServer(one.dup(), StateFiles("", 0, FastDir()), secret=SECRET)
            stack.callback(subreaper.close)
            subreaper.start()
        until(side.told_of, "the answers")
    assert [one.at for one in side.told_of()] == [side.address, *asked]
    side.close()


@dataclass
class Spec:
    """What a worker is started from."""

    env: dict[str, str]


def test_workers_are_told_where_buffers_and_checkpoints_are(tmp_path):
    """What the job itself sets wins, and not what the submitter has."""
    env = {"RAYLAUNCH_DURABLE_KEEP": "9"}
    job = replace(JOB, durable=str(tmp_path), durable_every=5.0, env=env)
    side = Side(0, job=job)
    (spec,) = side.copies.workers(assign(2, WORLD)[0], (Spec({**env, "RAYLAUNCH_DURABLE": "/other"}),))
    assert spec.env == {
        "RAYLAUNCH_STATE": side.memory.address,
        "RAYLAUNCH_DURABLE": str(tmp_path),
        "RAYLAUNCH_DURABLE_EVERY": "5",
        "RAYLAUNCH_DURABLE_KEEP": "9",
    }
    side.close()


def test_survivors_without_a_commit_wait_for_the_next_attempt_and_a_person_is_told_once(sides):
    """The driver is told so by the node of rank 0."""
    nothing = RestoreOrder(lost="a part is missing")
    for side in sides:
        side.show(2, has_survivors=True)
        side.begin(2)
        side.restore(nothing)
        assert not side.is_told()
    assert sides[0].reports == ["a part is missing", StateStatus(at=sides[0].address, stuck_attempt=2)]
    assert sides[1].reports == []
    sides[1].begin(3)
    sides[1].restore(nothing)
    assert sides[1].is_told()
