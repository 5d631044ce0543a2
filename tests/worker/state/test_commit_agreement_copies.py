"""Rounds of copies: a model of all orders of commits, copies, killed workers and lost hosts.

The ranks' buffers, the rounds and the choice of the commit are the real ones. The memory of a host is a dict.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.core.machine.commits import Commit, HeldCommit, fetches, lost_steps, newest_complete, safest
from raylaunch.worker.state.commit_agreement import CopyRounds, Proposal
from raylaunch.worker.state.commit_buffer import BUFFERS_WITH_COPIES
from raylaunch.worker.state.rank_buffers import RankBuffers
from raylaunch.worker.state.snapshots.snapshot import Snapshot
from tests.profiles import examples


@dataclass
class Buffer:
    """A `CommitBuffer` and its header in one."""

    commit: HeldCommit | None = None
    is_kept: bool = False
    size: int = 1 << 30

    @property
    def header(self) -> Buffer:
        return self

    def held(self) -> HeldCommit | None:
        return self.commit

    def unseal(self) -> None:
        self.commit = None

    def write_pickle(self, pickled: bytes, *, tensors: int) -> None:
        del pickled, tensors

    def seal(self, held: HeldCommit, *, kept: bool, **_: int) -> None:
        self.commit, self.is_kept = held, kept


@dataclass
class Host:
    """The memory of a host, with one rank."""

    own: dict[int, Buffer] = field(default_factory=dict)
    #: By the rank that has written it.
    copies: dict[int, list[Buffer]] = field(default_factory=dict)
    copied_commit: Commit | None = None

    def held(self) -> tuple[HeldCommit, ...]:
        own = [buffer.commit for buffer in self.own.values() if buffer.commit is not None]
        copies = [buffer.commit for found in self.copies.values() for buffer in found if buffer.commit is not None]
        return (*own, *(replace(one, copied=True) for one in copies))


@dataclass
class ModelClient:
    """The `BufferClient` of a rank of the model."""

    host: Host
    most: int
    """How many buffers the host has memory for."""

    def buffer(self, index: int, size: int = 0, node_bytes: int = 0) -> Buffer | None:
        del node_bytes
        if size and index >= self.most:
            raise MemoryError
        if size:
            self.host.own.setdefault(index, Buffer())
        return self.host.own.get(index)

    def say(self, note: str) -> None:
        pass


class Rank:
    """A rank in one attempt, as `State` makes it. It is also what its node says of commits."""

    def __init__(self, world: World, number: int, chosen: Commit | None, kept: Commit | None) -> None:
        self.world, self.number = world, number
        self.rounds = CopyRounds(kept, 0, len(world.hosts))
        client: Any = ModelClient(world.hosts[number], world.most)
        self.buffers = RankBuffers(client, 0, range(1), spared=chosen, copies=self.rounds)
        self.made = 0
        self.is_writing = False

    def copied_steps(self) -> int:
        copied = self.world.hosts[self.number].copied_commit
        return copied.steps if copied is not None and copied.attempt == self.world.attempt else 0

    @property
    def commit(self) -> Commit:
        return Commit(self.world.attempt, self.world.base + self.made + 1)

    def go(self) -> None:
        """Begin a commit, if all ranks have the last one, or complete the one that is begun."""
        world = self.world
        if not self.is_writing:
            if any(other.made < self.made for other in world.ranks):
                return
            proposal = world.proposals.get(self.made, Proposal())
            if proposal.is_kept:
                self.rounds.begin(self.commit)
            self.buffers.write(Snapshot({}), to_disk=False)
            self.is_writing = True
            return
        held = HeldCommit(rank=self.number, world_size=len(world.hosts), commit=self.commit)
        self.buffers.seal(held, Snapshot({}), 0, 1)
        self.made, self.is_writing = self.made + 1, False
        self.rounds.count(self, world)
        if self.number == 0:
            world.proposals[self.made] = Proposal(is_kept=self.rounds.is_next_due(self, world))


class World:
    """The attempts of a run on so many hosts. It is also the agreement of the ranks."""

    def __init__(self, hosts: int, most: int) -> None:
        self.hosts = [Host() for _ in range(hosts)]
        self.most = most
        self.attempt = self.base = 0
        self.counted_loss: Commit | None = None
        self.restart()

    def count_copied(self, nodes: int) -> int:
        self.counted += nodes
        return self.counted

    def copy(self, which: int, *, is_last: bool = False) -> None:
        """Copy the newest marked commit of a host to the next one, as `StateFiles.writing_copy` does.

        `is_last`: the newest commit, since the workers are about to be stopped.
        """
        host, target = self.hosts[which], self.hosts[(which + 1) % len(self.hosts)]
        own = [buffer for buffer in host.own.values() if buffer.commit is not None and (buffer.is_kept or is_last)]
        own = [buffer for buffer in own if buffer.commit.commit.attempt == self.attempt]
        if not own:
            return
        newest = max(own, key=lambda buffer: buffer.commit.commit)
        commit = newest.commit.commit
        there = [one for one in target.copies.get(which, ()) if one.commit.commit != commit]
        marked = [one.commit.commit for one in there if one.is_kept and one.commit.commit.attempt == self.attempt]
        staying = 1 if newest.is_kept else 2
        safe = {*sorted(marked)[-staying:]} | ({self.chosen, self.kept} if len(marked) < staying else set())
        copy = Buffer(newest.commit, newest.is_kept)
        target.copies[which] = [one for one in there if one.commit.commit in safe] + [copy]
        host.copied_commit = commit

    def save(self, copies: int) -> None:
        """All ranks make the same last commit, and are stopped. This many hosts have copied it by then."""
        while len({rank.made for rank in self.ranks}) > 1 or any(rank.is_writing for rank in self.ranks):
            for rank in self.ranks:
                if rank.is_writing or rank.made < max(other.made for other in self.ranks):
                    rank.go()
        for rank in [*self.ranks, *self.ranks]:
            rank.go()
        for which in range(copies):
            self.copy(which, is_last=True)
        made = self.made_by_all()
        self.restart()
        assert self.base == made

    def restart(self, lost: int | None = None) -> None:
        """Begin the next attempt, with a new host for the one that is lost."""
        if lost is not None:
            self.hosts[lost] = Host()
        held = {f"node-{n}": host.held() for n, host in enumerate(self.hosts)}
        everything = [one for parts in held.values() for one in parts]
        complete = newest_complete(everything)
        newest = max(one.commit for one in everything) if everything else None
        is_counted = newest == self.counted_loss
        self.lost_steps = lost_steps(everything, complete) if complete is not None and not is_counted else 0
        self.counted_loss = newest if self.lost_steps else self.counted_loss
        self.chosen = complete.commit if complete is not None else None
        self.kept = safest(held, {name: name for name in held}) or self.chosen
        if complete is not None:
            needed = {f"node-{n}": [n] for n in range(len(self.hosts))}
            fetched = [
                (node, *each) for node, sources in fetches(held, needed, complete).items() for each in sources.items()
            ]
            for node, source, ranks in fetched:
                assert {one.rank for one in held[source] if complete.has(one)} >= {*ranks}
                for rank in ranks:
                    part = HeldCommit(rank=rank, world_size=len(self.hosts), commit=complete.commit)
                    self.hosts[int(node[5:])].copies.setdefault(rank, []).append(Buffer(part))
        self.attempt += 1
        self.base = self.chosen.steps if self.chosen is not None else 0
        self.counted, self.proposals = 0, {0: Proposal(is_kept=self.kept is not None)}
        self.ranks = [Rank(self, number, self.chosen, self.kept) for number in range(len(self.hosts))]

    def made_by_all(self) -> int:
        return self.base + min(rank.made for rank in self.ranks)

    def safe_steps(self) -> int:
        """Return the steps of the newest commit that is on two hosts."""
        found = safest(
            {f"node-{n}": host.held() for n, host in enumerate(self.hosts)},
            {f"node-{n}": f"node-{n}" for n in range(len(self.hosts))},
        )
        return found.steps if found is not None else 0


moves = st.lists(
    st.tuples(st.sampled_from(("go",) * 12 + ("copy",) * 4 + ("kill", "lose", "save")), st.integers(0, 2)),
    min_size=80,
    max_size=150,
)


@given(hosts=st.integers(2, 3), moves=moves)
@examples(100)
def test_no_commit_is_lost_with_workers_and_none_that_is_copied_with_a_host(hosts, moves):
    """After a loss of workers all goes on from the last commit that all made; of a host, from the last one copied."""
    world = World(hosts, BUFFERS_WITH_COPIES)
    safe = 0
    for move, which in moves:
        if move == "go":
            world.ranks[which % hosts].go()
        elif move == "copy":
            world.copy(which % hosts)
        elif move == "save":
            world.save(which % hosts)
        else:
            made = world.made_by_all()
            world.restart(which % hosts if move == "lose" else None)
            if move == "kill":
                assert world.base == made
            else:
                assert safe <= world.base <= made
                assert not world.chosen or world.base + world.lost_steps >= made
                safe = 0
        safe = max(safe, world.safe_steps())  # what was on two hosts once stays there until something newer is


@given(hosts=st.integers(2, 3), most=st.integers(2, 4), moves=moves)
@examples(50)
def test_without_memory_for_copies_workers_still_lose_nothing(hosts, most, moves):
    world = World(hosts, most)
    for move, which in moves:
        if move == "go":
            world.ranks[which % hosts].go()
        elif move == "copy":
            world.copy(which % hosts)
        elif move == "kill":
            made = world.made_by_all()
            world.restart()
            assert world.base == made


def test_rounds_follow_each_other_as_copies_are_made():
    world = World(2, BUFFERS_WITH_COPIES)
    for _ in range(40):
        for rank in world.ranks:
            rank.go()
        for host in (0, 1):
            world.copy(host)
    assert world.counted >= 10
    assert world.safe_steps() >= world.made_by_all() - 4


@pytest.mark.parametrize("which", [0, 1])
def test_no_round_begins_while_a_node_has_not_copied(which):
    world = World(2, BUFFERS_WITH_COPIES)
    for _ in range(40):
        for rank in world.ranks:
            rank.go()
        world.copy(which)
    assert world.counted <= 1
    assert sum(proposal.is_kept for proposal in world.proposals.values()) == 1


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("copied", [(), (0,), (1,)])
def test_a_planned_change_in_the_middle_of_a_round_costs_nothing_that_is_on_two_hosts(lost, copied):
    """Even if one host has copied the round's commit, and also the last one, before the workers were stopped."""
    world = World(2, BUFFERS_WITH_COPIES)
    while len([proposal for proposal in world.proposals.values() if proposal.is_kept]) < 3:
        for rank in world.ranks:
            rank.go()
        for host in (0, 1):
            world.copy(host)
    for rank in [*world.ranks, *world.ranks]:
        rank.go()  # this begins another round
    safe = world.safe_steps()
    for host in copied:
        world.copy(host)
    world.save(1)
    assert 0 < safe <= world.safe_steps()
    world.restart(lost)
    assert world.base >= safe
