"""The step at which all save, which workers are waited for, and the text if not all saved in time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.core.monitoring.checkpoint_step import checkpoints, may_ask, propose_step, unsaved
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.monitoring.rank_progress import WorldProgress


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ({0: (None, None), 1: (None, None)}, ""),
        ({0: (40, 40), 1: (41, 41)}, ""),
        ({0: (40, None), 1: (None, None), 2: (None, None)}, "ranks 1-2 never asked `should_checkpoint`, "),
        ({0: (40, 40), 1: (9, 9), 2: (17, None)}, "rank 1 asked last after step 9"),
        ({0: (40, None), 1: (40, 40), 2: (41, 20)}, "ranks 0, 2 had not said `checkpointed`"),
    ],
)
def test_text_names_the_first_mistake_and_its_ranks(steps, why):
    assert unsaved(40, steps).startswith(f"not all workers saved at step 40: {why}" if why else "")
    assert bool(unsaved(40, steps)) == bool(why)


def test_checkpoints_are_known_from_heartbeats():
    world = WorldProgress(1, range(2))
    marks = (
        WorkerProgress(rank=0, marks=9, age=0.0, asked=8, saved=8),
        WorkerProgress(rank=1, marks=9, age=0.0, asked=3),
    )
    world.update(Heartbeat(attempt=1, marks=marks), 1.0)
    assert unsaved(8, checkpoints(world)).endswith("rank 1 asked last after step 3")


def test_a_worker_that_has_made_few_steps_may_still_ask():
    assert may_ask(3, expected=True)
    assert not may_ask(3, expected=False)
    assert not may_ask(100, expected=True)


@given(asked=st.none() | st.integers(0, 1000), late=st.floats(0, 60))
def test_a_step_is_proposed_though_not_all_workers_have_begun(asked, late):
    """It is ahead of those that have; the others stop at their first step, if that is later."""
    world = WorldProgress(1, range(2))
    if asked is not None:
        worker = WorkerProgress(rank=0, marks=1, age=0.0, asked=asked, step=asked)
        world.update(Heartbeat(attempt=1, marks=(worker,)), 1.0)
    assert propose_step(world, 1.0 + late) > (asked or 0)


@pytest.mark.parametrize("step", [None, 0])
def test_a_script_that_goes_on_at_a_large_number_saves_soon(step):
    """It was restarted a moment ago, and was seen once before its first call of `should_checkpoint`."""
    world = WorldProgress(2, range(1))
    for at, marks, asked in ((1.0, 1, None), (1.1, 3, 282), (1.2, 5, 284)):
        worker = WorkerProgress(rank=0, marks=marks, age=0.0, step=step if asked is None else asked, asked=asked)
        world.update(Heartbeat(attempt=2, marks=(worker,)), at)
    assert 284 < propose_step(world, 1.2) < 300
