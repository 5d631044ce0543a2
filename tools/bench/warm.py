"""From the start of the command until all ranks are past their first `all_reduce`, where a command before it kept warm.

gloo, 2 agents x 2 workers, in turn with torchrun, which keeps nothing. The commands of raylaunch are one user's in one
folder, with `--keep-warm`, on a Ray cluster that is running already: the first starts the agents, and does not count;
the second and later ones find them.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from raylaunch.core.machine.events_and_actions import NodeJoined, WorkersStarted
from tests.private_cluster import Cluster, end_marked
from tools.bench import contenders, figures, processes, starts
from tools.bench.contenders import CLUSTER_CPUS, RAYLAUNCH, TORCHRUN, Started, Task
from tools.bench.figures import SCRIPT_STATIONS, Bench, Figure, Outcome, Times


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    workers: int = 2
    """Of each of the two agents."""
    rounds: int = 6


_STATIONS = {
    "planned": "connected to Ray, and the plan laid out",
    "up": "placed; the agents have taken up the run",
    "forked": "launched: all workers are forked",
    **SCRIPT_STATIONS,
}


def measure(cluster: Cluster, scratch: Path, size: Size) -> Outcome:
    """Run the contenders in turn."""
    task = Task(agents=2, workers=size.workers)
    found: dict[str, list[Times]] = {RAYLAUNCH: [], TORCHRUN: []}
    with _one_user(cluster, scratch, task) as launch:
        first = launch()
        for _ in range(size.rounds):
            with contenders.torchrun(scratch, task) as started:
                found[TORCHRUN].append(starts.times(started))
            found[RAYLAUNCH].append(launch())
    figure = Figure(
        name="warm, 2 x 2",
        what=figures.first_line(__doc__),
        unit="s",
        samples={contender: tuple(times["passed"] for times in each) for contender, each in found.items()},
        goals=(figures.median_at_most(0.9), figures.times_better(4)),
    )
    return Outcome(
        figures=(figure,),
        details=(figures.stations("warm, 2 x 2, seconds after the start of the command", _STATIONS, found),),
        notes=(f"warm: the first, which starts the agents: {first['passed']:.2f} s",),
        more={"starts": found, "first": first},
    )


@contextlib.contextmanager
def _one_user(cluster: Cluster, scratch: Path, task: Task) -> Iterator[Callable[[], Times]]:
    """Launches from one folder and one environment; what they keep is ended afterwards."""
    home = scratch / f"warm-{secrets.token_hex(4)}"
    home.mkdir()
    mark = secrets.token_hex(8)
    extra = {"TMPDIR": str(home), **contenders.access(cluster)}
    try:
        yield lambda: _launch(cluster, home, task, mark, extra)
    finally:
        end_marked(mark)


def _launch(cluster: Cluster, home: Path, task: Task, mark: str, extra: dict[str, str]) -> Times:
    """Times to all stations of one launch that ends well."""
    folder = home / secrets.token_hex(4)
    folder.mkdir()
    words = [
        *("--keep-warm", "120", "--nnodes", str(task.agents), "--nproc-per-node", str(task.workers)),
        *("--set", f"ray.address={cluster.address}", "--set", "placement=pack", "--show", "none"),
        *("--set", f"cpus_per_worker={CLUSTER_CPUS / task.world}", "--set", "name=bench", "--rdzv-id", "bench"),
        *("--set", f"log_dir={folder / 'runs'}", *task.command(folder)),
    ]
    began = time.monotonic()
    command = processes.start([sys.executable, "-m", "raylaunch", *words], mark, extra, home, folder / "log.txt")
    started = Started(task=task, folder=folder, mark=mark, began=began, commands=(command,))
    found = starts.times(started)
    return _of_driver(started) | found


def _of_driver(started: Started) -> Times:
    """Its clock is ours: CLOCK_MONOTONIC."""
    log = contenders.log_of(started)
    times = {
        "planned": log.clock,
        "up": max(at for at, _ in log.events(NodeJoined)),
        "forked": max(event.timings.forked for _, event in log.events(WorkersStarted) if event.timings),
    }
    return {name: at - started.began for name, at in times.items()}


BENCH = Bench(measure=measure, full=Size(), smoke=Size(workers=1, rounds=1))
