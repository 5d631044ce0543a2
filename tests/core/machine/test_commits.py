"""The choice of the commit that a world restores, and the rule by which ranks overwrite their older ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_helpers import draining, failed, job, joined, lost, progressed, started, stopped

from raylaunch.core.machine.commits import (
    Commit,
    CompleteCommit,
    HeldCommit,
    KnownCommits,
    PartFetch,
    RestoreCommit,
    fetches,
    lost_steps,
    newest_complete,
    reason,
    safest,
)
from raylaunch.core.machine.events_and_actions import (
    Launch,
    RequestCheckpoint,
    Tick,
    WorkersStarted,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.restoring import restore_commit
from raylaunch.core.machine.state import World
from raylaunch.core.newtypes import NodeId
from raylaunch.core.placement.environment import Member
from tests.profiles import examples


def held(rank: int, steps: int, attempt: int = 1, world_size: int = 2) -> HeldCommit:
    return HeldCommit(rank=rank, world_size=world_size, commit=Commit(attempt, steps))


def test_newest_commit_of_all_ranks_is_chosen():
    """Rank 1 died before it had made the last one."""
    assert newest_complete([held(0, 9), held(0, 10), held(1, 8), held(1, 9)]) == CompleteCommit(Commit(1, 9), 2)


def test_commits_of_different_attempts_do_not_belong_together():
    """Rank 0 still has step 11 of the attempt before, which has taken another course since."""
    parts = [held(0, 10), held(0, 11), held(1, 10), held(1, 11, attempt=2)]
    assert newest_complete(parts) == CompleteCommit(Commit(1, 10), 2)


def test_later_attempt_is_newer_though_it_is_behind():
    """A script that did not restore has begun anew."""
    parts = [held(rank, steps, attempt) for rank in (0, 1) for attempt, steps in ((1, 50), (2, 3))]
    assert newest_complete(parts) == CompleteCommit(Commit(2, 3), 2)


def test_a_commit_of_another_world_is_chosen_if_it_is_the_newest():
    parts = [held(0, 5, 1, 1), *(held(rank, 9, 2, 3) for rank in range(3)), held(0, 11, 2, 3)]
    assert newest_complete(parts) == CompleteCommit(Commit(2, 9), 3)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([held(0, 7), held(1, 7)], "the state after 7 steps is restored from memory"),
        ([held(0, 1), held(1, 1)], "the state after 1 step is restored from memory"),
        ([held(0, 7)], "do not have the part of rank 1"),
        ([held(0, 7, world_size=8)], "do not have the part of rank 1, 2, 3, 4 and 3 more"),
    ],
)
def test_reason_says_what_is_restored_or_lost(parts, why):
    assert why in reason(parts, newest_complete(parts))


parts_of_commits = st.lists(
    st.builds(held, st.integers(-1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4)), max_size=30
)


@given(parts=parts_of_commits)
@examples(300)
def test_no_part_lacks_the_chosen_commit_and_no_newer_one_is_complete(parts):
    ranks = {}
    for part in parts:
        if part.rank in range(part.world_size):
            ranks.setdefault((part.commit, part.world_size), set()).add(part.rank)
    complete = {(commit, size) for (commit, size), found in ranks.items() if len(found) == size}
    chosen = newest_complete(parts)
    assert chosen == (CompleteCommit(*max(complete)) if complete else None)


@pytest.mark.parametrize(
    ("replicated", "world_size", "parts"),
    [(False, 4, (2, 3)), (True, 4, (2, 3)), (False, 3, (0, 1, 2, 3)), (True, 6, (2, 3)), (True, 3, (2, 3))],
)
def test_the_parts_that_a_node_needs(replicated, world_size, parts):
    """For ranks 2 and 3 of the next world. The commit is that of 4 ranks."""
    found = CompleteCommit(Commit(1, 9), 4, replicated)
    assert found.parts_for(range(2, 4), world_size) == parts


def test_ranks_beyond_a_replicated_commit_share_its_parts():
    assert CompleteCommit(Commit(1, 9), 2, replicated=True).parts_for(range(2, 6), 6) == (0, 1)


def test_a_commit_is_replicated_if_all_its_parts_are():
    parts = [replace(held(0, 7), replicated=True), held(1, 7)]
    assert not newest_complete(parts).replicated
    assert newest_complete([replace(part, replicated=True) for part in parts]).replicated


# Shared tensors.


def shared(rank: int, steps: int = 9, *, by: int = 2, world_size: int = 6, digest: int = 5) -> HeldCommit:
    """Return the part of a rank of a node of `by` ranks, who divide what is equal on all."""
    first = rank // by * by
    return replace(held(rank, steps, world_size=world_size), first_sharer=first, sharers=by, digest=digest)


@pytest.mark.parametrize(
    ("replicated", "world_size", "ranks", "parts"),
    [
        (True, 6, (2, 3), (2, 3)),
        (True, 6, (3, 4), (2, 3, 4, 5)),  # nodes have other ranks now
        (True, 8, (6, 7), (0, 1)),
        (True, 3, (2,), (2, 3)),
        (False, 3, (2,), (0, 1, 2, 3, 4, 5)),
    ],
)
def test_a_node_needs_the_parts_of_all_who_share(replicated, world_size, ranks, parts):
    chosen = newest_complete([replace(shared(rank), replicated=replicated) for rank in range(6)])
    assert chosen.parts_for(ranks, world_size) == parts


def test_nothing_more_is_needed_of_ranks_that_share_nothing():
    parts = [shared(0), shared(1), replace(held(2, 9, world_size=3), digest=5)]
    chosen = newest_complete([replace(one, world_size=3) for one in parts])
    assert (chosen.parts_for((1,), 3), chosen.parts_for((2,), 3)) == ((0, 1), (2,))


def test_a_commit_in_which_shared_tensors_differ_is_not_restored():
    parts = [*(shared(rank, 8) for rank in range(6)), *(shared(rank, 9, digest=5 + (rank == 4)) for rank in range(6))]
    assert newest_complete(parts) == CompleteCommit(Commit(1, 8), 6)
    why = reason(parts[6:], newest_complete(parts[6:]))
    assert why.endswith("parameters that DistributedDataParallel keeps equal differed between the ranks")


@pytest.mark.parametrize("first", [-1, 5])
def test_a_part_that_names_others_than_ranks_is_none(first):
    assert newest_complete([replace(shared(rank), first_sharer=first) for rank in range(6)]) is None


# Copies.


def copy(rank: int, steps: int, attempt: int = 1, world_size: int = 2) -> HeldCommit:
    return replace(held(rank, steps, attempt, world_size), copied=True)


def test_each_part_that_a_node_lacks_is_fetched_from_a_node_that_gives_few():
    everything = [held(rank, 7, world_size=4) for rank in range(4)]
    there = {"a": everything[:2], "b": everything, "c": everything[3:], "d": [held(0, 6, world_size=4)]}
    needed = {"a": (0, 1), "b": (2, 3), "c": (3,), "d": (0, 1, 2, 3)}
    found = fetches(there, needed, CompleteCommit(Commit(1, 7), 4))
    assert found == (
        PartFetch(node="d", part=0, source="a"),
        PartFetch(node="d", part=1, source="b"),
        PartFetch(node="d", part=2, source="b"),
        PartFetch(node="d", part=3, source="c"),
    )


@given(
    parts=parts_of_commits, places=st.lists(st.sampled_from("abc"), min_size=30, max_size=30), size=st.integers(1, 4)
)
@examples(200)
def test_every_node_has_or_fetches_all_parts_that_it_needs(parts, places, size):
    there = {node: [part for part, place in zip(parts, places, strict=False) if place == node] for node in "abc"}
    chosen = newest_complete(parts)
    if chosen is None:
        return
    needed = {node: chosen.parts_for(range(size), size) for node in "abc"} if size != chosen.world_size else {}
    found = fetches(there, needed, chosen)
    for node, wanted in needed.items():
        own = {part.rank for part in there[node] if chosen.has(part)}
        fetched = [fetch.part for fetch in found if fetch.node == node]
        assert sorted(fetched) == sorted(set(wanted) - own)
    for fetch in found:
        assert any(chosen.has(part) and part.rank == fetch.part for part in there[fetch.source])


def test_the_safest_commit_is_the_newest_whose_parts_are_all_on_two_hosts():
    hosts = {"a": "host-1", "b": "host-2", "c": "host-2"}
    there = {
        "a": [held(0, 7), held(0, 8), held(0, 9), copy(1, 7), copy(1, 8)],
        "b": [held(1, 7), held(1, 8), held(1, 9), copy(0, 7), copy(1, 9)],
        "c": [copy(0, 8), copy(1, 9)],
    }
    assert safest(there, hosts) == Commit(1, 8)
    assert safest({"a": there["a"], "b": [copy(1, 7)]}, hosts) is None


@pytest.mark.parametrize(
    ("parts", "lost"),
    [
        ([held(0, 7), held(0, 9), copy(1, 7)], 2),
        ([held(0, 7), held(0, 8), held(1, 7)], 0),
        ([held(0, 7), copy(1, 7)], 0),
        ([held(0, 9), held(0, 9, 2), held(0, 3, 2), copy(0, 9), copy(1, 9)], 0),
    ],
)
def test_steps_are_lost_with_a_host_of_which_only_copies_are_left(parts, lost):
    """A rank that has died in the middle of a commit has lost none, since its commit was none yet."""
    chosen = newest_complete(parts)
    assert lost_steps(parts, chosen) == lost
    assert ("more step" in reason(parts, chosen, lost)) == bool(lost)


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
            complete = newest_complete(found)
            chosen = complete.commit if complete is not None else None
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


def running_machine(nnodes: int | str = 2, **settings) -> Machine:
    machine = Machine(job(nnodes, **settings))
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


def test_a_newcomer_fetches_the_parts_of_its_ranks():
    """The ranks of the nodes that are left have moved, too."""
    machine = running_machine()
    held_by = {"a": (held(0, 7), copy(1, 7), held(0, 8)), "b": ()}
    events = [
        WorkersStarted(at=1.0, attempt=1, node=node, held=parts, awaits_commit=True) for node, parts in held_by.items()
    ]
    assert machine.handle(events[0]) == []
    (action, *_) = machine.handle(events[1])
    assert isinstance(action, RestoreCommit)
    assert action.fetches == (PartFetch(node="b", part=1, source="a"),)
    assert (action.commit, action.kept, action.world_size, action.lost_steps) == (Commit(1, 7), Commit(1, 7), 2, 1)


def test_workers_that_were_not_told_to_wait_restore_nothing_and_so_nobody_does():
    machine = running_machine()
    parts = (held(0, 7), copy(1, 7))
    machine.handle(WorkersStarted(at=1.0, attempt=1, node="a", held=parts))
    (action, *_) = machine.handle(WorkersStarted(at=1.0, attempt=1, node="b"))
    assert action.commit is None
    assert action.why == "the state cannot be restored from memory: workers of b have begun without it"


def test_nodes_that_wait_are_told_that_there_is_nothing():
    machine = running_machine()
    machine.handle(WorkersStarted(at=1.0, attempt=1, node="a", awaits_commit=True))
    (action, *_) = machine.handle(WorkersStarted(at=1.0, attempt=1, node="b"))
    assert (action.commit, action.fetches, action.nodes) == (None, (), ("a", "b"))


def test_a_loss_is_counted_once():
    """Though the attempt after it fails before the new node's rank has made a commit."""
    members = tuple(Member(node=node, address="", nproc=1, host=f"host-of-{node}") for node in "ab")
    known, found = KnownCommits(), []
    for attempt in (2, 3):
        world = World(attempt=attempt, roster=("a", "b"), members=members, size=2, known=known)
        world.held = {"a": (held(0, 7), held(0, 9), copy(1, 7)), "b": (copy(1, 7),)}
        (action,) = restore_commit(world)
        found.append(action.lost_steps)
    assert (found, known.counted_loss) == ([2, 0], Commit(1, 9))


def orphans(machine: Machine, *parts: HeldCommit) -> RestoreCommit:
    """Lose node b, whose state keeper still has these parts, while both nodes train; return what node a is told."""
    for node in machine.roster:
        machine.handle(started(node, 1.0))
    machine.handle(replace(lost("b", 2.0), held=parts))
    return first_restored(machine, *(replace(held(0, one.commit.steps), replicated=one.replicated) for one in parts))


def first_restored(machine: Machine, *parts: HeldCommit) -> RestoreCommit:
    """Have node a report that its workers are started, with these parts; return what it is told."""
    attempt = machine.attempt
    (action, *_) = machine.handle(WorkersStarted(at=3.0, attempt=attempt, node="a", held=parts, awaits_commit=True))
    assert isinstance(action, RestoreCommit)
    return action


def test_what_the_state_keeper_of_a_lost_node_holds_is_not_lost():
    """Its agent was killed. Node a needs no part of it, since all ranks have the same tensors."""
    action = orphans(running_machine("1:2"), *(replace(held(1, steps), replicated=True) for steps in (7, 8)))
    assert (action.commit, action.lost_steps, action.fetches, action.kept) == (Commit(1, 8), 0, (), None)


def sharded(machine: Machine) -> RestoreCommit:
    """What there is has shards, so that node a needs that of rank 1, too."""
    return orphans(machine, held(1, 8))


def test_parts_are_fetched_from_the_state_keeper_of_a_lost_node():
    action = sharded(running_machine("1:2"))
    assert action.fetches == (PartFetch(node="a", part=1, source="b"),)


def test_a_lost_node_is_the_last_from_which_a_part_is_fetched():
    held_by = {"lost": (held(1, 7),), "a": (held(0, 7), copy(1, 7)), "b": ()}
    chosen = CompleteCommit(Commit(1, 7), 2)
    (fetch,) = fetches(held_by, {"b": (1,)}, chosen, last=("lost",))
    assert fetch.source == "a"


def test_a_state_keeper_that_is_gone_meanwhile_is_not_asked_for_ever():
    """Attempts that fetch from there make no step, until the commit is given up."""
    members = (Member(node="a", address="", nproc=1, host="host-of-a"),)
    known, found = KnownCommits(orphaned={NodeId("b"): (held(1, 8),)}), []
    for attempt in (2, 3, 4, 5):
        world = World(attempt=attempt, roster=("a",), members=members, size=1, known=known)
        world.held = {"a": (held(0, 7), held(0, 8), copy(1, 7))}
        (action,) = restore_commit(world)
        found.append(action.commit.steps)
    assert (found, known.orphaned) == ([8, 8, 8, 7], {})


@pytest.mark.parametrize(("makes_step", "tries"), [(True, 0), (False, 1)])
def test_an_attempt_that_makes_a_step_shows_that_the_state_keeper_was_there(makes_step, tries):
    machine = running_machine("1:2", max_restarts=9)
    sharded(machine)
    if makes_step:
        machine.handle(progressed(3.5, attempt=2))
    machine.handle(failed("a", 4.0, attempt=2))
    assert (machine.attempt, machine.world.known.tries, [*machine.world.known.orphaned]) == (3, tries, ["b"])


def test_orphaned_parts_are_forgotten_when_something_newer_is_restored():
    machine = running_machine("1:2", max_restarts=9)
    sharded(machine)
    machine.handle(failed("a", 4.0, attempt=2))
    assert first_restored(machine, held(0, 9, attempt=2, world_size=1)).commit == Commit(2, 9)
    assert machine.world.known.orphaned == {}


def test_a_node_that_is_drained_while_workers_start_is_left_when_its_commits_are_restored():
    """It may have the only parts of the newest commit, and its time is not over yet."""
    machine = running_machine("1:2", max_restarts=9)
    world_started(machine, held(0, 7), held(1, 7))
    machine.handle(failed("a", 2.0, attempt=1))
    assert machine.handle(draining("b", 3.0, deadline=33.0)) == []
    (action,) = world_started(machine, held(0, 7), held(1, 7))
    assert (action.commit, action.nodes) == (Commit(1, 7), ("a", "b"))
    (asked, *_) = machine.handle(Tick(at=4.0))
    assert isinstance(asked, RequestCheckpoint)
