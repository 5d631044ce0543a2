"""From the SIGKILL of rank 1 until all ranks have done a new step, with 100 MB of `State` on each rank.

A DDP model and Adam; 2 agents x 2 workers, gloo, 3 s of training before the first death and 0.4 s before each other one.
raylaunch with `elastic`, where the other three ranks stay, 15 times in a row in one job; the same without `elastic`,
where all are started again; and torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, twice in one job, whose rank 0
writes the same 100 MB to /dev/shm each 20 steps. Then with a script that prepares itself for 5 s: when the survivors
have left the attempt before and the dead are forked, and when all have done a new step.
"""

from __future__ import annotations

from pathlib import Path

from tests.private_cluster import Cluster
from tools.bench import figures, recoveries, timeline
from tools.bench.contenders import ELASTIC_SCRIPT, RAYLAUNCH, TORCHRUN, Task
from tools.bench.figures import SCRIPT_STATIONS, Figure, Outcome
from tools.bench.recoveries import Job

ALL_ANEW = "all started again"
RAYLAUNCH_DEATHS = 15
PEERS_DEATHS = 2
PREPARED_DEATHS = 4
FIRST_SECONDS = 3.0
PREPARATION = 5.0
_STATIONS = {**SCRIPT_STATIONS, "passed": "... past its first optimizer step"}


def measure(cluster: Cluster, scratch: Path) -> Outcome:
    """Run the contenders in turn."""

    def task(deaths: int, *options: str) -> Task:
        return Task(agents=2, workers=2, deaths=deaths, first=FIRST_SECONDS, script=ELASTIC_SCRIPT, options=options)

    jobs: dict[str, list[Job]] = {
        TORCHRUN: [recoveries.torchrun(scratch, task(PEERS_DEATHS))],
        ALL_ANEW: [recoveries.raylaunch(cluster, scratch, task(RAYLAUNCH_DEATHS, "--anew"))],
        RAYLAUNCH: [recoveries.raylaunch(cluster, scratch, task(RAYLAUNCH_DEATHS))],
    }
    times = recoveries.times(jobs)
    figure = Figure(
        name="restart-elastic",
        what=(__doc__ or "").split("\n", 1)[0],
        unit="s",
        samples={name: recoveries.samples(jobs[name]) for name in (RAYLAUNCH, ALL_ANEW, TORCHRUN)},
        goals=(figures.median_at_most(0.35), figures.times_better(15), figures.worst_to_median(3)),
    )
    prepared = recoveries.raylaunch(cluster, scratch, task(PREPARED_DEATHS, "--prepare", str(PREPARATION)))
    back = Figure(
        name="survivors back",
        what=f"The same for a script with {PREPARATION:g} s of preparation, until the survivors are ready for the new step.",
        unit="s",
        samples={RAYLAUNCH: tuple(one["forked"] for one in prepared.recoveries)},
        goals=(figures.worst_at_most(0.5),),
    )
    added = [one["passed"] - PREPARATION for one in prepared.recoveries]
    listed = ", ".join(f"{seconds:.2f}" for seconds in added)
    note = (
        f"with {PREPARATION:g} s of preparation, all ranks had done a new step {listed} s after the prepared rank could"
    )
    details = (
        figures.stations("restart-elastic, seconds after the kill", _STATIONS, times),
        timeline.breakdown("raylaunch's restarts with survivors, milliseconds after the kill:", times[RAYLAUNCH]),
    )
    notes = (*recoveries.notes(jobs), note)
    return Outcome(figures=(figure, back), details=details, notes=notes, more={"recoveries": times})
