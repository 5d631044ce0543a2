"""From the start of the command until all ranks are past their first `all_reduce`.

gloo, 2 agents x 2 workers and 1 agent x 8, the contenders in turn. raylaunch meets a Ray cluster that is running
already, as its users have, and so does Ray Train, once, with four workers; torchrun needs nothing but its commands.
Then a script with DDP and an optimizer, as training scripts are, until all ranks are past their first optimizer step.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.private_cluster import Cluster
from tools.bench import contenders, figures, starts
from tools.bench.contenders import DDP_SCRIPT, RAY_TRAIN, RAYLAUNCH, TORCHRUN, Task
from tools.bench.figures import Bench, Figure, Outcome

Size = dict[str, tuple[Task, int, bool]]
"""By its name: what is started, how often by each contender, and whether by Ray Train too, once."""


def measure(cluster: Cluster, scratch: Path, size: Size) -> Outcome:
    """Run the contenders in turn."""
    found = {}
    for name, (task, rounds, with_ray_train) in size.items():
        contestants = {
            TORCHRUN: partial(contenders.torchrun, scratch, task),
            RAYLAUNCH: partial(contenders.raylaunch, cluster, scratch, task),
        }
        found[name] = starts.in_turn(rounds, contestants)
        if with_ray_train:
            found[name] |= starts.in_turn(1, {RAY_TRAIN: partial(contenders.ray_train, cluster, scratch, task)})
    with_ddp = "the same, until all ranks are past their first optimizer step with DDP."
    return Outcome(
        figures=tuple(
            Figure(
                name=f"cold, {name}",
                what=with_ddp if size[name][0].script == DDP_SCRIPT else figures.first_line(__doc__),
                unit="s",
                samples={contender: starts.passed(each) for contender, each in times.items()},
                goals=(figures.ratio(0.7),),
            )
            for name, times in found.items()
        ),
        details=tuple(starts.detail(f"cold, {name}", size[name][0], times) for name, times in found.items()),
        more={"starts": found},
    )


BENCH: Bench[Size] = Bench(
    measure=measure,
    full={
        "2 x 2": (Task(agents=2, workers=2), 4, True),
        "1 x 8": (Task(agents=1, workers=8), 3, False),
        "2 x 2 with DDP": (Task(agents=2, workers=2, script=DDP_SCRIPT), 3, False),
    },
    smoke={"2 x 1": (Task(agents=2, workers=1), 1, False)},
)
