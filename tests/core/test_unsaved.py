"""What a person is told where not all workers saved in time."""

from __future__ import annotations

import pytest

from raylaunch.core.progress import Progress
from raylaunch.core.pulse import Mark, Pulse
from raylaunch.core.unsaved import unsaved


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({0: (None, None), 1: (None, None)}, ""),
        ({0: (40, 40), 1: (41, 41)}, ""),
        ({0: (40, None), 1: (None, None), 2: (None, None)}, "ranks 1-2 never asked `should_checkpoint`, "),
        ({0: (40, 40), 1: (9, 9), 2: (17, None)}, "rank 1 asked last after step 9"),
        ({0: (40, None), 1: (40, 40), 2: (41, 20)}, "ranks 0, 2 had not said `checkpointed`"),
    ],
)
def test_the_first_mistake_is_named_with_its_ranks(told, why):
    assert unsaved(40, told).startswith(f"not all workers saved at step 40: {why}" if why else "")
    assert bool(unsaved(40, told)) == bool(why)


def test_it_is_known_of_the_workers_by_their_signs_of_life():
    progress = Progress(None, auto=True)
    progress.begin(1, range(2))
    marks = (Mark(rank=0, marks=9, age=0.0, asked=8, saved=8), Mark(rank=1, marks=9, age=0.0, asked=3))
    progress.take(Pulse(attempt=1, marks=marks), 1.0)
    assert progress.unsaved(8).endswith("rank 1 asked last after step 3")
