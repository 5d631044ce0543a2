"""From the SIGKILL of the driver of a detached run until another one is in command: all agents obey it.

A run of 2 x 2 on a Ray cluster of this machine, with `-d`; its driver is killed again and again. The agents notice the end
of its process by their links, so the time begins with the kill; the phases are as in `DriverReplaced` in the journal.
Then, with one driver, what somebody costs who is attached: CPU seconds of the driver, per second, while four ranks print
100 lines per second each. Seconds without and with an attached command take turns.

At last, takeovers of 1,000 agents (8,000 ranks), which four actors play: the real driver and fleet in a process of their
own are killed, and another process, which is connected already, takes over.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from raylaunch.core.machine.events_and_actions import DriverReplaced
from tests.private_cluster import Cluster, end_marked
from tools.bench import cpu, figures, launches, processes
from tools.bench.contenders import RAYLAUNCH, access, new_folder
from tools.bench.figures import Bench, Detail, Figure, Outcome
from tools.bench.launches import Launch

ALONE = "nobody attached"
_SCRIPT = Path(__file__).with_name("chatterer.py")
_SECONDS = 120.0
_PHASES = {
    "process": "its process runs (Ray starts it)",
    "state": "it has the newest state, from agents",
    "prepare": "it is connected and has read the run folder",
    "agents": "all agents obey it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    kills: int = 10
    rounds: int = 3
    span: float = 6.0
    """Seconds in which the driver is looked at."""
    settle: float = 2.0
    """Seconds before each kill and each span."""
    agents: int = 1000
    crowd_kills: int = 5


def measure(cluster: Cluster, scratch: Path, size: Size) -> Outcome:
    """Kill drivers; then attach."""
    folder = new_folder(scratch, RAYLAUNCH)
    job = launches.job(
        folder, _SCRIPT, str(folder), workers=2, nnodes=2, placement="pack", preload=[], cpus_per_worker=0.5
    )
    extra = access(cluster) | {"XDG_STATE_HOME": str(folder)}
    command = [*launches.COMMAND, "-d", str(job), f"ray.address={cluster.address}"]
    with launches.started(command, folder, extra=extra) as launch:
        launch.wait(_SECONDS)
        times = [_takeover(launch, size.settle) for _ in range(size.kills)]
        pids = {path.name: path.read_text().split() for path in folder.glob("pids-*")}
        costs = _costs(launch, size, extra)
        (folder / "end").touch()
        result = launch.run / "result.json"
        if not processes.wait_until(result.exists, seconds=_SECONDS):
            raise launch.complaint("the run did not end")
    found = json.loads(result.read_text())
    if found["exit_code"] or found["restarts"] or any(len(each) != 1 for each in pids.values()):
        raise launch.complaint(f"workers were restarted: {found['restarts']} restarts")
    crowd = _crowd(cluster, scratch / "crowd", size)
    return Outcome(
        figures=(_figure([each["all"] for each in times]), *_attached(costs), _of_crowd(crowd, size)),
        details=(_phases(times), _viewers(costs), _parts(crowd, size)),
        notes=(f"takeover: no worker was restarted in {size.kills} takeovers",),
        more={"takeover": {"times": times, "crowd": crowd}},
    )


def _takeover(launch: Launch, settle: float) -> dict[str, float]:
    """Kill the driver and wait for the next one. Return seconds since the kill, at the end of each phase and in all."""
    before = _replaced(launch)
    pid = _driver(launch)
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    if not processes.wait_until(lambda: len(_replaced(launch)) > len(before), seconds=_SECONDS, every=0.01):
        raise launch.complaint("no other driver took over")
    event = _replaced(launch)[-1]
    began = datetime.fromisoformat(launch.log().began).timestamp()
    seconds = began + event.at - killed
    ends = {"agents": seconds, "prepare": seconds - event.agents_seconds}
    ends["state"] = ends["prepare"] - event.prepare_seconds
    ends["process"] = ends["state"] - event.state_seconds
    time.sleep(settle)
    return ends | {"all": seconds}


def _replaced(launch: Launch) -> list[DriverReplaced]:
    return [event for _, event in launch.log().events(DriverReplaced)]


def _driver(launch: Launch) -> int:
    """Return the process id of the driver, which the registry of runs has."""
    for path in launch.folder.glob("raylaunch/runs/*"):
        with contextlib.suppress(ValueError, OSError):
            if (found := re.search(r'"pid": (\d+)', path.read_text())) and Path(f"/proc/{found[1]}").exists():
                return int(found[1])
    raise launch.complaint("the registry has no driver that is alive")


def _costs(launch: Launch, size: Size, extra: dict[str, str]) -> dict[str, list[float]]:
    """Return CPU seconds of the driver per second."""
    costs: dict[str, list[float]] = {ALONE: [], RAYLAUNCH: []}
    for _ in range(size.rounds):
        costs[ALONE].append(_cost(launch, size))
        with _viewer(launch, extra):
            costs[RAYLAUNCH].append(_cost(launch, size))
    return costs


def _cost(launch: Launch, size: Size) -> float:
    time.sleep(size.settle)
    pid, began = _driver(launch), time.monotonic()
    before = cpu.seconds(pid)
    time.sleep(size.span)
    return (cpu.seconds(pid) - before) / (time.monotonic() - began)


@contextlib.contextmanager
def _viewer(launch: Launch, extra: dict[str, str]) -> Iterator[None]:
    """Have a command attached, and showing lines of rank 0."""
    shown = launch.folder / "shown"
    env = processes.environment(launch.mark, extra)
    with shown.open("wb") as file:
        process = subprocess.Popen(
            [*launches.COMMAND, "attach", str(launch.run)], env=env, stdout=file, stderr=subprocess.DEVNULL
        )
    try:
        if not processes.wait_until(lambda: shown.stat().st_size > 0, seconds=_SECONDS):
            raise launch.complaint("`attach` shows nothing")
        yield
    finally:
        process.kill()
        process.wait()


def _crowd(cluster: Cluster, folder: Path, size: Size) -> list[dict[str, float]]:
    """Return the seconds of each phase of some takeovers of many agents, and in all."""
    folder.mkdir()
    mark = secrets.token_hex(8)
    env = processes.environment(mark, access(cluster))
    root = Path(__file__).resolve().parents[2]

    def start(role: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "tools.bench.crowd_driver",
            role,
            str(folder),
            str(size.agents),
            cluster.address,
        ]
        log = (folder / "log.txt").open("a")
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=env, cwd=root, stdin=pipe, stdout=pipe, stderr=log, text=True)

    def said(process: subprocess.Popen[str], what: str) -> str:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(what):
                return line
        raise processes.BenchError(f"no `{what}`:\n{(folder / 'log.txt').read_text()[-1500:]}")

    found: list[dict[str, float]] = []
    try:
        present = start("first")
        said(present, "runs")
        for _ in range(size.crowd_kills):
            following = start("next")
            said(following, "connected")
            time.sleep(size.settle)
            present.kill()
            present.wait()
            assert following.stdin is not None
            following.stdin.write("\n")
            following.stdin.flush()
            found.append(json.loads(said(following, "{")))
            if (nodes := found[-1]["nodes"]) != size.agents:
                raise processes.BenchError(f"the driver went on with {nodes:g} of {size.agents} agents")
            present = following
    finally:
        end_marked(mark)
    return found


def _of_crowd(found: list[dict[str, float]], size: Size) -> Figure:
    return Figure(
        name="  1,000 agents",
        what=f"the same without the start of the process, with {size.agents} agents.",
        unit="s",
        samples={RAYLAUNCH: tuple(each["all"] for each in found)},
        goals=(figures.worst_at_most(5.0),),
    )


def _parts(found: list[dict[str, float]], size: Size) -> Detail:
    rows = [
        (words, f"{statistics.median(each[name] for each in found):.3f}", f"{max(each[name] for each in found):.3f}")
        for name, words in _PHASES.items()
        if name != "process"
    ]
    return Detail(
        title=f"{size.agents} agents, seconds of each phase:", columns=("", "median", "worst"), rows=tuple(rows)
    )


def _figure(seconds: list[float]) -> Figure:
    return Figure(
        name="takeover",
        what=figures.first_line(__doc__),
        unit="s",
        samples={RAYLAUNCH: tuple(seconds)},
        goals=(figures.worst_at_most(3.0),),
    )


def _attached(costs: dict[str, list[float]]) -> tuple[Figure, ...]:
    what = "CPU seconds of the driver, a second, while one is attached and 4 ranks print 100 lines a second each."
    samples = {name: tuple(found) for name, found in costs.items()}
    return (Figure(name="  attached", what=what, unit="s/s", samples=samples),)


def _viewers(costs: dict[str, list[float]]) -> Detail:
    words = {ALONE: ALONE, RAYLAUNCH: "one attached"}
    rows = tuple((words[name], f"{statistics.median(found):.3f}", f"{max(found):.3f}") for name, found in costs.items())
    return Detail(title="the driver, CPU seconds a second:", columns=("", "median", "worst"), rows=rows)


def _phases(times: list[dict[str, float]]) -> Detail:
    rows = [
        (words, f"{statistics.median(found):.3f}", f"{max(found):.3f}")
        for name, words in _PHASES.items()
        if (found := [each[name] for each in times])
    ]
    return Detail(title="takeover, seconds after the kill:", columns=("", "median", "worst"), rows=tuple(rows))


BENCH = Bench(
    measure=measure,
    full=Size(),
    smoke=Size(kills=1, rounds=1, span=0.5, settle=0.5, agents=20, crowd_kills=1),
)
