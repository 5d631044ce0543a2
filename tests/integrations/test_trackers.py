"""Trackers go on in the same run after a restart: `examples/trackers.py` with the real packages, without a network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.examples import runs
from tools.examples.example import chosen


@pytest.mark.skipif(bool(chosen(["trackers"])[0].lacks), reason="the extra `examples` is not installed")
def test_trackers_have_one_run_of_all_attempts() -> None:
    ended = runs.killed_under_raylaunch(chosen(["trackers"])[0], look)
    assert 0 < ended.resumed[0] < 300


def look(folder: Path) -> None:
    """Look at what the trackers have written in two attempts."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = folder.glob("runs/trackers/2*")
    assert len([*run.glob("tensorboard/*")]) == 2
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("loss")] == [*range(300)]

    # Offline, W&B resumes nothing: it writes a folder for each attempt, with the same id.
    ids = [re.sub(r"offline-run-\d+_\d+-", "", path.name) for path in run.glob("wandb/offline-run-*")]
    assert ids == [run.name] * 2

    (metric,) = run.glob("mlruns/*/*/metrics/loss")
    steps = [int(line.split()[2]) for line in metric.read_text().splitlines()]
    assert set(steps) == {*range(300)}
    assert "status: 3" in (metric.parents[1] / "meta.yaml").read_text()  # FINISHED
