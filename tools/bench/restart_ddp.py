"""From the SIGKILL of rank 1 until all ranks have done the first optimizer step of the next attempt.

A DDP model of 2.6 million parameters (10 MB) and Adam; 2 agents x 2 workers, gloo, 3 s of training before the first
death and 0.4 s before each other one. raylaunch as it is restarts 20 times in a row in one job; torchrun with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 twice in one job before it, and twice after it.
"""

from __future__ import annotations

from pathlib import Path

from tests.private_cluster import Cluster
from tools.bench import figures, recoveries, timeline
from tools.bench.contenders import DDP_SCRIPT, RAYLAUNCH, TORCHRUN, Task
from tools.bench.figures import SCRIPT_STATIONS, Figure, Outcome
from tools.bench.recoveries import Job

RAYLAUNCH_DEATHS = 20
TORCHRUN_DEATHS = 2
FIRST_SECONDS = 3.0
_STATIONS = {**SCRIPT_STATIONS, "passed": "... past its first optimizer step"}


def measure(cluster: Cluster, scratch: Path) -> Outcome:
    """Run the contenders in turn."""
    ours, theirs = (
        Task(agents=2, workers=2, deaths=deaths, first=FIRST_SECONDS, script=DDP_SCRIPT)
        for deaths in (RAYLAUNCH_DEATHS, TORCHRUN_DEATHS)
    )
    jobs: dict[str, list[Job]] = {RAYLAUNCH: [], TORCHRUN: []}
    jobs[TORCHRUN].append(recoveries.torchrun(scratch, theirs))
    jobs[RAYLAUNCH].append(recoveries.raylaunch(cluster, scratch, ours))
    jobs[TORCHRUN].append(recoveries.torchrun(scratch, theirs))
    times = recoveries.times(jobs)
    figure = Figure(
        name="restart-ddp",
        what=(__doc__ or "").split("\n", 1)[0],
        unit="s",
        samples={name: recoveries.samples(done) for name, done in jobs.items()},
        goals=(figures.times_better(20), figures.worst_to_median(3)),
    )
    details = (
        figures.stations("restart-ddp, seconds after the kill", _STATIONS, times),
        timeline.breakdown("raylaunch's restarts with DDP, milliseconds after the kill:", times[RAYLAUNCH]),
    )
    return Outcome(figures=(figure,), details=details, notes=recoveries.notes(jobs), more={"recoveries": times})
