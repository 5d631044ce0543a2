"""The text for the user if not all workers saved in time."""

from __future__ import annotations

import pytest

from raylaunch.core.monitoring.checkpoint_step import checkpoints, unsaved
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.monitoring.progress import ProgressTracker


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
    progress = ProgressTracker(None, auto=True)
    progress.begin(1, range(2))
    marks = (
        WorkerProgress(rank=0, marks=9, age=0.0, asked=8, saved=8),
        WorkerProgress(rank=1, marks=9, age=0.0, asked=3),
    )
    progress.update(Heartbeat(attempt=1, marks=marks), 1.0)
    assert unsaved(8, checkpoints(progress.world)).endswith("rank 1 asked last after step 3")
