"""From the SIGKILL of rank 1 until all ranks are past their first `all_reduce` of the next attempt.

2 agents x 2 workers, gloo, 3 s of training before the first death and 0.4 s before each other one. raylaunch as it is
restarts 20 times in a row in one job, twice; torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 twice in one job,
before each of them; and torchrun with its own defaults, under which it may not recover at all, up to twice in one.
Ray Train v2 restarts twice in one job on the same running cluster; `ray_train.py` says with which settings.
"""

from __future__ import annotations

from pathlib import Path

from tests.private_cluster import Cluster
from tools.bench import figures, recoveries, timeline
from tools.bench.contenders import RAY_TRAIN, RAYLAUNCH, TORCHRUN, TORCHRUN_DEFAULTS, Task
from tools.bench.figures import SCRIPT_STATIONS, Figure, Outcome
from tools.bench.recoveries import Job

RAYLAUNCH_DEATHS = 20
PEERS_DEATHS = 2
ROUNDS = 2
FIRST_SECONDS = 3.0


def measure(cluster: Cluster, scratch: Path) -> Outcome:
    """Run the contenders in turn."""
    ours, theirs = (
        Task(agents=2, workers=2, deaths=deaths, first=FIRST_SECONDS) for deaths in (RAYLAUNCH_DEATHS, PEERS_DEATHS)
    )
    jobs: dict[str, list[Job]] = {name: [] for name in (RAYLAUNCH, TORCHRUN, TORCHRUN_DEFAULTS, RAY_TRAIN)}
    for _ in range(ROUNDS):
        jobs[TORCHRUN].append(recoveries.torchrun(scratch, theirs))
        jobs[RAYLAUNCH].append(recoveries.raylaunch(cluster, scratch, ours))
    jobs[TORCHRUN_DEFAULTS].append(recoveries.torchrun(scratch, theirs, share_store=True))
    jobs[RAY_TRAIN].append(recoveries.ray_train(cluster, scratch, theirs))
    times = recoveries.times(jobs)
    figure = Figure(
        name="restart",
        what=(__doc__ or "").split("\n", 1)[0],
        unit="s",
        samples={name: recoveries.samples(done) for name, done in jobs.items()},
        goals=(
            figures.median_at_most(0.15),
            figures.times_better(25),
            figures.worst_to_median(3),
            figures.times_better(100, RAY_TRAIN),
        ),
    )
    peers = {name: times[name] for name in (RAYLAUNCH, TORCHRUN, RAY_TRAIN)}
    details = (
        figures.stations("restart, seconds after the kill", SCRIPT_STATIONS, peers),
        timeline.breakdown(
            "raylaunch's restarts, milliseconds after the kill:", times[RAYLAUNCH], timeline.WITHOUT_STEP
        ),
    )
    return Outcome(figures=(figure,), details=details, notes=recoveries.notes(jobs), more={"recoveries": times})
