"""PSS of all the launcher's processes, workers included, with 8 ranks on one node that are idle after one `all_reduce`.

raylaunch without a cluster: driver (with the agent in it), fork server, subreaper, store and workers; `torchrun
--standalone`. Then raylaunch on a Ray cluster, whose own processes serve everybody there and are counted apart, in two
figures with them. Then both without a cluster once more with a script that has a DDP model and an optimizer, after its
first step, which is what training scripts look like; the model is tiny, since what it takes is the same under both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from tests.private_cluster import Cluster, marked
from tools.bench import contenders, figures, processes
from tools.bench.contenders import DDP_SCRIPT, RAYLAUNCH, TORCHRUN, Started, Task
from tools.bench.figures import Bench, Detail, Figure, Outcome
from tools.bench.processes import Memory

_START_SECONDS = 60.0

DRIVER, AGENT, FORK_SERVER, WORKERS, LAUNCHER = "driver", "agent", "fork server and stores", "workers", "torchrun"
DAEMONS, REST_OF_RAY = "raylet and gcs", "rest of Ray: its log monitor, agents and idle workers"
_OURS = (DRIVER, AGENT, FORK_SERVER, WORKERS)
_GOALS = {DRIVER: "< 200 MB", AGENT: "< 200 MB"}

Groups = dict[str, Memory]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    workers: int = 8
    settle: float = 3.0
    """Seconds before memory is looked at."""


def measure(cluster: Cluster, scratch: Path, size: Size) -> Outcome:
    """Run the contenders one after the other."""
    task = Task(agents=1, workers=size.workers, stay=True)
    with_ddp = replace(task, script=DDP_SCRIPT, options=("--width", "64"))
    with contenders.torchrun_standalone(scratch, task) as started:
        torchrun = _weigh(started, size, _torchrun_groups)
    with contenders.raylaunch_alone(scratch, task, address="none") as started:
        alone = _weigh(started, size, _alone_groups)
    with contenders.raylaunch(cluster, scratch, task) as started:
        on_cluster = _weigh(started, size, partial(_cluster_groups, cluster))
    with contenders.torchrun_standalone(scratch, with_ddp) as started:
        torchrun_ddp = _weigh(started, size, _torchrun_groups)
    with contenders.raylaunch_alone(scratch, with_ddp, address="none") as started:
        alone_ddp = _weigh(started, size, _alone_groups)
    words = {
        "memory": (alone, torchrun, _OURS, figures.first_line(__doc__)),
        "  on a cluster": (on_cluster, torchrun, _OURS, "the same on a Ray cluster, without its own processes."),
        "  + raylet, gcs": (on_cluster, torchrun, (*_OURS, DAEMONS), "... with these two, which all jobs share."),
        "  + all of Ray": (on_cluster, torchrun, (*_OURS, DAEMONS, REST_OF_RAY), "... with all of the Ray cluster."),
        "  with DDP": (alone_ddp, torchrun_ddp, _OURS, "as the first, with a DDP model and an optimizer."),
    }
    weighed = {
        f"{RAYLAUNCH} without a cluster": alone,
        f"{RAYLAUNCH} on a cluster": on_cluster,
        TORCHRUN: torchrun,
        f"{RAYLAUNCH} without a cluster, with DDP": alone_ddp,
        f"{TORCHRUN}, with DDP": torchrun_ddp,
    }
    return Outcome(
        figures=tuple(_figure(name, *row) for name, row in words.items()),
        details=tuple(_detail(name, groups) for name, groups in weighed.items()),
        more={name: _record(groups) for name, groups in weighed.items()},
    )


def _figure(name: str, ours: Groups, theirs: Groups, counted: Sequence[str], what: str) -> Figure:
    return Figure(
        name=name,
        what=what,
        unit="MB",
        samples={RAYLAUNCH: (_sum(ours, counted),), TORCHRUN: (_sum(theirs, (LAUNCHER, WORKERS)),)},
        goals=() if DAEMONS in counted else (figures.ratio(0.2),),
    )


def _sum(groups: Groups, names: Sequence[str]) -> float:
    return sum(groups[name].pss for name in names if name in groups)


def _weigh(started: Started, size: Size, sort: Callable[[Started], dict[str, list[int]]]) -> Groups:
    """All ranks have passed and are idle: what each group of processes takes."""
    if not started.wait_for(0, _START_SECONDS):
        raise started.complaint("it did not start")
    time.sleep(size.settle)
    groups = {name: processes.memory(pids) for name, pids in sort(started).items()}
    (started.folder / "leave").touch()
    if any(code != 0 for code in started.wait_for_end()):
        raise started.complaint("it did not end well")
    return groups


def _torchrun_groups(started: Started) -> dict[str, list[int]]:
    workers = [mark.pid for mark in started.marks(0)]
    return {LAUNCHER: _others(marked(started.mark), workers), WORKERS: workers}


def _alone_groups(started: Started) -> dict[str, list[int]]:
    workers = [mark.pid for mark in started.marks(0)]
    drivers = [command.pid for command in started.commands]
    return {DRIVER: drivers, FORK_SERVER: _others(marked(started.mark), [*workers, *drivers]), WORKERS: workers}


def _cluster_groups(cluster: Cluster, started: Started) -> dict[str, list[int]]:
    """What the command started carries its mark; the agent is a Ray actor, and carries the cluster's."""
    of_ray = marked(cluster.mark)
    agents = [pid for pid in of_ray if processes.command_line(pid).startswith("ray::raylaunch: agent")]
    if not agents:
        raise started.complaint("its agent is not to be found among the actors of Ray")
    daemons = [pid for pid in of_ray if _program(pid) in ("raylet", "gcs_server")]
    return _alone_groups(started) | {
        AGENT: agents,
        DAEMONS: daemons,
        REST_OF_RAY: _others(of_ray, [*agents, *daemons]),
    }


def _program(pid: int) -> str:
    return Path(processes.command_line(pid).partition(" ")[0]).name


def _others(pids: Sequence[int], known: Sequence[int]) -> list[int]:
    return sorted(set(pids) - set(known))


def _detail(name: str, groups: Groups) -> Detail:
    return Detail(
        title=f"memory of {name}, MB:",
        columns=("", "PSS", "RSS", "processes", "goal"),
        rows=tuple(
            (group, f"{size.pss:.0f}", f"{size.rss:.0f}", str(size.processes), _GOALS.get(group, ""))
            for group, size in groups.items()
        ),
    )


def _record(groups: Groups) -> dict[str, dict[str, float]]:
    return {name: asdict(size) for name, size in groups.items()}


BENCH = Bench(measure=measure, full=Size(), smoke=Size(workers=2, settle=0.0))
