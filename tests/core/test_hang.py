"""Who is at fault when workers hang."""

from __future__ import annotations

from raylaunch.core.events import WorkersHung
from raylaunch.core.failure import Failure
from raylaunch.core.hang import hung
from raylaunch.core.progress import Hang, Silence
from raylaunch.core.ranks import Assignment
from raylaunch.core.stacks import STOPPED, Stack

TORCH = "/venv/lib/python3.11/site-packages/torch"
REDUCE = (f"{TORCH}/distributed/distributed_c10d.py:3030 in all_reduce", "/job/train.py:41 in main")
BARRIER = (f"{TORCH}/distributed/distributed_c10d.py:5000 in barrier", "/job/train.py:50 in main")
FETCH = ("/job/train.py:33 in fetch", "/job/train.py:60 in main")
LOADER = (f"{TORCH}/utils/data/dataloader.py:7 in __next__", "/job/train.py:40 in main")


def stack(rank: int, frames: tuple[str, ...] = (), state: str = "S") -> Stack:
    head = ["Current thread 0x7f (most recent call first):"] if frames else []
    lines = ['  File "' + frame.replace(":", '", line ') for frame in frames]
    return Stack(rank=rank, state=state, text="\n".join(head + lines))


def hang(*workers: tuple[int, float], ranks: tuple[int, ...] | None = None) -> Hang:
    """A worker is its marks and the seconds of its silence."""
    silences = tuple(Silence(rank=rank, marks=marks, since=50.0 - secs) for rank, (marks, secs) in enumerate(workers))
    longest = max(secs for _, secs in workers)
    return Hang(seconds=longest, ranks=tuple(range(len(workers))) if ranks is None else ranks, workers=silences)


def found(of: Hang, *stacks: Stack) -> WorkersHung:
    """Two ranks on each of two nodes."""
    parts = [
        Assignment(attempt=2, node=f"node-{at}", node_rank=at, nnodes=2, base_rank=2 * at, nproc=2, world_size=4)
        for at in (0, 1)
    ]
    return hung(of, 50.0, parts, {"node-1": (4002, 4003)}, stacks)


def odd(of: Hang, *stacks: Stack) -> list[int]:
    return [failure.rank for failure in found(of, *stacks).failures]


ALIKE = hang((9, 5.0), (9, 5.0), (9, 5.0), (9, 5.0))


def test_the_failure_of_the_odd_one():
    """What it did, since when, and that it is no echo of others."""
    event = found(ALIKE, stack(0, REDUCE), stack(1, REDUCE), stack(2, FETCH), stack(3, REDUCE))
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


def test_who_cannot_run_comes_first():
    """However many do: nobody else can go on without them."""
    assert odd(ALIKE, stack(0, state="T"), stack(1, state="T"), stack(2, state="T"), stack(3, FETCH)) == [0, 1, 2]
    assert odd(ALIKE, stack(0, REDUCE), stack(1, REDUCE), stack(2, FETCH), stack(3, state="D")) == [3]
    event = found(ALIKE, stack(0, REDUCE), stack(1, REDUCE), stack(2, REDUCE), stack(3, state="T"))
    assert event.failures[0].hung == f"no step for 5.0 s, {STOPPED}"
    assert event.failures[0].signature == ""


def test_who_makes_steps_is_not_odd():
    """Ranks that do not wait for one another: only the silent one hangs, whatever the others do."""
    one = hang((9, 6.0), (90, 0.1), (91, 0.2), ranks=(0,))
    assert odd(one, stack(0, REDUCE), stack(1, FETCH), stack(2, LOADER)) == [0]
    assert odd(one, stack(0, FETCH), stack(1, FETCH), stack(2, LOADER)) == [0]


def test_who_waits_in_a_collective_is_not_odd_while_others_do_something_else():
    """Though they be fewer: three data loaders that stand still keep one rank waiting."""
    assert odd(ALIKE, stack(0, REDUCE), stack(1, LOADER), stack(2, LOADER), stack(3, LOADER)) == [1, 2, 3]


def test_of_all_who_wait_the_few_are_odd():
    """One rank has come to another collective than the rest."""
    assert odd(ALIKE, stack(0, REDUCE), stack(1, REDUCE), stack(2, BARRIER), stack(3, REDUCE)) == [2]


def test_of_equally_many_those_behind_are_odd():
    """In steps."""
    two = hang((9, 5.0), (8, 5.0))
    assert odd(two, stack(0, FETCH), stack(1, LOADER)) == [1]


def test_of_those_at_the_same_step_who_fell_silent_first_is_odd():
    """And where that is the same too, the answer does not hang on the order in which nodes were heard."""
    stacks = (stack(1, FETCH), stack(0, LOADER))
    assert odd(hang((9, 5.0), (9, 5.1)), *stacks) == [1]
    assert odd(hang((9, 5.0), (9, 5.0)), *stacks) == odd(hang((9, 5.0), (9, 5.0)), *reversed(stacks)) == [0]


def test_where_all_wait_at_one_place_all_are_named():
    """Nobody can tell who is at fault: each may be waiting for somebody else."""
    event = found(ALIKE, *(stack(rank, REDUCE) for rank in range(4)))
    assert [failure.rank for failure in event.failures] == [0, 1, 2, 3]
    assert event.failures[0].hung == "no step for 5.0 s, in all_reduce (train.py:41)"
    assert all(failure.is_collateral for failure in event.failures)


def test_without_any_stacks_all_that_are_silent_are_named():
    """Programs that are no Python: they cannot answer."""
    assert odd(hang((9, 5.0), (9, 0.1), ranks=(0,)), stack(0), stack(1)) == [0]
    assert odd(hang((9, 5.0), ranks=(0,))) == [0]


def test_ranks_whose_stacks_did_not_come_are_a_group():
    """Their node did not answer in time: they are named where they are the few, even without a process id."""
    event = found(ALIKE, stack(1, REDUCE), stack(2, REDUCE), stack(3, REDUCE))
    (failure,) = event.failures
    assert (failure.rank, failure.node, failure.pid) == (0, "node-0", 0)
    assert failure.hung == "no step for 5.0 s, did not answer"
    assert not failure.is_collateral


def test_an_odd_one_that_no_pulse_told_of():
    """A worker whose stack came, but which has ended for the pulses: it counts as one without steps."""
    event = found(hang((9, 5.0)), stack(0, FETCH), stack(1, FETCH, "T"))
    assert [failure.rank for failure in event.failures] == [1]
    assert [group.ranks for group in event.groups] == [(1,), (0,)]
