"""The ranks that are the cause when workers hang."""

from __future__ import annotations

from dataclasses import replace

from raylaunch.core.failures.failure import Failure
from raylaunch.core.failures.stack_notes import STOPPED
from raylaunch.core.failures.stacks import GroupCalls, Stack, grouped
from raylaunch.core.machine.events_and_actions import WorkersHung
from raylaunch.core.monitoring.hang_cause import describe_absent, hung
from raylaunch.core.monitoring.hang_detector import Stall, SuspectedHang
from raylaunch.core.placement.environment import Assignment

TORCH = "/venv/lib/python3.11/site-packages/torch"
REDUCE = (f"{TORCH}/distributed/distributed_c10d.py:3030 in all_reduce", "/job/train.py:41 in main")
BARRIER = (f"{TORCH}/distributed/distributed_c10d.py:5000 in barrier", "/job/train.py:50 in main")
FETCH = ("/job/train.py:33 in fetch", "/job/train.py:60 in main")
LOADER = (f"{TORCH}/utils/data/dataloader.py:7 in __next__", "/job/train.py:40 in main")


def stack(rank: int, frames: tuple[str, ...] = (), state: str = "S") -> Stack:
    """Return the stack of a rank; without frames it did not answer."""
    head = ["Current thread 0x7f (most recent call first):"] if frames else []
    lines = ['  File "' + frame.replace(":", '", line ') for frame in frames]
    return Stack(rank=rank, state=state, text="\n".join(head + lines))


def hang(*workers: tuple[int, float], ranks: tuple[int, ...] | None = None) -> SuspectedHang:
    """Return a suspected hang of workers with these marks and seconds of silence, by rank."""
    silences = tuple(Stall(rank=rank, marks=marks, since=50.0 - secs) for rank, (marks, secs) in enumerate(workers))
    longest = max(secs for _, secs in workers)
    return SuspectedHang(
        seconds=longest, ranks=tuple(range(len(workers))) if ranks is None else ranks, workers=silences
    )


PARTS = [
    Assignment(attempt=2, node=f"node-{at}", node_rank=at, nnodes=2, base_rank=2 * at, nproc=2, world_size=4)
    for at in (0, 1)
]


def hang_event(suspected: SuspectedHang, *stacks: Stack) -> WorkersHung:
    """Return the event for a hang of two ranks on each of two nodes."""
    return hung(suspected, 50.0, PARTS, {"node-1": (4002, 4003)}, stacks)


def culprits(suspected: SuspectedHang, *stacks: Stack) -> list[int]:
    """Return the ranks that are named as the cause."""
    return [failure.rank for failure in hang_event(suspected, *stacks).failures]


ALIKE = hang((9, 5.0), (9, 5.0), (9, 5.0), (9, 5.0))


def test_rank_with_a_different_stack_is_the_cause():
    """Its failure says what it did and since when, and is not collateral."""
    event = hang_event(ALIKE, stack(0, REDUCE), stack(1, REDUCE), stack(2, FETCH), stack(3, REDUCE))
    assert event.failures == (
        Failure(
            attempt=2,
            node="node-1",
            rank=2,
            local_rank=0,
            pid=4002,
            at=45.0,
            exit_code=-9,
            hung="no step for 5.0 s, at train.py:33 in fetch",
            hung_at="/job/train.py:33",
        ),
    )
    assert (event.at, event.attempt) == (50.0, 2)
    assert [group.ranks for group in event.groups] == [(2,), (0, 1, 3)]
    assert event.failures[0].what == "hung: no step for 5.0 s, at train.py:33 in fetch"
    assert event.failures[0].signature == "hung at /job/train.py:33"
    assert not event.failures[0].is_collateral


def test_ranks_that_wait_for_a_gpu_are_not_the_cause():
    """Their stacks do not show a collective, since with NCCL it has returned; but the others are in no wait."""
    item, two = ("/job/train.py:88 in step",), hang((9, 6.0), (9, 5.0))
    waits = replace(stack(0, item, state="R"), has_nccl=True)
    assert culprits(two, waits, stack(1, FETCH)) == [1]
    assert culprits(two, replace(waits, has_nccl=False), stack(1, FETCH)) == [0]
    assert culprits(two, waits, replace(waits, rank=1)) == [0, 1]


def test_ranks_that_have_not_called_a_collective_are_the_cause():
    """The Flight Recorder says it, even if all stand at one place, or in other groups that are smaller."""
    item = ("/job/train.py:88 in step",)
    calls = [GroupCalls(group="default_pg", called=each, ended=5, waits_in="broadcast") for each in (6, 6, 5, 6)]
    calls[2] = replace(calls[2], waits_in="")
    alike = [replace(stack(rank, item), calls=(calls[rank],)) for rank in range(4)]
    (failure,) = hang_event(ALIKE, *alike).failures
    said = "rank 2 has not called broadcast, number 6 of default_pg, in which ranks 0-1, 3 wait"
    assert (failure.rank, failure.hung) == (2, f"no step for 5.0 s, at train.py:88 in step; Flight Recorder: {said}")
    odd = replace(stack(3, FETCH), calls=(calls[3],))
    assert culprits(ALIKE, *alike[:3], odd) == [2]
    assert culprits(ALIKE, *alike[:3], replace(odd, calls=())) == [2]
    ended = [replace(one, calls=(replace(calls[0], ended=6, waits_in=""),)) for one in (*alike[:3], odd)]
    assert culprits(ALIKE, *ended) == [3]


def test_what_is_wrong_with_the_gpus_of_the_cause_is_said():
    """And not of others."""
    item, two = ("/job/train.py:88 in step",), hang((9, 6.0), (9, 5.0))
    sick = [replace(each, gpu_faults=f"GPU {each.rank} is hot") for each in (stack(0, item), stack(1, REDUCE))]
    (failure,) = hang_event(two, *sick).failures
    assert failure.what == "hung: no step for 6.0 s, at train.py:88 in step; GPU 0 is hot"


def test_stopped_ranks_are_the_cause():
    """Ranks that are stopped, or stuck in the kernel, come before all others, however many they are."""
    assert culprits(ALIKE, stack(0, state="T"), stack(1, state="T"), stack(2, state="T"), stack(3, FETCH)) == [0, 1, 2]
    assert culprits(ALIKE, stack(0, REDUCE), stack(1, REDUCE), stack(2, FETCH), stack(3, state="D")) == [3]
    event = hang_event(ALIKE, stack(0, REDUCE), stack(1, REDUCE), stack(2, REDUCE), stack(3, state="T"))
    assert event.failures[0].hung == f"no step for 5.0 s, {STOPPED}"
    assert event.failures[0].signature == ""


def test_ranks_that_make_steps_are_not_the_cause():
    """Only the silent rank hangs, whatever the others do."""
    one = hang((9, 6.0), (90, 0.1), (91, 0.2), ranks=(0,))
    assert culprits(one, stack(0, REDUCE), stack(1, FETCH), stack(2, LOADER)) == [0]
    assert culprits(one, stack(0, FETCH), stack(1, FETCH), stack(2, LOADER)) == [0]


def test_ranks_in_a_collective_are_not_the_cause():
    """Three ranks in their data loaders keep one rank waiting, though it is in the minority."""
    assert culprits(ALIKE, stack(0, REDUCE), stack(1, LOADER), stack(2, LOADER), stack(3, LOADER)) == [1, 2, 3]


def test_minority_in_another_collective_is_the_cause():
    assert culprits(ALIKE, stack(0, REDUCE), stack(1, REDUCE), stack(2, BARRIER), stack(3, REDUCE)) == [2]


def test_of_equal_groups_the_one_with_fewer_marks_is_the_cause():
    two = hang((9, 5.0), (8, 5.0))
    assert culprits(two, stack(0, FETCH), stack(1, LOADER)) == [1]


def test_at_equal_marks_the_first_silent_rank_is_the_cause():
    """At equal times too, the result does not depend on the order of the stacks."""
    stacks = (stack(1, FETCH), stack(0, LOADER))
    assert culprits(hang((9, 5.0), (9, 5.1)), *stacks) == [1]
    assert culprits(hang((9, 5.0), (9, 5.0)), *stacks) == culprits(hang((9, 5.0), (9, 5.0)), *reversed(stacks)) == [0]


def test_all_ranks_are_named_if_all_wait_at_one_place():
    """The cause is unknown, so all failures are collateral."""
    event = hang_event(ALIKE, *(stack(rank, REDUCE) for rank in range(4)))
    assert [failure.rank for failure in event.failures] == [0, 1, 2, 3]
    assert event.failures[0].hung == "no step for 5.0 s, in all_reduce (train.py:41)"
    assert all(failure.is_collateral for failure in event.failures)


def test_all_silent_ranks_are_named_without_stacks():
    """Programs without Python do not answer."""
    assert culprits(hang((9, 5.0), (9, 0.1), ranks=(0,)), stack(0), stack(1)) == [0]
    assert culprits(hang((9, 5.0), ranks=(0,))) == [0]


def test_ranks_without_stacks_are_a_group():
    """Their node did not answer in time: they are named if they are the minority, even without a process id."""
    event = hang_event(ALIKE, stack(1, REDUCE), stack(2, REDUCE), stack(3, REDUCE))
    (failure,) = event.failures
    assert (failure.rank, failure.node, failure.pid) == (0, "node-0", 0)
    assert failure.hung == "no step for 5.0 s, did not answer"
    assert not failure.is_collateral


def test_rank_without_heartbeat_may_be_the_cause():
    """A worker with a stack that is in no heartbeat any more counts as one without marks."""
    event = hang_event(hang((9, 5.0)), stack(0, FETCH), stack(1, FETCH, "T"))
    assert [failure.rank for failure in event.failures] == [1]
    assert [group.ranks for group in event.groups] == [(1,), (0,)]


def test_rank_without_a_step_is_described_as_such():
    """Its time counts from the start of the workers."""
    event = hang_event(hang((0, 8.0), (0, 8.0)), stack(0, REDUCE), stack(1, FETCH))
    assert [failure.hung for failure in event.failures] == ["no first step for 8.0 s, at train.py:33 in fetch"]


# A start that takes long.


def absent(*stacks: Stack, marked: frozenset[int] = frozenset()) -> str:
    return describe_absent(grouped(stacks, range(4)), marked, PARTS, 60.2)


def test_ranks_that_others_wait_for_at_the_start_are_named():
    """With their nodes and what they do; those that wait, or have completed a step, have joined."""
    assert absent(stack(0, REDUCE), stack(1, REDUCE), stack(2, FETCH), stack(3, BARRIER)) == (
        "1 of 4 ranks has not joined the others after 60 s: rank 2 on node-1, at train.py:33 in fetch"
    )
    assert absent(stack(0, FETCH), stack(1, state="T"), stack(2, FETCH), stack(3, REDUCE)) == (
        "3 of 4 ranks have not joined the others after 60 s: "
        "ranks 0, 2 on node-0 and node-1, at train.py:33 in fetch; rank 1 on node-0, stopped by a signal"
    )
    assert absent(*(stack(rank, FETCH) for rank in range(3)), marked=frozenset({0, 1, 2})) == (
        "1 of 4 ranks has not joined the others after 60 s: rank 3 on node-1, did not answer"
    )


def test_nobody_is_named_if_nobody_is_waited_for():
    """All load or compile, or all wait for each other, or have completed a step."""
    assert absent(*(stack(rank, FETCH) for rank in range(4))) == ""
    assert absent(*(stack(rank, REDUCE) for rank in range(4))) == ""
    assert absent(*(stack(rank, FETCH) for rank in range(4)), marked=frozenset(range(4))) == ""
    assert absent() == ""


def test_few_places_and_nodes_are_named():
    """A world may have thousands of ranks."""
    parts = [
        Assignment(attempt=1, node=f"node-{at}", node_rank=at, nnodes=9, base_rank=at, nproc=1, world_size=9)
        for at in range(9)
    ]
    everywhere = [stack(rank, (f"/job/train.py:{min(rank, 6)} in fetch",)) for rank in range(1, 9)]
    assert describe_absent(grouped([stack(0, REDUCE), *everywhere], range(9)), frozenset(), parts, 60.0) == (
        "8 of 9 ranks have not joined the others after 60 s: rank 1 on node-1, at train.py:1 in fetch; "
        "rank 2 on node-2, at train.py:2 in fetch; rank 3 on node-3, at train.py:3 in fetch; "
        "rank 4 on node-4, at train.py:4 in fetch; ..."
    )
    same = [stack(rank, FETCH) for rank in range(1, 9)]
    assert describe_absent(grouped([stack(0, REDUCE), *same], range(9)), frozenset(), parts, 60.0).endswith(
        ": ranks 1-8 on 8 nodes, at train.py:33 in fetch"
    )
