"""The choice of the commit that a world restores, and the rule by which ranks overwrite their older ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_helpers import job, joined, lost, started, stopped

from raylaunch.core.machine.commits import Commit, HeldCommit, newest_complete, reason
from raylaunch.core.machine.events_and_actions import Launch, RestoreCommit, WorkersStarted
from raylaunch.core.machine.machine import Machine
from tests.profiles import examples


def held(rank: int, steps: int, attempt: int = 1, world_size: int = 2) -> HeldCommit:
    return HeldCommit(rank=rank, world_size=world_size, commit=Commit(attempt, steps))


def test_newest_commit_of_all_ranks_is_chosen():
    """Rank 1 died before it had made the last one."""
    assert newest_complete([held(0, 9), held(0, 10), held(1, 8), held(1, 9)], 2) == Commit(1, 9)


def test_commits_of_different_attempts_do_not_belong_together():
    """Rank 0 still has step 11 of the attempt before, which has taken another course since."""
    parts = [held(0, 10), held(0, 11), held(1, 10), held(1, 11, attempt=2)]
    assert newest_complete(parts, 2) == Commit(1, 10)


def test_later_attempt_is_newer_though_it_is_behind():
    """A script that did not restore has begun anew."""
    parts = [held(rank, steps, attempt) for rank in (0, 1) for attempt, steps in ((1, 50), (2, 3))]
    assert newest_complete(parts, 2) == Commit(2, 3)


@pytest.mark.parametrize(
    ("parts", "size", "why"),
    [
        ([held(0, 7), held(1, 7)], 2, "the state after 7 steps is restored from memory"),
        ([held(0, 1), held(1, 1)], 2, "the state after 1 step is restored from memory"),
        ([held(0, 7)], 2, "do not have the part of rank 1"),
        ([held(0, 7, world_size=8)], 8, "do not have the part of rank 1, 2, 3, 4 and 3 more"),
        ([held(0, 7), held(1, 7)], 3, "it is that of 2 workers, and there are 3 now"),
    ],
)
def test_reason_says_what_is_restored_or_lost(parts, size, why):
    assert why in reason(parts, size, newest_complete(parts, size))


parts_of_commits = st.lists(
    st.builds(held, st.integers(-1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4)), max_size=30
)


@given(parts=parts_of_commits, size=st.integers(1, 4))
@examples(300)
def test_no_shard_lacks_the_chosen_commit_and_no_newer_one_is_complete(parts, size):
    ranks = {}
    for part in parts:
        if part.world_size == size and part.rank in range(size):
            ranks.setdefault(part.commit, set()).add(part.rank)
    complete = {commit for commit, found in ranks.items() if len(found) == size}
    chosen = newest_complete(parts, size)
    assert chosen == (max(complete) if complete else None)


class Rank:
    """A rank as `RankBuffers` and `CommitAgreement` make it: two buffers, of which it overwrites the older one."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.buffers: list[HeldCommit | None] = [None, None]
        self.begin(None, 0)

    def begin(self, spared: Commit | None, steps: int) -> None:
        """Another attempt."""
        commits = [part.commit if part else None for part in self.buffers]
        self.next = commits.index(spared) ^ 1 if spared in commits and spared is not None else 0
        self.made = 0
        self.steps = steps
        self.is_writing = False


@given(
    size=st.integers(1, 3),
    every=st.integers(1, 2),
    moves=st.lists(st.tuples(st.sampled_from(("go", "go", "go", "go", "kill")), st.integers(0, 2)), max_size=80),
)
@examples(300)
def test_no_commit_that_all_ranks_have_made_is_ever_lost(size, every, moves):
    """Ranks go on in any order, no collective holds them together, and all are killed at any moment."""
    ranks, attempt, all_made = [Rank(number) for number in range(size)], 1, 0
    for move, which in moves:
        if move == "kill":
            found = [part for rank in ranks for part in rank.buffers if part is not None]
            chosen = newest_complete(found, size)
            assert (chosen.steps if chosen else 0) == all_made
            attempt += 1
            for rank in ranks:
                rank.begin(chosen, all_made)
            continue
        rank = ranks[which % size]
        if rank.is_writing:
            commit = HeldCommit(rank=rank.number, world_size=size, commit=Commit(attempt, rank.steps))
            rank.buffers[rank.next], rank.is_writing = commit, False
            rank.next ^= 1
            rank.made += 1
            if all(other.made >= rank.made for other in ranks):
                all_made = rank.steps
        elif all(other.made >= rank.made for other in ranks):  # what `CommitAgreement.wait` waits for
            rank.steps += every
            rank.buffers[rank.next], rank.is_writing = None, True


def world_started(machine: Machine, *parts: HeldCommit) -> list[RestoreCommit]:
    """Have both nodes report that their workers are started, with these parts."""
    found = []
    for node, rank in zip(machine.roster, (0, 1), strict=True):
        own = tuple(part for part in parts if part.rank == rank)
        found += machine.handle(WorkersStarted(at=1.0, attempt=machine.attempt, node=node, held=own))
    return [action for action in found if isinstance(action, RestoreCommit)]


def running_machine(**settings) -> Machine:
    machine = Machine(job(2, **settings))
    machine.start()
    machine.handle(joined("a", nproc=1))
    machine.handle(joined("b", nproc=1))
    return machine


def test_workers_are_told_what_to_restore_once_all_are_started():
    (action,) = world_started(running_machine(), held(0, 6), held(0, 7), held(1, 6))
    assert (action.commit, action.nodes, action.attempt) == (Commit(1, 6), ("a", "b"), 1)


def test_nothing_is_sent_where_no_node_holds_anything():
    """As in every run whose script does not use `State`."""
    assert world_started(running_machine()) == []


def test_a_part_that_is_missing_is_said():
    (action,) = world_started(running_machine(), held(0, 7))
    assert action.commit is None
    assert action.why.endswith("do not have the part of rank 1")


def test_the_node_that_replaces_a_lost_one_on_its_host_gets_its_ranks():
    """The memory of that host has the parts of these ranks."""
    machine = running_machine()
    for node in machine.roster:
        machine.handle(started(node, 1.0))
    machine.handle(lost("a", 2.0))
    machine.handle(stopped("b", 2.5))
    (launch,) = [
        action for action in machine.handle(joined("c", 3.0, nproc=1, host="host-of-a")) if isinstance(action, Launch)
    ]
    assert launch.roster == ("c", "b")
