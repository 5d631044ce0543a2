"""From the start of the command until all ranks are past their first `all_reduce`.

gloo, 2 agents x 2 workers and 1 agent x 8, the contenders in turn. raylaunch meets a Ray cluster that is running
already, as its users have, and so does Ray Train, once, with four workers; torchrun needs nothing but its commands.
Then a script with DDP and an optimizer, as training scripts are, until all ranks are past their first optimizer step.
"""

from __future__ import annotations

from pathlib import Path

from tests.private_cluster import Cluster
from tools.bench import contenders, figures, starts
from tools.bench.contenders import DDP_SCRIPT, RAY_TRAIN, RAYLAUNCH, TORCHRUN, Task
from tools.bench.figures import Detail, Figure, Outcome, Times

_TASKS = {
    "2 x 2": (Task(agents=2, workers=2), 4),
    "1 x 8": (Task(agents=1, workers=8), 3),
    "2 x 2 with DDP": (Task(agents=2, workers=2, script=DDP_SCRIPT), 3),
}
"""And how often each contender starts it."""
_RAY_TRAINS = "2 x 2"


def measure(cluster: Cluster, scratch: Path) -> Outcome:
    """Run the contenders in turn."""
    figures_, details, more = [], [], {}
    for name, (task, rounds) in _TASKS.items():
        found = _starts(cluster, scratch, task, rounds)
        if name == _RAY_TRAINS:
            with contenders.ray_train(cluster, scratch, task) as started:
                found[RAY_TRAIN] = [starts.times(started)]
        figures_.append(_figure(name, found, is_ddp=task.script == DDP_SCRIPT))
        details.append(_detail(name, found, is_ddp=task.script == DDP_SCRIPT))
        more[name] = found
    return Outcome(figures=tuple(figures_), details=tuple(details), more={"starts": more})


def _starts(cluster: Cluster, scratch: Path, task: Task, rounds: int) -> dict[str, list[Times]]:
    found: dict[str, list[Times]] = {RAYLAUNCH: [], TORCHRUN: []}
    for _ in range(rounds):
        with contenders.torchrun(scratch, task) as started:
            found[TORCHRUN].append(starts.times(started))
        with contenders.raylaunch(cluster, scratch, task) as started:
            found[RAYLAUNCH].append(starts.of_raylaunch(started))
    return found


def _figure(name: str, found: dict[str, list[Times]], *, is_ddp: bool) -> Figure:
    what = "the same, until all ranks are past their first optimizer step with DDP."
    return Figure(
        name=f"cold, {name}",
        what=what if is_ddp else (__doc__ or "").split("\n", 1)[0],
        unit="s",
        samples={contender: tuple(times["passed"] for times in each) for contender, each in found.items()},
        goals=(figures.ratio(0.7),),
    )


def _detail(name: str, found: dict[str, list[Times]], *, is_ddp: bool) -> Detail:
    names = starts.STATIONS_OF_DDP if is_ddp else starts.STATIONS
    return figures.stations(f"cold, {name}, seconds after the start of the command", names, found)
