"""From the failure of a rank or a node until the launcher knows of it.

A rank exits with code 1, a rank is killed, a rank stands still (SIGSTOP), a node is cut off from the network. raylaunch
knows when its driver takes the event, by its own record; torchrun when it signals the other ranks, by their record. A
hang is counted from the end of `hang_timeout`, a cut from the end of `node_timeout`; torchrun notices neither.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raylaunch.core.machine.events_and_actions import NodeLost, WorkersExited, WorkersHung, WorkersStarted
from tests.hosts.host import why_not
from tests.hosts.hosts import Hosts
from tests.private_cluster import Cluster
from tools.bench import figures, launches, processes
from tools.bench.contenders import RAYLAUNCH, TORCHRUN, access, new_folder
from tools.bench.figures import Bench, Detail, Figure, Outcome
from tools.bench.launches import Launch

HANG_TIMEOUT = 2.0
NODE_TIMEOUT = 5.0
_NEVER = "never"
_NO_BLAME = {"exclude_after": 0}
"""A node where workers fail again and again would be left out for a while."""
_SCRIPT = Path(__file__).with_name("failer.py")
_SECONDS = 120.0
_WORDS = {"exit": "a rank exits", "kill": "a rank is killed", "hang": "a rank hangs", "cut": "a node is cut off"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    times: int = 10
    """Of each way in which a rank fails."""
    hangs: int = 3
    hang_timeout: float = HANG_TIMEOUT
    """Seconds. The last attempt, too, must begin in this time."""
    cuts: int = 1


Found = dict[str, list[float]]
"""Seconds, by the way of failing."""


def measure(cluster: Cluster, scratch: Path, size: Size) -> Outcome:
    """Run the contenders one after the other."""
    theirs = _torchrun(scratch, size)
    ours, of_agents = _raylaunch(cluster, scratch, size)
    ours |= _hangs(cluster, scratch, size)
    reason = why_not()
    ours["cut"] = [] if reason else _cuts(scratch, size)
    rows = [
        (_WORDS[how], f"{1000 * statistics.median(of_agents[how]):.2f}", f"{1000 * statistics.median(ours[how]):.2f}")
        for how in of_agents
    ]
    return Outcome(
        figures=(
            *(_figure(how, "ms", ours[how], theirs[how], figures.worst_at_most(50.0)) for how in ("exit", "kill")),
            _figure("hang", "s", ours["hang"], _NEVER, figures.worst_at_most(1.5)),
            _figure("cut", "s", ours["cut"] or f"not measured: {reason}", _NEVER, figures.worst_at_most(0.5)),
        ),
        details=(
            Detail(
                title="detect, ms after the failure (medians):",
                columns=("", "the node's fork server knows", "the driver knows"),
                rows=tuple(rows),
            ),
        ),
        more={"fork_server_knows": of_agents},
    )


def _figure(how: str, unit: str, ours: list[float] | str, theirs: list[float] | str, goal: figures.Goal) -> Figure:
    after = {
        "hang": f"from the end of `hang_timeout` ({HANG_TIMEOUT:g} s after its last step)",
        "cut": f"from the end of `node_timeout` ({NODE_TIMEOUT:g} s after the cut; less than 0: it was silent before)",
    }.get(how, "from there")
    scale = 1000 if unit == "ms" else 1
    samples = {
        name: found if isinstance(found, str) else tuple(scale * one for one in found)
        for name, found in ((RAYLAUNCH, ours), (TORCHRUN, theirs))
    }
    what = f"{_WORDS[how]}: {after} until the launcher knows."
    return Figure(name=f"detect: {_WORDS[how]}", what=what, unit=unit, samples=samples, goals=(goal,))


# Ranks.


def _torchrun(scratch: Path, size: Size) -> Found:
    """It signals the others in the same turn in which it sees that one has ended."""
    folder = new_folder(scratch, TORCHRUN)
    count = 2 * size.times
    command = launches.torchrun(
        _SCRIPT, str(folder), str(count), "exit", "kill", workers=2, options=[f"--max-restarts={count}"]
    )
    with launches.started(command, folder) as launch:
        launch.wait(_SECONDS)
    found: Found = {"exit": [], "kill": []}
    for attempt, (how, failed) in _failures(folder).items():
        found[how].append(float((folder / f"signalled-{attempt}").read_text()) - failed)
    return found


def _raylaunch(cluster: Cluster, scratch: Path, size: Size) -> tuple[Found, Found]:
    """When the driver knew, and when the fork server did."""
    folder = new_folder(scratch, RAYLAUNCH)
    count = 2 * size.times
    args = (str(folder), str(count), "exit", "kill")
    command = launches.raylaunch(
        cluster, folder, _SCRIPT, *args, workers=2, preload=[], max_restarts=count, **_NO_BLAME
    )
    with launches.started(command, folder, extra=access(cluster)) as launch:
        launch.wait(_SECONDS)
    told: Found = {"exit": [], "kill": []}
    seen: Found = {"exit": [], "kill": []}
    log, failures = launch.log(), _failures(folder)
    for at, event in log.events(WorkersExited):
        if event.failures:
            how, failed = failures[event.attempt - 1]
            told[how].append(at - failed)
            seen[how].append(log.clock + event.failures[0].at - failed)
    return told, seen


def _hangs(cluster: Cluster, scratch: Path, size: Size) -> Found:
    folder = new_folder(scratch, RAYLAUNCH)
    args = (str(folder), str(size.hangs), "hang")
    settings = {"max_restarts": size.hangs, "hang_timeout": size.hang_timeout, **_NO_BLAME}
    command = launches.raylaunch(cluster, folder, _SCRIPT, *args, workers=2, **settings)
    with launches.started(command, folder, extra=access(cluster)) as launch:
        launch.wait(_SECONDS)
    failures, hung = _failures(folder), launch.log().events(WorkersHung)
    return {"hang": [at - failures[event.attempt - 1][1] - size.hang_timeout for at, event in hung]}


def _failures(folder: Path) -> dict[int, tuple[str, float]]:
    """By attempt, from 0: how and when."""
    found = {}
    for path in folder.glob("event-*"):
        how, at = path.read_text().split()
        found[int(path.name.removeprefix("event-"))] = (how, float(at))
    return found


# Nodes.


def _cuts(scratch: Path, size: Size) -> list[float]:
    """Two hosts, made of network namespaces, with a worker each; the one without the driver is cut off."""
    folder = new_folder(scratch, RAYLAUNCH)
    settings = {
        "nnodes": "1:2",
        "preload": [],
        "node_timeout": NODE_TIMEOUT,
        "placement": "spread",
        "cpus_per_worker": 1,
    }
    with Hosts(2) as hosts:
        head, other = hosts.hosts
        job = launches.job(folder, _SCRIPT, str(folder), "1000", "stay", workers=1, **settings)
        with (folder / "out.txt").open("wb") as out, (folder / "err.txt").open("wb") as err:
            command = [sys.executable, "-m", "raylaunch", str(job)]
            process = hosts.popen(head, command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        launch = Launch(folder=folder, mark="", process=process)
        found: list[float] = []
        while len(found) < size.cuts:
            _wait_for(launch, lambda: _is_of_both(launch))
            hosts.cut(other)
            cut = time.monotonic()
            _wait_for(launch, lambda: len(_losses(launch)) > len(found))
            found.append(_losses(launch)[-1] - cut - NODE_TIMEOUT)
            hosts.heal(other)
    return found


def _losses(launch: Launch) -> list[float]:
    return [at for at, _ in launch.log().events(NodeLost)]


def _is_of_both(launch: Launch) -> bool:
    """Whether the latest attempt has workers on both hosts."""
    started = [event for _, event in launch.log().events(WorkersStarted)]
    return len([event for event in started if event.attempt == started[-1].attempt]) > 1


def _wait_for(launch: Launch, condition: Callable[[], bool]) -> None:
    processes.wait_until(lambda: condition() or launch.process.poll() is not None, seconds=_SECONDS)
    if not condition():
        raise launch.complaint("what was waited for did not come")


BENCH = Bench(measure=measure, full=Size(), smoke=Size(times=1, hangs=1, hang_timeout=20.0))
