"""From the SIGKILL of rank 1 until all ranks of a script with heavy imports are past their next first `all_reduce`.

The script imports pandas and scikit-learn besides torch, before it does anything else. 2 agents x 2 workers, gloo. It
trains for 10 s before its first death and for 1 s before each other one. raylaunch with `preload: auto`, which learns
in the first attempt what the script imports, restarts 10 times in a row in one job; all ten count, whether it was done
learning or not. torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 restarts twice in one job before it.
"""

from __future__ import annotations

from pathlib import Path

from tests.private_cluster import Cluster
from tools.bench import figures, recoveries, timeline
from tools.bench.contenders import HEAVY_SCRIPT, RAYLAUNCH, TORCHRUN, Task
from tools.bench.figures import SCRIPT_STATIONS, Figure, Outcome

RAYLAUNCH_DEATHS = 10
TORCHRUN_DEATHS = 2
FIRST_SECONDS = 10.0
EACH_SECONDS = 1.0
_STATIONS = {**SCRIPT_STATIONS, "imported": "... past its imports"}
_PHASES = {**timeline.WITHOUT_STEP, "imported": "imported: torch, pandas, scikit-learn"}


def measure(cluster: Cluster, scratch: Path) -> Outcome:
    """Run the contenders in turn."""
    ours, theirs = (
        Task(agents=2, workers=2, deaths=deaths, first=FIRST_SECONDS, each=EACH_SECONDS, script=HEAVY_SCRIPT)
        for deaths in (RAYLAUNCH_DEATHS, TORCHRUN_DEATHS)
    )
    jobs = {
        TORCHRUN: [recoveries.torchrun(scratch, theirs)],
        RAYLAUNCH: [recoveries.raylaunch(cluster, scratch, ours, {"preload": "auto"})],
    }
    times = recoveries.times(jobs)
    figure = Figure(
        name="restart-heavy",
        what=(__doc__ or "").split("\n", 1)[0],
        unit="s",
        samples={name: recoveries.samples(done) for name, done in jobs.items()},
        goals=(figures.times_better(15), figures.worst_to_median(3)),
    )
    details = (
        figures.stations("restart-heavy, seconds after the kill", _STATIONS, times),
        timeline.breakdown(
            "raylaunch's restarts with heavy imports, milliseconds after the kill:", times[RAYLAUNCH], _PHASES
        ),
    )
    first = f"the first restart of raylaunch took {times[RAYLAUNCH][0]['passed']:.2f} s"
    return Outcome(
        figures=(figure,), details=details, notes=(*recoveries.notes(jobs), first), more={"recoveries": times}
    )
