"""PSS of all the launcher's processes, workers included, with 8 idle ranks on one node after one `all_reduce`.

raylaunch: driver, agent, fork server, store and workers. The Ray cluster's own processes serve everybody on the
cluster and are counted apart, in two figures with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tests.bench import contenders, processes
from tests.bench.contenders import RAYLAUNCH, TORCHRUN, Started, Task
from tests.bench.figures import Detail, Figure, Outcome
from tests.bench.processes import Memory
from tests.private_cluster import Cluster, marked

ROUNDS = 2
_START_SECONDS = 60.0
_SETTLE_SECONDS = 3.0
_TASK = Task(agents=1, workers=8, stay=True)

DRIVER, AGENT, FORK_SERVER, WORKERS, LAUNCHER = "driver", "agent", "fork server and stores", "workers", "torchrun"
DAEMONS, REST_OF_RAY = "raylet and gcs", "rest of Ray: its log monitor, agents and idle workers"
_OURS = (DRIVER, AGENT, FORK_SERVER, WORKERS)
_GOALS = {DRIVER: "< 200 MB", AGENT: "< 200 MB"}

Groups = dict[str, Memory]


def measure(cluster: Cluster, scratch: Path) -> Outcome:
    """Run the contenders in turn."""
    ours: list[Groups] = []
    theirs: list[Groups] = []
    for _ in range(ROUNDS):
        with contenders.torchrun(scratch, _TASK) as started:
            theirs.append(_weigh(started, _torchrun_groups))
        with contenders.raylaunch(cluster, scratch, _TASK) as started:
            ours.append(_weigh(started, partial(_raylaunch_groups, cluster)))
    what = (__doc__ or "").split("\n", 1)[0]
    torchrun = _sums(theirs, (LAUNCHER, WORKERS))
    variants = {
        "memory": (_OURS, "<= 0.3 x", what),
        "  + raylet, gcs": ((*_OURS, DAEMONS), "", "the same with these two of the Ray cluster, which all jobs share."),
        "  + all of Ray": ((*_OURS, DAEMONS, REST_OF_RAY), "", "the same with every process of the Ray cluster."),
    }
    return Outcome(
        figures=tuple(
            Figure(name=name, what=words, unit="MB", raylaunch=_sums(ours, groups), torchrun=torchrun, goal=goal)
            for name, (groups, goal, words) in variants.items()
        ),
        details=(_detail(RAYLAUNCH, ours[-1]), _detail(TORCHRUN, theirs[-1])),
        more={RAYLAUNCH: [_record(groups) for groups in ours], TORCHRUN: [_record(groups) for groups in theirs]},
    )


def _sums(rounds: Sequence[Groups], names: Sequence[str]) -> tuple[float, ...]:
    return tuple(sum(groups[name].pss for name in names) for groups in rounds)


def _weigh(started: Started, sort: Callable[[Started], dict[str, list[int]]]) -> Groups:
    """All ranks past their `all_reduce` and idle: what each group of processes takes."""
    if not started.wait_for(0, _START_SECONDS):
        raise started.complaint("it did not start")
    time.sleep(_SETTLE_SECONDS)
    groups = {name: processes.memory(pids) for name, pids in sort(started).items()}
    (started.folder / "leave").touch()
    if any(code != 0 for code in started.wait_for_end()):
        raise started.complaint("it did not end well")
    return groups


def _torchrun_groups(started: Started) -> dict[str, list[int]]:
    workers = [mark.pid for mark in started.marks(0)]
    return {LAUNCHER: _others(marked(started.mark), workers), WORKERS: workers}


def _raylaunch_groups(cluster: Cluster, started: Started) -> dict[str, list[int]]:
    """What the command started carries its mark; the agent is a Ray actor, and carries the cluster's."""
    workers = [mark.pid for mark in started.marks(0)]
    drivers = [command.pid for command in started.commands]
    of_ray = marked(cluster.mark)
    agents = [pid for pid in of_ray if processes.command_line(pid).startswith("ray::Agent")]
    if not agents:
        raise started.complaint("its agent is not to be found among the actors of Ray")
    daemons = [pid for pid in of_ray if _program(pid) in ("raylet", "gcs_server")]
    return {
        DRIVER: drivers,
        AGENT: agents,
        FORK_SERVER: _others(marked(started.mark), [*workers, *drivers]),
        WORKERS: workers,
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
