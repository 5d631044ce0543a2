"""From the SIGKILL of rank 1 until all ranks have done a new step, with a state of 100 MB in each rank.

2 agents x 2 workers, gloo, 6 s of training before the first death and 0.6 s before each other one. raylaunch restores by
`State`, 12 times in a row in one job; torchrun by `torch.load` from tmpfs, where rank 0 writes with `torch.save` after
each step, with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, twice in one job.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tests.private_cluster import Cluster
from tools.bench import figures, recoveries, timeline
from tools.bench.contenders import RAYLAUNCH, TORCHRUN, Task
from tools.bench.figures import SCRIPT_STATIONS, Figure, Outcome
from tools.bench.recoveries import Job

RAYLAUNCH_DEATHS = 12
TORCHRUN_DEATHS = 2
FIRST_SECONDS, EACH_SECONDS = 6.0, 0.6
SCRIPT = Path(__file__).with_name("unchanged_state.py")
_STATIONS = {**SCRIPT_STATIONS, "passed": "... past a new step"}


def measure(cluster: Cluster, scratch: Path) -> Outcome:
    """Run the contenders in turn."""
    ours, theirs = (
        Task(agents=2, workers=2, deaths=deaths, first=FIRST_SECONDS, each=EACH_SECONDS, script=SCRIPT)
        for deaths in (RAYLAUNCH_DEATHS, TORCHRUN_DEATHS)
    )
    jobs: dict[str, list[Job]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.environ["BENCH_TMPFS"] = folder
        jobs[TORCHRUN] = [recoveries.torchrun(scratch, theirs)]
    jobs[RAYLAUNCH] = [recoveries.raylaunch(cluster, scratch, ours)]
    times = recoveries.times(jobs)
    figure = Figure(
        name="restart-state",
        what=(__doc__ or "").split("\n", 1)[0],
        unit="s",
        samples={name: recoveries.samples(done) for name, done in jobs.items()},
        goals=(figures.median_at_most(0.45), figures.times_better(15), figures.worst_to_median(3)),
    )
    details = (
        figures.stations("restart-state, seconds after the kill", _STATIONS, times),
        timeline.breakdown("raylaunch's restarts with State, milliseconds after the kill:", times[RAYLAUNCH]),
    )
    return Outcome(figures=(figure,), details=details, notes=recoveries.notes(jobs), more={"recoveries": times})
