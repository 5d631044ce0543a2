"""From the start of the command until all ranks are past their first `all_reduce`, on one machine without a cluster.

1 x 4 workers, gloo, in turn: raylaunch without Ray; `torchrun --standalone`; raylaunch
with a Ray of its own (`ray.address=local`). Then the same two of a script with DDP and an optimizer, as training
scripts are, until all ranks are past their first optimizer step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.private_cluster import Cluster
from tools.bench import contenders, figures, starts
from tools.bench.contenders import DDP_SCRIPT, RAYLAUNCH, TORCHRUN, Task
from tools.bench.figures import Bench, Figure, Outcome, Times

_OWN_RAY = "with its own Ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    workers: int = 4
    rounds: int = 4
    rounds_of_ddp: int = 2


def measure(_: Cluster, scratch: Path, size: Size) -> Outcome:
    """Run the contenders in turn."""
    task = Task(agents=1, workers=size.workers)
    with_ddp = Task(agents=1, workers=size.workers, script=DDP_SCRIPT)
    contestants = {
        each: {
            TORCHRUN: partial(contenders.torchrun_standalone, scratch, each),
            RAYLAUNCH: partial(contenders.raylaunch_alone, scratch, each),
        }
        for each in (task, with_ddp)
    }
    contestants[task][_OWN_RAY] = partial(contenders.raylaunch_alone, scratch, task, address="local")
    plain = starts.in_turn(size.rounds, contestants[task])
    ddp = starts.in_turn(size.rounds_of_ddp, contestants[with_ddp])
    own = "the same, with ray.address=local: what the start of a Ray costs."
    return Outcome(
        figures=(
            _figure("local", figures.first_line(__doc__), plain, RAYLAUNCH),
            _figure(f"  {_OWN_RAY}", own, plain, _OWN_RAY),
            _figure(
                "  with DDP", "the same, until all ranks are past the first optimizer step with DDP.", ddp, RAYLAUNCH
            ),
        ),
        details=(starts.detail("local", task, plain), starts.detail("local with DDP", with_ddp, ddp)),
        more={"starts": plain, "starts_with_ddp": ddp},
    )


def _figure(name: str, what: str, found: dict[str, list[Times]], ours: str) -> Figure:
    samples = {RAYLAUNCH: starts.passed(found[ours]), TORCHRUN: starts.passed(found[TORCHRUN])}
    goals = (figures.ratio(0.7),) if ours == RAYLAUNCH else ()
    return Figure(name=name, what=what, unit="s", samples=samples, goals=goals)


BENCH = Bench(measure=measure, full=Size(), smoke=Size(workers=2, rounds=1, rounds_of_ddp=0), needs_cluster=False)
