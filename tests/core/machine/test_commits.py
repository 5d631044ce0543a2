"""The choice of the commit that a world restores, and the rule by which ranks overwrite their older ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_helpers import draining, failed, job, joined, lost, started, stopped

from raylaunch.core.machine.commits import (
    Commit,
    CompleteCommit,
    CopyAddress,
    HeldCommit,
    Holder,
    RestoreOrder,
    choose,
    fetches,
    loss,
    lost_steps,
    newest_complete,
    safest,
)
from raylaunch.core.machine.events_and_actions import Launch, RequestCheckpoint, Tick
from raylaunch.core.machine.machine import Machine
from raylaunch.core.newtypes import HostId, NodeId
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
        ([held(0, 7)], "do not have the part of rank 1"),
        ([held(0, 7, world_size=8)], "do not have the part of rank 1, 2, 3, 4 and 3 more"),
        ([held(0, 7), held(1, 7, world_size=3)], "do not have the part of rank 1"),
    ],
)
def test_what_cannot_be_restored_is_said(parts, why):
    assert why in loss(parts, newest_complete(parts))


def test_if_nothing_is_lost_nothing_is_said():
    assert loss([held(0, 7), held(1, 7), held(0, 8)], CompleteCommit(Commit(1, 7), 2)) == loss([], None) == ""


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


def test_a_part_of_another_world_is_not_one_of_its_parts():
    chosen = CompleteCommit(Commit(1, 9), 2)
    assert [chosen.has(one) for one in (held(0, 9), held(0, 9, world_size=3), held(0, 8))] == [True, False, False]


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
    why = loss(parts[6:], newest_complete(parts[6:]))
    assert why.endswith("parameters that DistributedDataParallel keeps equal differed between the ranks")


@pytest.mark.parametrize(("first", "sharers"), [(-1, 2), (5, 2), (3, -1)])
def test_a_part_that_names_others_than_ranks_is_none(first, sharers):
    parts = [replace(shared(rank), first_sharer=first, sharers=sharers) for rank in range(6)]
    assert newest_complete(parts) is None


# Light commits: three nodes of two ranks, as above.


def light(rank: int, steps: int = 9, **changes: int) -> HeldCommit:
    """Return a part without what is equal on all ranks."""
    return replace(shared(rank, steps, **changes), light=True)


def completed(rank: int, steps: int = 9, **changes: int) -> HeldCommit:
    """Return the part of a survivor, which has added all of that."""
    return replace(shared(rank, steps, **changes), first_sharer=rank, sharers=1)


LIGHT = [light(rank) for rank in range(6)]


def test_a_light_commit_is_chosen_only_if_a_survivor_has_completed_it():
    before = [shared(rank, 4) for rank in range(6)]
    assert newest_complete([*before, *LIGHT]) == CompleteCommit(Commit(1, 4), 6)
    assert newest_complete([*before, *LIGHT, completed(3)]) == CompleteCommit(Commit(1, 9), 6)
    assert newest_complete(LIGHT) is None


@pytest.mark.parametrize("missing", [0, 3])
def test_a_light_commit_that_a_rank_lacks_is_not_chosen_though_it_is_completed(missing):
    """The rank died before it had made its part, which nobody else has."""
    parts = [one for one in LIGHT if one.rank != missing]
    assert newest_complete([*parts, completed(1)]) is None


@pytest.mark.parametrize("digest", [4, 6])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_light_commit_in_which_shared_tensors_differ_is_not_chosen(digest, rank):
    """Of a light part, and of the one that is completed."""
    parts = [*LIGHT, completed(3)]
    assert newest_complete([one if one.rank != rank else replace(one, digest=digest) for one in parts]) is None
    why = loss([*LIGHT, completed(3, digest=digest)], None)
    assert why.endswith("parameters that DistributedDataParallel keeps equal differed between the ranks")


def test_parts_that_one_node_divided_among_its_ranks_complete_no_light_commit():
    """None of them has everything; one of a rank that is alone on its node has."""
    assert newest_complete([shared(0), shared(1), *LIGHT[2:]]) is None
    assert newest_complete([shared(0, by=1), *LIGHT[1:]]) == CompleteCommit(Commit(1, 9), 6)


def test_a_rank_whose_share_is_missing_is_not_completed_by_another_one():
    """Rank 1 has a share, and rank 0, of the same node, is light: nobody has the other share of that part."""
    assert newest_complete([light(0), shared(1), completed(2), *LIGHT[3:]]) is None


@pytest.mark.parametrize("parts", [[*LIGHT, completed(3)], [completed(3), *LIGHT]])
def test_of_a_light_and_a_whole_part_of_a_rank_the_whole_one_counts(parts):
    assert newest_complete(parts).sharing == {rank: range(3, 4) for rank in range(6)}


def test_a_light_part_is_restored_with_a_whole_one_of_its_node_if_there_is_one():
    """Of the third node no rank survived: it takes that of the lowest rank."""
    chosen = newest_complete([*LIGHT, completed(1), completed(3)])
    nodes = {0: range(1, 2), 1: range(1, 2), 2: range(3, 4), 3: range(3, 4), 4: range(1, 2), 5: range(1, 2)}
    assert chosen.sharing == nodes


def test_ranks_that_share_nothing_may_be_part_of_a_light_commit():
    """They have all of their own tensors."""
    parts = [light(0, world_size=2), completed(0, world_size=2), replace(held(1, 9), digest=5)]
    assert newest_complete(parts).sharing == {0: range(1)}


@pytest.mark.parametrize("first", [-1, 5])
def test_a_light_part_that_names_others_than_ranks_is_none(first):
    """So rank 2 has none, and the commit is not complete."""
    parts = [*LIGHT, completed(4)]
    assert newest_complete([one if one.rank != 2 else replace(one, first_sharer=first) for one in parts]) is None


@pytest.mark.parametrize(
    ("world_size", "ranks", "parts"),
    [
        (6, (4, 5), (1, 4, 5)),
        (6, (2, 3), (2, 3)),
        (6, (0,), (0, 1)),
        (8, (6, 7), (0, 1)),
        (8, (4, 5, 7), (1, 4, 5)),
        (3, (2,), (2, 3)),
        (1, (0,), (0, 1)),
    ],
)
def test_a_node_needs_a_whole_part_of_a_light_commit_besides_those_of_its_ranks(world_size, ranks, parts):
    """Ranks 1 and 3 have survived, also for a world of another size."""
    everything = [replace(one, replicated=True) for one in [*LIGHT, completed(1), completed(3)]]
    assert newest_complete(everything).parts_for(ranks, world_size) == parts


def test_the_light_part_of_a_rank_whose_whole_one_is_needed_is_none_of_a_commit():
    chosen = newest_complete([*LIGHT, completed(3)])
    assert [chosen.has(one) for one in LIGHT] == [True, True, True, False, True, True]
    assert chosen.has(completed(3))
    assert not chosen.has(light(2, 8))


def test_a_node_that_has_only_the_light_part_of_a_survivor_fetches_the_whole_one():
    """Ranks are on other nodes than before: of rank 3, which survived on b, node a has a light part only."""
    there = {"a": [*LIGHT[:2], light(3)], "b": [light(2), light(3), completed(3)], "c": LIGHT[4:]}
    chosen = newest_complete(one for parts in there.values() for one in parts)
    needed = {node: chosen.parts_for(ranks, 6) for node, ranks in {"a": (0, 1), "b": (2, 3), "c": (4, 5)}.items()}
    assert fetches(there, needed, chosen) == {"a": {"b": [3]}, "b": {}, "c": {"b": [3]}}


def test_nothing_is_fetched_of_a_light_commit_where_each_node_has_a_survivor():
    there = {"a": [*LIGHT[:2], completed(0)], "b": [*LIGHT[2:4], completed(3)], "c": [*LIGHT[4:], completed(4)]}
    chosen = newest_complete(one for parts in there.values() for one in parts)
    needed = {node: chosen.parts_for(ranks, 6) for node, ranks in {"a": (0, 1), "b": (2, 3), "c": (4, 5)}.items()}
    assert fetches(there, needed, chosen) == {"a": {}, "b": {}, "c": {}}


def test_light_parts_make_no_commit_safe():
    """Without what is equal on all ranks they are worth nothing when the host of the survivors is lost."""
    hosts = {"a": "host-1", "b": "host-2"}
    whole = [shared(rank, 4, world_size=2) for rank in (0, 1)]
    newer = [light(rank, world_size=2) for rank in (0, 1)]
    assert safest({"a": [*whole, *newer], "b": [*whole, *newer]}, hosts) == Commit(1, 4)
    assert safest({"a": newer, "b": newer}, hosts) is None
    both = [completed(rank, world_size=2) for rank in (0, 1)]
    assert safest({"a": both, "b": both}, hosts) == Commit(1, 9)


@pytest.mark.parametrize(
    ("parts", "steps", "ranks"),
    [
        ([shared(0, 4), *LIGHT[:2]], 4, "1, 2, 3, 4 and 1 more"),
        ([*LIGHT[:4], completed(3)], 9, "4, 5"),
        (LIGHT[:5], 9, "5"),
    ],
    ids=["there was a whole one before", "it is completed", "there is nothing else"],
)
def test_what_cannot_be_restored_is_what_is_not_light_if_there_is_such_a_commit(parts, steps, ranks):
    assert newest_complete(parts) is None
    why = f"after {steps} steps cannot be restored from memory: the nodes that are left do not have the part of rank"
    assert loss(parts, None).endswith(f"{why} {ranks}")


def test_light_commits_that_are_lost_with_a_host_count_as_lost_steps():
    """Training had made these steps. Where all ranks are left, nothing is lost with a host."""
    kept = [replace(shared(rank, 4), copied=rank > 3) for rank in range(6)]
    left = [*kept, *LIGHT[:4]]
    assert lost_steps(left, newest_complete(left)) == 5
    all_there = [*(shared(rank, 4) for rank in range(6)), *LIGHT[:5]]
    assert lost_steps(all_there, newest_complete(all_there)) == 0
    restored = [*left, *LIGHT[4:], completed(2)]
    assert lost_steps(restored, newest_complete(restored)) == 0


@st.composite
def shared_parts(draw: st.DrawFn) -> list[HeldCommit]:
    """Draw parts of two commits of up to four ranks, light or whole, by nodes of up to four ranks, in any order.

    What a rank has of a commit is light, maybe completed, or a share, or everything, on one or two nodes.
    """
    size, by = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (4, 4)]))
    found = []
    for steps in (8, 9):
        usual = draw(st.sampled_from(("light", "light", "share")))
        for rank in range(size):
            kind = draw(st.sampled_from((usual,) * 6 + ("light", "apart", "none")))
            one = replace(shared(rank, steps, by=by, world_size=size), light=kind == "light")
            one = replace(one, digest=draw(st.sampled_from((5,) * 8 + (6,))))
            if kind == "apart":
                one = replace(one, first_sharer=0, sharers=0)
            if kind == "light" and draw(st.booleans()):
                found += [replace(one, first_sharer=rank, sharers=1, light=False)] * draw(st.integers(1, 2))
            if kind != "none":
                found += [one] * draw(st.integers(1, 2))
    return draw(st.permutations(found))


@given(parts=shared_parts(), places=st.lists(st.sampled_from("abc"), min_size=32, max_size=32), size=st.integers(1, 5))
@examples(300)
def test_nothing_is_chosen_of_which_a_tensor_is_nowhere(parts, places, size):
    """Each node has, after what it fetches, all parts of its ranks, and shares or one whole part of all tensors."""
    there = {node: [part for part, place in zip(parts, places, strict=False) if place == node] for node in "abc"}
    chosen = newest_complete(one for found in there.values() for one in found)
    if chosen is None:
        return
    everything = [one for found in there.values() for one in found]
    assert chosen.commit <= max(one.commit for one in everything)
    ranks = {node: range(size)[number::3] for number, node in enumerate("abc")}
    needed = {node: chosen.parts_for(each, size) for node, each in ranks.items()}
    found = fetches(there, needed, chosen)
    for node, wanted in needed.items():
        sources = {part: source for source, ranks_of_it in found[node].items() for part in ranks_of_it}
        assert {*sources} | {one.rank for one in there[node] if chosen.has(one)} >= set(wanted)
        own = {rank: _best(there[sources.get(rank, node)], chosen, rank) for rank in wanted}
        for rank in [rank for rank in wanted if size == chosen.world_size and rank in ranks[node]]:
            if own[rank].light:
                assert any(_is_whole(own[each]) for each in wanted)
            else:
                assert not any(own[each].light for each in own[rank].sharing)


def _best(parts: list[HeldCommit], chosen: CompleteCommit, rank: int) -> HeldCommit:
    """Return the part of a rank that a node has: as `StateFiles.find` does, one that is not light if there is one."""
    found = [one for one in parts if one.rank == rank and one.commit == chosen.commit]
    return min(found, key=lambda one: one.light)


def _is_whole(one: HeldCommit) -> bool:
    return not one.light and one.sharing == range(one.rank, one.rank + 1)


@given(parts=shared_parts())
@examples(300)
def test_a_commit_is_chosen_if_all_ranks_have_it_and_somebody_all_tensors(parts):
    """The newest of those of which each rank has a part, light or not, where what these lack is in a whole one."""
    assert (newest_complete(parts) is not None) == any(
        _can_be_restored([one for one in parts if one.commit.steps == steps]) for steps in (8, 9)
    )


def _can_be_restored(parts: list[HeldCommit]) -> bool:
    by_rank = {one.rank: one for one in sorted(parts, key=lambda one: not one.light)}
    if len(by_rank) < (parts[0].world_size if parts else 1) or len({one.digest for one in by_rank.values()}) > 1:
        return False
    is_whole_there = any(_is_whole(one) for one in by_rank.values())
    lacking = [one for one in by_rank.values() if not one.light and any(by_rank[each].light for each in one.sharing)]
    return not lacking and (is_whole_there or not any(one.light for one in by_rank.values()))


# Copies.


def copy(rank: int, steps: int, attempt: int = 1, world_size: int = 2) -> HeldCommit:
    return replace(held(rank, steps, attempt, world_size), copied=True)


def test_each_part_that_a_node_lacks_is_fetched_from_a_node_that_gives_few():
    everything = [held(rank, 7, world_size=4) for rank in range(4)]
    there = {"a": everything[:2], "b": everything, "c": everything[3:], "d": [held(0, 6, world_size=4)]}
    needed = {"a": (0, 1), "b": (2, 3), "c": (3,), "d": (0, 1, 2, 3)}
    found = fetches(there, needed, CompleteCommit(Commit(1, 7), 4))
    assert found == {"a": {}, "b": {}, "c": {}, "d": {"a": [0], "b": [1, 2], "c": [3]}}


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
        fetched = [part for parts_of_source in found[node].values() for part in parts_of_source]
        assert sorted(fetched) == sorted(set(wanted) - own)
    for source, ranks in [one for sources in found.values() for one in sources.items()]:
        assert {part.rank for part in there[source] if chosen.has(part)} >= {*ranks}


def test_the_safest_commit_is_the_newest_whose_parts_are_all_on_two_hosts():
    hosts = {"a": "host-1", "b": "host-2", "c": "host-2"}
    there = {
        "a": [held(0, 7), held(0, 8), held(0, 9), copy(1, 7), copy(1, 8)],
        "b": [held(1, 7), held(1, 8), held(1, 9), copy(0, 7), copy(1, 9)],
        "c": [copy(0, 8), copy(0, 9), copy(1, 9)],
    }
    assert safest(there, hosts) == Commit(1, 8)
    assert safest({"a": there["a"], "b": [copy(1, 7)]}, hosts) is None
    assert safest({"a": [held(0, 9)], "b": [copy(0, 9)]}, hosts) is None


@pytest.mark.parametrize(
    ("parts", "lost"),
    [
        ([held(0, 7), held(0, 9), copy(1, 7)], 2),
        ([held(0, 7), held(0, 8), held(1, 7)], 0),
        ([held(0, 7), copy(1, 7)], 0),
        ([held(0, 9), held(0, 9, 2), held(0, 3, 2), copy(0, 9), copy(1, 9)], 0),
        ([held(0, 9), held(0, 3, 2), copy(1, 9)], 0),
        ([held(0, 7, 2), held(0, 9, 2), copy(1, 7, 2), held(1, 9, 1, 3)], 2),
    ],
)
def test_steps_are_lost_with_a_host_of_which_only_copies_are_left(parts, lost):
    """A rank that has died in the middle of a commit has lost none, since its commit was none yet."""
    chosen = newest_complete(parts)
    assert lost_steps(parts, chosen) == lost


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


def running_machine(nnodes: int | str = 2, **settings) -> Machine:
    machine = Machine(job(nnodes, **settings))
    machine.start()
    machine.handle(joined("a", nproc=1))
    machine.handle(joined("b", nproc=1))
    for node in machine.roster:
        machine.handle(started(node, 1.0))
    return machine


def holder(node: str, *parts: HeldCommit, ranks: tuple[int, ...] = ()) -> Holder:
    """Return what a node holds. `ranks`: its own; none: it was lost."""
    at = CopyAddress(node=NodeId(node), host="10.0.0.1", port=7, outside=not ranks)
    return Holder(at=at, host=HostId(f"host-of-{node}"), ranks=ranks, held=parts)


def test_what_all_ranks_have_is_chosen():
    found = choose([holder("a", held(0, 6), held(0, 7), ranks=(0,)), holder("b", held(1, 6), ranks=(1,))], 2)
    assert [(one.commit, one.world_size, one.sources, one.kept, one.lost) for one in found] == [
        (Commit(1, 6), 2, (), Commit(1, 6), "")
    ] * 2


def test_nothing_is_chosen_where_no_node_holds_anything():
    """As in the first attempt."""
    assert choose([holder("a", ranks=(0,)), holder("b", ranks=(1,))], 2) == [RestoreOrder()] * 2


def test_a_part_that_is_missing_is_said():
    one, two = choose([holder("a", held(0, 7), ranks=(0,)), holder("b", ranks=(1,))], 2)
    assert one.commit is two.commit is None
    assert one.lost.endswith("do not have the part of rank 1")


def test_a_newcomer_fetches_the_parts_of_its_ranks():
    """The ranks of the nodes that are left have moved, too."""
    first = holder("a", held(0, 7), copy(1, 7), held(0, 8), ranks=(0,))
    one, two = choose([first, holder("b", ranks=(1,))], 2)
    assert (one.sources, two.sources) == ((), ((first.at, (1,)),))
    assert (one.commit, one.kept) == (Commit(1, 7), Commit(1, 7))
    what = "the state after 7 steps is restored from memory; 1 more step had no copy on another host, and must be"
    assert one.lost == two.lost == f"{what} done again"


def test_what_the_subreaper_of_a_lost_node_holds_is_not_lost():
    """Its agent was killed. Node a needs no part of it, since all ranks have the same tensors."""
    parts = [replace(held(rank, 8), replicated=True) for rank in (0, 1)]
    (found,) = choose([holder("a", parts[0], ranks=(0,)), holder("b", parts[1])], 1)
    assert found == RestoreOrder(commit=Commit(1, 8), world_size=2)


def test_parts_are_fetched_from_the_subreaper_of_a_lost_node():
    lost_one = holder("b", held(1, 8))
    (found,) = choose([holder("a", held(0, 8), ranks=(0,)), lost_one], 1)
    assert found.sources == ((lost_one.at, (1,)),)


def test_a_lost_node_is_the_last_from_which_a_part_is_fetched():
    """Though another node gives more."""
    held_by = {"lost": (copy(0, 7), held(1, 7)), "a": (held(0, 7), copy(1, 7)), "b": ()}
    found = fetches(held_by, {"b": (0, 1)}, CompleteCommit(Commit(1, 7), 2), last=("lost",))
    assert found == {"b": {"a": [0, 1]}}


def test_the_node_that_replaces_a_lost_one_on_its_host_gets_its_ranks():
    """The memory of that host has the parts of these ranks."""
    machine = running_machine()
    machine.handle(lost("a", 2.0))
    machine.handle(stopped("b", 2.5))
    (launch,) = [
        action for action in machine.handle(joined("c", 3.0, nproc=1, host="host-of-a")) if isinstance(action, Launch)
    ]
    assert launch.roster == ("c", "b")


def test_a_node_that_is_drained_while_workers_start_is_left_when_its_commits_are_restored():
    """It may have the only parts of the newest commit, and its time is not over yet."""
    machine = running_machine("1:2", max_restarts=9)
    machine.handle(failed("a", 2.0, attempt=1))
    assert machine.handle(draining("b", 3.0, deadline=33.0)) == []
    for node in machine.roster:
        machine.handle(started(node, 3.5, attempt=2))
    (asked, *_) = machine.handle(Tick(at=4.0))
    assert isinstance(asked, RequestCheckpoint)
