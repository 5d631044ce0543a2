"""Whether a silent world hangs, where no number of seconds was given: by what its workers are seen doing."""

from __future__ import annotations

import math

import pytest

from raylaunch.core import evidence
from raylaunch.core.evidence import Doing, Look, longest, patience, seen, told
from raylaunch.core.progress import AUTO_FLOOR, Hang
from raylaunch.core.stacks import Effort, Stack, grouped

TORCH = "/venv/lib/python3.11/site-packages/torch"
REDUCE = f"{TORCH}/distributed/distributed_c10d.py:3030 in all_reduce"
BACKWARD = f"{TORCH}/autograd/graph.py:9 in _engine_run_backward"
SAVE = f"{TORCH}/distributed/checkpoint/filesystem.py:9 in write_data"
FETCH = "/job/train.py:33 in fetch"
LOAD = f"{TORCH}/utils/data/dataloader.py:1300 in _try_get_data"
IDLE = Effort()
BUSY = Effort(cpu=1.0)
WOKEN = Effort(wakes=1)
"""By each look."""


def stack(frame: str, *, state: str = "S", effort: Effort = IDLE, rank: int = 0) -> Stack:
    text = f'Current thread 0x7f (most recent call first):\n  File "{frame.replace(":", chr(34) + ", line ")}\n'
    return Stack(rank=rank, state=state, text=text if frame else "", effort=effort)


def doing(*frames: str, state: str = "S", a_second: Effort = IDLE) -> Doing:
    """Of a worker that was at each of these places in turn, a second each, and spends so much in one."""
    looks = [
        Look(
            at=100.0 + second,
            stacks=(
                stack(
                    frame,
                    state=state,
                    effort=Effort(
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
    return seen(looks, (0,))[0]


@pytest.mark.parametrize("place", [FETCH, REDUCE, BACKWARD, ""])
def test_a_worker_that_does_nothing(place):
    """Where it waits for others, that is what it does; a program that is no Python says nothing of that."""
    assert doing(*[place] * 10, a_second=WOKEN) is (Doing.WAITS if "torch" in place else Doing.RESTS)


def test_a_worker_that_is_at_another_place_each_time_works():
    """Also where it is but another line, or another collective; one that missed a question is where it was."""
    assert doing(FETCH, FETCH, FETCH.replace("33", "34")) is Doing.WORKS
    assert doing(REDUCE, REDUCE.replace("all_reduce", "barrier"), REDUCE) is Doing.WORKS
    assert doing(FETCH, "", FETCH) is Doing.RESTS


@pytest.mark.parametrize("place", [FETCH, ""])
def test_a_long_call_at_one_place_is_told_by_what_it_spends(place):
    """Bytes, and CPU of processes it started, are work; its own CPU may be. What watches a process takes little."""
    assert doing(*[place] * 10, a_second=Effort(bytes=100_000)) is Doing.WORKS
    assert doing(*[place] * 10, a_second=Effort(cpu_of_others=0.03)) is Doing.WORKS
    assert doing(*[place] * 10, a_second=Effort(cpu=0.03)) is Doing.SPINS
    little = Effort(cpu=0.01, cpu_of_others=0.01, bytes=10_000, wakes=100)
    assert doing(*[place] * 10, a_second=little) is Doing.RESTS


def test_who_waits_in_a_collective_does_not_work_whatever_that_costs():
    """NCCL waits with all its might. But who is woken again and again waits for one thing after another."""
    assert doing(*[REDUCE] * 10, a_second=BUSY) is Doing.WAITS
    assert doing(*[REDUCE] * 10, a_second=Effort(wakes=4)) is Doing.WORKS


@pytest.mark.parametrize(("place", "else_"), [(BACKWARD, Doing.WAITS), (SAVE, Doing.STANDS), (LOAD, Doing.STANDS)])
def test_what_may_be_a_wait_and_may_be_work_is_told_by_what_it_spends(place, else_):
    """A backward pass computes, and may wait for others within; a checkpoint of many ranks is written to a disk."""
    assert doing(*[place] * 10, a_second=BUSY) is Doing.SPINS
    assert doing(*[place] * 10, a_second=WOKEN) is else_


def test_a_worker_that_is_stopped():
    """Whatever it had spent; one that is let go on at times is none."""
    assert doing("", "", "", state="T", a_second=BUSY) is Doing.STOPPED
    looks = [Look(at=float(at), stacks=(stack(REDUCE, state=state),)) for at, state in enumerate("TST")]
    assert seen(looks, (0,))[0] is Doing.WAITS


def test_a_worker_that_was_not_heard_of():
    """Nothing speaks for it; and one that no pulse told of is there all the same."""
    assert seen([Look(at=1.0, stacks=(stack(FETCH, rank=3),))], (0, 3)) == {0: Doing.RESTS, 3: Doing.RESTS}


# How long that may last.


def silent(quiet: float, ranks: int = 2, **facts) -> Hang:
    """A world in which nobody has made a step for so long."""
    own = tuple(range(ranks))
    return Hang(seconds=quiet, ranks=own, workers=own, quiet=quiet, limit=AUTO_FLOOR, is_sure=False, **facts)  # type: ignore[arg-type]


def hangs_after(*kinds: Doing, times_here: int = 0, **facts) -> float:
    """Seconds of silence, by looks that come when they are due; infinity: it was looked at for a week."""
    quiet = AUTO_FLOOR
    while quiet < 7 * 86400:
        hang = silent(quiet, **facts)
        more = patience(hang, longest(hang, dict(enumerate(kinds)), times_here))
        if not more:
            return quiet
        quiet += more
    return math.inf


STOPPED, WAITS, STANDS, RESTS, SPINS, WORKS = Doing


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
        ((WORKS, WORKS), math.inf),
    ],
)
def test_how_long_a_silence_may_last(kinds, limits):
    """Not at all where nobody can end it; not long where somebody waits for who does nothing; else for hours."""
    assert hangs_after(*kinds) == limits * AUTO_FLOOR


def test_before_the_first_steps_only_what_nobody_can_end_is_a_hang():
    """A program without steps may serve, or prepare its data for hours."""
    assert hangs_after(WAITS, WAITS, is_young=True) == hangs_after(STOPPED, RESTS, is_young=True) == AUTO_FLOOR
    assert hangs_after(RESTS, WAITS, is_young=True) == hangs_after(WORKS, WAITS, is_young=True) == math.inf


def test_while_others_make_steps_nobody_hangs_but_who_is_stopped():
    """It may have ended its part before them, and waits for them at the end."""
    one = Hang(seconds=AUTO_FLOOR, ranks=(0,), workers=(0, 1), limit=AUTO_FLOOR, is_sure=False)  # type: ignore[arg-type]
    for others in (WAITS, WORKS):  # whatever they were seen at
        assert patience(one, longest(one, {0: WAITS, 1: others})) == AUTO_FLOOR
    assert patience(one, longest(one, {0: STOPPED, 1: WORKS})) == 0


def test_a_place_where_the_world_was_ended_before_is_given_twice_the_time_each_time():
    """It may only be slow there, and would never get past it. What nobody can end is ended at once all the same."""
    assert [hangs_after(RESTS, WAITS, times_here=times) / AUTO_FLOOR for times in range(4)] == [2, 4, 8, 16]
    assert hangs_after(WAITS, WAITS, times_here=3) == AUTO_FLOOR


def test_looks_come_twice_as_late_each_time():
    """So that somebody who worked and then is stuck is found, and healthy work is not looked at all the time."""
    assert [patience(silent(quiet), 7200.0) for quiet in (300.0, 600.0, 6000.0)] == [300, 600, 1200]


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
def test_what_a_person_is_told(kinds, most, line):
    """Who works and where, or who does not; and until when that is no hang."""
    groups = sorted(grouped([stack(REDUCE), stack(FETCH, rank=1)], (0, 1)), key=lambda group: group.waits)
    assert told(silent(300.4), dict(enumerate(kinds)), groups, most) == line


def test_one_who_works_and_cannot_say_where():
    """A program that is no Python: its own note is shown."""
    line = told(silent(300.0), {0: WORKS}, grouped([stack("", state="R")], (0,)), math.inf)
    assert line == "no step for 300 s, but rank 0 works, running, and did not answer: no hang"


def test_a_look_lasts_long_enough_to_see_work():
    """By clocks that tick a hundred times a second."""
    assert evidence.LOOKS * evidence.LOOK_SECONDS * evidence._CPU > 0.1
