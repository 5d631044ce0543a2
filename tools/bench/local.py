"""From the start of the command until all ranks are past their first `all_reduce`, on one machine without a cluster.

1 x 4 workers, gloo, in turn: raylaunch without Ray; `torchrun --standalone`; raylaunch
with a Ray of its own (`ray.address=local`). Then the same two of a script with DDP and an optimizer, as training
scripts are, until all ranks are past their first optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from tests.private_cluster import Cluster
from tools.bench import contenders, figures, starts
from tools.bench.contenders import DDP_SCRIPT, RAYLAUNCH, TORCHRUN, Started, Task
from tools.bench.figures import Figure, Outcome, Times

NO_CLUSTER = True
_ROUNDS = 4
_ROUNDS_OF_DDP = 2
_TASK = Task(agents=1, workers=4)
_DDP = Task(agents=1, workers=4, script=DDP_SCRIPT)
_OWN_RAY = "with its own Ray"

Start = Callable[[], AbstractContextManager[Started]]


def measure(cluster: Cluster, scratch: Path) -> Outcome:
    """Run the contenders in turn."""
    del cluster
    plain = _in_turn(
        _ROUNDS,
        {
            TORCHRUN: partial(contenders.torchrun_standalone, scratch, _TASK),
            RAYLAUNCH: partial(contenders.raylaunch_alone, scratch, _TASK),
            _OWN_RAY: partial(contenders.raylaunch_alone, scratch, _TASK, address="local"),
        },
    )
    ddp = _in_turn(
        _ROUNDS_OF_DDP,
        {
            TORCHRUN: partial(contenders.torchrun_standalone, scratch, _DDP),
            RAYLAUNCH: partial(contenders.raylaunch_alone, scratch, _DDP),
        },
    )
    title = "seconds after the start of the command"
    return Outcome(
        figures=(
            _figure("local", (__doc__ or "").split("\n", 1)[0], plain, RAYLAUNCH),
            _figure(
                f"  {_OWN_RAY}", "the same, with ray.address=local: what the start of a Ray costs.", plain, _OWN_RAY
            ),
            _figure(
                "  with DDP", "the same, until all ranks are past the first optimizer step with DDP.", ddp, RAYLAUNCH
            ),
        ),
        details=(
            figures.stations(f"local, {title}", starts.STATIONS, plain),
            figures.stations(f"local with DDP, {title}", starts.STATIONS_OF_DDP, ddp),
        ),
        more={"starts": plain, "starts_with_ddp": ddp},
    )


def _in_turn(rounds: int, contestants: dict[str, Start]) -> dict[str, list[Times]]:
    found: dict[str, list[Times]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, start in contestants.items():
            with start() as started:
                found[name].append(starts.times(started) if name == TORCHRUN else starts.of_raylaunch(started))
    return found


def _figure(name: str, what: str, found: dict[str, list[Times]], ours: str) -> Figure:
    return Figure(
        name=name,
        what=what,
        unit="s",
        samples={
            RAYLAUNCH: tuple(times["passed"] for times in found[ours]),
            TORCHRUN: tuple(times["passed"] for times in found[TORCHRUN]),
        },
        goals=(figures.ratio(0.7),) if ours == RAYLAUNCH else (),
    )
