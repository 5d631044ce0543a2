"""The decision whether a silent attempt hangs (`hang_timeout: auto`), from what its workers are seen doing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from raylaunch.core.failures.stacks import ResourceUsage, Stack, grouped
from raylaunch.core.monitoring import hang_policy
from raylaunch.core.monitoring.hang_detector import AUTO_FLOOR, SuspectedHang
from raylaunch.core.monitoring.hang_policy import (
    Activity,
    StackSample,
    activities,
    describe,
    max_silence,
    snooze_seconds,
)

TORCH = "/venv/lib/python3.11/site-packages/torch"
REDUCE = f"{TORCH}/distributed/distributed_c10d.py:3030 in all_reduce"
BACKWARD = f"{TORCH}/autograd/graph.py:9 in _engine_run_backward"
SAVE = f"{TORCH}/distributed/checkpoint/filesystem.py:9 in write_data"
COMMIT = "/venv/raylaunch/worker/state/commit_agreement.py:158 in _await"
FETCH = "/job/train.py:33 in fetch"
LOAD = f"{TORCH}/utils/data/dataloader.py:1300 in _try_get_data"
IDLE = ResourceUsage()
BUSY = ResourceUsage(cpu=1.0)
WOKEN = ResourceUsage(wakes=1)
"""The resource usage between two samples."""


def stack(frame: str, *, state: str = "S", effort: ResourceUsage = IDLE, rank: int = 0) -> Stack:
    text = f'Current thread 0x7f (most recent call first):\n  File "{frame.replace(":", chr(34) + ", line ")}\n'
    return Stack(rank=rank, state=state, text=text if frame else "", effort=effort)


def doing(*frames: str, state: str = "S", a_second: ResourceUsage = IDLE) -> Activity:
    """Return the activity of a worker seen at each of these places, a second apart, using so much in each second."""
    samples = [
        StackSample(
            at=100.0 + second,
            stacks=(
                stack(
                    frame,
                    state=state,
                    effort=ResourceUsage(
                        cpu=7 + a_second.cpu * second,
                        cpu_of_others=7 + a_second.cpu_of_others * second,
                        bytes=a_second.bytes * second,
                        wakes=a_second.wakes * second,
                    ),
                ),
            ),
        )
        for second, frame in enumerate(frames)
    ]
    return activities(samples, (0,))[0]


@pytest.mark.parametrize("place", [FETCH, REDUCE, BACKWARD, ""])
def test_idle_worker(place):
    """A worker in a collective waits; at any other place, or without a Python stack, it rests."""
    assert doing(*[place] * 10, a_second=WOKEN) is (Activity.WAITS if "torch" in place else Activity.RESTS)


def test_worker_that_moves_works():
    """Another line or another collective is enough; a sample without a stack does not count."""
    assert doing(FETCH, FETCH, FETCH.replace("33", "34")) is Activity.WORKS
    assert doing(REDUCE, REDUCE.replace("all_reduce", "barrier"), REDUCE) is Activity.WORKS
    assert doing(FETCH, "", FETCH) is Activity.RESTS


@pytest.mark.parametrize("place", [FETCH, ""])
def test_long_call_is_judged_by_its_resource_usage(place):
    """Bytes, and CPU time of child processes, are work; its own CPU time may be. Sampling itself takes little."""
    assert doing(*[place] * 10, a_second=ResourceUsage(bytes=100_000)) is Activity.WORKS
    assert doing(*[place] * 10, a_second=ResourceUsage(cpu_of_others=0.03)) is Activity.WORKS
    assert doing(*[place] * 10, a_second=ResourceUsage(cpu=0.03)) is Activity.SPINS
    little = ResourceUsage(cpu=0.01, cpu_of_others=0.01, bytes=10_000, wakes=100)
    assert doing(*[place] * 10, a_second=little) is Activity.RESTS


def test_busy_wait_in_a_collective_is_no_work():
    """NCCL waits at full CPU load. A worker that wakes often waits for one thing after another."""
    assert doing(*[REDUCE] * 10, a_second=BUSY) is Activity.WAITS
    assert doing(*[REDUCE] * 10, a_second=ResourceUsage(wakes=4)) is Activity.WORKS


def test_wait_for_the_commit_of_others_is_no_work():
    """It looks a hundred times in a second, at one of several lines."""
    looks = ResourceUsage(cpu=0.03, wakes=100)
    assert doing(COMMIT, COMMIT.replace("158", "160"), COMMIT, a_second=looks) is Activity.WAITS
    assert doing(COMMIT, FETCH, COMMIT, a_second=looks) is Activity.WORKS


def test_of_the_samples_of_a_worker_only_the_last_is_grouped(monkeypatch):
    """There are ten of each of a thousand workers, and most are alike."""
    seen: list[str] = []

    def counted(stacks, ranks):
        seen.extend(each.text for each in stacks)
        return grouped(stacks, ranks)

    monkeypatch.setattr(hang_policy, "grouped", counted)
    assert doing(FETCH, COMMIT, REDUCE.replace("all_reduce", "barrier")) is Activity.WORKS
    assert seen == []
    assert doing(COMMIT, COMMIT, REDUCE, REDUCE) is Activity.WORKS
    assert doing(*[FETCH] * 10) is Activity.RESTS
    assert seen == [stack(FETCH).text]


@pytest.mark.parametrize(
    ("place", "otherwise"), [(BACKWARD, Activity.WAITS), (SAVE, Activity.STANDS), (LOAD, Activity.STANDS)]
)
def test_ambiguous_place_is_judged_by_its_resource_usage(place, otherwise):
    """A backward pass may compute or wait for other ranks; a checkpoint or a data loader may write or stand."""
    assert doing(*[place] * 10, a_second=BUSY) is Activity.SPINS
    assert doing(*[place] * 10, a_second=WOKEN) is otherwise


def test_stopped_worker():
    """It must be stopped in all samples, whatever it used."""
    assert doing("", "", "", state="T", a_second=BUSY) is Activity.STOPPED
    samples = [StackSample(at=float(at), stacks=(stack(REDUCE, state=state),)) for at, state in enumerate("TST")]
    assert activities(samples, (0,))[0] is Activity.WAITS


def test_worker_without_samples_rests():
    """A worker that is in no heartbeat is included."""
    assert activities([StackSample(at=1.0, stacks=(stack(FETCH, rank=3),))], (0, 3)) == {
        0: Activity.RESTS,
        3: Activity.RESTS,
    }


ITEM = "/job/train.py:88 in step"
"""Where a rank reads from its GPU, and waits at full CPU load for a kernel of NCCL."""


def doing_with_nccl(*frames: str) -> list[Activity]:
    """Return the activities of ranks that are each seen at one place, taking CPU, with process groups of NCCL."""
    samples = [
        StackSample(
            at=100.0 + second,
            stacks=tuple(
                replace(
                    stack(frame, state="R", effort=ResourceUsage(cpu=0.0 if frame == FETCH else second), rank=rank),
                    has_nccl=True,
                )
                for rank, frame in enumerate(frames)
            ),
        )
        for second in range(10)
    ]
    return [*activities(samples, range(len(frames))).values()]


def test_ranks_that_take_cpu_at_one_place_may_wait_for_nccl():
    """At two places one of them may be at work; and a single rank waits for nobody."""
    assert doing_with_nccl(ITEM, ITEM, ITEM) == [Activity.SYNCHRONIZES] * 3
    assert doing_with_nccl(ITEM, FETCH, ITEM) == [Activity.SYNCHRONIZES, Activity.RESTS, Activity.SYNCHRONIZES]
    assert doing_with_nccl(ITEM, BACKWARD, ITEM) == [Activity.SPINS] * 3
    assert doing_with_nccl(ITEM) == [Activity.SPINS]


# The limit of a silence.


def suspected_hang(quiet: float, ranks: int = 2, **facts) -> SuspectedHang:
    """Return a hang in which no worker has made a mark for so many seconds."""
    own = tuple(range(ranks))
    return SuspectedHang(seconds=quiet, ranks=own, workers=own, quiet=quiet, limit=AUTO_FLOOR, is_sure=False, **facts)  # type: ignore[arg-type]


def seconds_until_hang(*kinds: Activity, times_here: int = 0, **facts) -> float:
    """Return the seconds of silence that count as a hang, with checks when they are due; infinity after a week."""
    quiet = AUTO_FLOOR
    while quiet < 7 * 86400:
        hang = suspected_hang(quiet, **facts)
        more = snooze_seconds(hang, max_silence(hang, dict(enumerate(kinds)), times_here))
        if not more:
            return quiet
        quiet += more
    return math.inf


STOPPED, WAITS, STANDS, RESTS, ENDS, SYNCHRONIZES, SPINS, WORKS = Activity


@pytest.mark.parametrize(
    ("kinds", "limits"),
    [
        ((WAITS, WAITS), 1),
        ((WORKS, STOPPED), 1),
        ((RESTS, WAITS), 2),
        ((STANDS, RESTS), 2),
        ((STANDS, STANDS), 2),
        ((RESTS, RESTS), 24),
        ((WORKS, WAITS), 24),
        ((WORKS, RESTS), 24),
        ((SPINS, WAITS), 24),
        ((SPINS, SPINS), 24),
        ((SYNCHRONIZES, SYNCHRONIZES), 2),
        ((SYNCHRONIZES, RESTS), 2),
        ((SYNCHRONIZES, STANDS), 2),
        ((SYNCHRONIZES, WAITS), 2),
        ((SYNCHRONIZES, WORKS), 24),
        ((WORKS, WORKS), math.inf),
    ],
)
def test_limit_depends_on_the_activities(kinds, limits):
    """No longer if nobody can end the silence, a little if ranks wait for one that rests, hours if one works."""
    assert seconds_until_hang(*kinds) == limits * AUTO_FLOOR


def test_wait_for_nccl_is_limited_from_the_start():
    """In a script with survivors torch does not limit it."""
    assert seconds_until_hang(SYNCHRONIZES, SYNCHRONIZES, is_young=True) == 2 * AUTO_FLOOR
    assert seconds_until_hang(SYNCHRONIZES, RESTS, is_young=True) == 2 * AUTO_FLOOR
    assert seconds_until_hang(SYNCHRONIZES, WORKS, is_young=True) == math.inf


def test_young_attempt_hangs_only_if_nobody_can_end_it():
    """A program without steps may serve, or prepare its data for hours."""
    assert (
        seconds_until_hang(WAITS, WAITS, is_young=True)
        == seconds_until_hang(STOPPED, RESTS, is_young=True)
        == AUTO_FLOOR
    )
    assert (
        seconds_until_hang(RESTS, WAITS, is_young=True) == seconds_until_hang(WORKS, WAITS, is_young=True) == math.inf
    )


def test_a_worker_that_does_not_get_past_its_end_hangs():
    """Its script is done. It need not have made a step."""
    text = "Current thread 0x7f (most recent call first):\n  <no Python frame>\n"
    samples = [StackSample(at=float(at), stacks=(Stack(rank=0, state="S", text=text),)) for at in range(10)]
    assert activities(samples, (0,)) == {0: ENDS}
    (group,) = grouped(samples[0].stacks, (0,))
    assert str(group) == "1 rank, at the end of its script, which it does not get past: 0"
    assert seconds_until_hang(ENDS, is_young=True) == seconds_until_hang(ENDS, WAITS) == AUTO_FLOOR
    assert seconds_until_hang(ENDS, RESTS) == 2 * AUTO_FLOOR


def test_a_worker_that_rests_after_others_have_ended_hangs_soon():
    """It may be freeing what it has used. One that works may write the last checkpoint, and one without steps serve."""
    assert seconds_until_hang(RESTS, others_ended=True) == 2 * AUTO_FLOOR
    assert seconds_until_hang(RESTS) == seconds_until_hang(SPINS, others_ended=True) == 24 * AUTO_FLOOR
    assert seconds_until_hang(WORKS, others_ended=True) == math.inf
    assert seconds_until_hang(RESTS, others_ended=True, is_young=True) == math.inf


def test_only_stopped_workers_hang_while_others_make_steps():
    """A silent worker may have ended its part, and waits for the others at the end."""
    one = SuspectedHang(seconds=AUTO_FLOOR, ranks=(0,), workers=(0, 1), limit=AUTO_FLOOR, is_sure=False)  # type: ignore[arg-type]
    for others in (WAITS, WORKS):  # their activity does not matter
        assert snooze_seconds(one, max_silence(one, {0: WAITS, 1: others})) == AUTO_FLOOR
    assert snooze_seconds(one, max_silence(one, {0: STOPPED, 1: WORKS})) == 0


def test_limit_doubles_after_each_hang_at_a_place():
    """The place may only be slow. A silence that nobody can end is a hang at once all the same."""
    assert [seconds_until_hang(RESTS, WAITS, times_here=times) / AUTO_FLOOR for times in range(4)] == [2, 4, 8, 16]
    assert seconds_until_hang(WAITS, WAITS, times_here=3) == AUTO_FLOOR


def test_snoozes_double():
    """A worker that works and then hangs is still found, and long work is not sampled all the time."""
    assert [snooze_seconds(suspected_hang(quiet), 7200.0) for quiet in (300.0, 600.0, 6000.0)] == [300, 600, 1200]


@pytest.mark.parametrize(
    ("kinds", "most", "line"),
    [
        ((WAITS, WORKS), math.inf, "no step for 300 s, but rank 1 works, at train.py:33 in fetch: no hang"),
        ((WAITS, SPINS), 7200, "no step for 300 s, but rank 1 works, at train.py:33 in fetch: no hang before 7200 s"),
        (
            (WAITS, RESTS),
            600,
            "no step for 300 s, and nobody seems to work, which is a hang after 600 s: 1 rank at train.py:33 in fetch: 1",
        ),
    ],
)
def test_description_of_the_decision(kinds, most, line):
    """It says which rank works and where, or that none does, and when that counts as a hang."""
    groups = sorted(grouped([stack(REDUCE), stack(FETCH, rank=1)], (0, 1)), key=lambda group: group.waits)
    assert describe(suspected_hang(300.4), dict(enumerate(kinds)), groups, most) == line


def test_description_of_a_worker_without_stack():
    """The note of its group replaces the place."""
    line = describe(suspected_hang(300.0), {0: WORKS}, grouped([stack("", state="R")], (0,)), math.inf)
    assert line == "no step for 300 s, but rank 0 works, running, and did not answer: no hang"


def test_sampling_is_long_enough_for_the_cpu_clock():
    """The CPU clock ticks a hundred times a second."""
    assert hang_policy.LOOKS * hang_policy.LOOK_SECONDS * hang_policy.BUSY_CPU > 0.1
