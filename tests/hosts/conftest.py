"""Three hosts for the session, and a check after every test that nothing of its runs is left on any of them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import dispose, wait_until
from tests.hosts.host import Host, Process, send, why_not
from tests.hosts.hosts import Hosts, inside
from tests.private_cluster import MARK, WARM_TORCH
from tests.warm_command import WarmCommand
from tests.warm_python import WarmPython

COUNT = 3
_END_SECONDS = 200


@pytest.fixture(scope="session")
def all_hosts() -> Iterator[Hosts]:
    if reason := why_not():
        pytest.skip(reason)
    with Hosts(COUNT, lean=True) as found:
        yield found


@pytest.fixture
def hosts(all_hosts: Hosts) -> Iterator[Hosts]:
    """Three healthy hosts, repaired after the test before. What a test leaves behind on them fails it."""
    make_whole(all_hosts)
    before = {host: leavings(all_hosts, host) for host in all_hosts.hosts}
    yield all_hosts
    for host in all_hosts.hosts:
        all_hosts.heal(host)
        all_hosts.quick(host)
        all_hosts.resume(host)
    wait_until(lambda: all_hosts.ask("left") == [], 100, "actors and placement groups to be gone")
    for host in [host for host in all_hosts.hosts if host.holder.poll() is None]:
        wait_until(
            lambda host=host: leavings(all_hosts, host) <= before.get(host, set()),
            100,
            f"{host.name} to be clean of {leavings(all_hosts, host) - before.get(host, set())}",
        )


def make_whole(hosts: Hosts) -> None:
    """Three hosts with a raylet that Ray knows to be alive and not to be drained; the head is the first."""
    draining = hosts.ask("draining")
    for host in hosts.hosts[1:]:
        if (
            host.holder.poll() is not None
            or not hosts.alive(host)
            or host.node_id in draining
            or not is_well(hosts, host)
        ):
            hosts.remove(host)
    for host in hosts.hosts[COUNT:]:
        hosts.remove(host)
    added = [hosts.add(wait=False) for _ in range(COUNT - len(hosts.hosts))]
    for host in added:
        hosts.wait_for(host)


def is_well(hosts: Hosts, host: Host) -> bool:
    """Return whether the host has a raylet. Ray itself takes up to a minute to notice that a raylet is gone."""
    return bool(hosts.processes(host, "raylet/raylet "))


def leavings(hosts: Hosts, host: Host) -> set[str]:
    """Return what a run may leave on a host besides processes: shared memory, named sockets, files below TMPDIR."""
    files = {str(path) for folder in (host.folder, hosts.folder) for path in (folder / "tmp").rglob("*")}
    sockets = {name for name in hosts.sockets(host) if not name.startswith(f"{host.folder}/session_")}  # not Ray's
    return {f"/dev/shm/{name}" for name in hosts.shared_memory(host)} | sockets | files


@dataclass
class Run:
    """A `raylaunch` process on one of the hosts, its output, and what it left in its run folder."""

    hosts: Hosts
    entered: subprocess.Popen[str] | WarmCommand
    driver: int
    folder: Path
    mark: str
    code: int = -1
    out: str = ""
    err: str = ""

    def signal(self, number: int) -> None:
        """Send the driver a signal."""
        os.kill(self.driver, number)

    def wait(self, seconds: float = _END_SECONDS) -> Run:
        if self.code == -1:
            self.out, self.err = self.entered.communicate(timeout=seconds)
            self.code = self.entered.returncode
        return self

    def stop(self) -> Run:
        """Stop the run as a person does, by SIGINT."""
        self.signal(signal.SIGINT)
        return self.wait()

    def journal(self) -> list[dict[str, Any]]:
        """Return the lines of events.jsonl that are written so far."""
        found = list(self.folder.glob("runs/*/latest/events.jsonl"))
        text = found[0].read_text() if found else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return all events of a kind, in order."""
        seen = [line.get("event") for line in self.journal()]
        return [event for event in seen if event and event["is"] == kind]

    def actions(self, kind: str) -> list[dict[str, Any]]:
        """Return all actions of a kind, in order, each with the time `at` which it was decided."""
        found = []
        for line in self.journal()[1:]:
            at = (line["event"] or {"at": 0.0})["at"]
            found += [{"at": at} | action for action in line["actions"] if action["is"] == kind]
        return found

    @property
    def result(self) -> dict[str, Any]:
        (path,) = self.folder.glob("runs/*/latest/result.json")
        return json.loads(path.read_text())

    def nodes_on(self, host: Host) -> list[str]:
        """Return the nodes of the run that were ever on the host, in order."""
        return [event["node"] for event in self.events("NodeJoined") if event["address"] == host.address]

    def processes(self, host: Host, word: str = "") -> list[Process]:
        """Return the processes of the run: those with its mark, and the agent."""
        found = self.hosts.processes(host, word)
        return [each for each in found if each.environ.get(MARK) == self.mark or "raylaunch: agent" in each.command]

    def everywhere(self) -> list[Process]:
        """Return the processes of the run on all hosts."""
        return [process for host in self.hosts.hosts for process in self.processes(host)]

    def pids(self, attempt: int) -> list[int]:
        """Return the process ids, on their hosts, of all workers of the attempt that the driver knows to be started."""
        return [pid for event in self.events("WorkersStarted") if event["attempt"] == attempt for pid in event["pids"]]

    def workers(self, host: Host) -> list[Process]:
        """Return the workers of any attempt that are alive on the host."""
        nodes = self.nodes_on(host)
        pids = {pid for event in self.events("WorkersStarted") if event["node"] in nodes for pid in event["pids"]}
        return [each for each in self.processes(host) if each.inner in pids]

    def steps(self) -> list[Step]:
        """Return the steps that the workers of `STEPS` recorded, in order of time. The last line may not be whole yet."""
        texts = [path.read_text().rpartition("\n")[0] for path in self.folder.glob("steps.*")]
        lines = [line.split() for text in texts for line in text.splitlines()]
        found = [Step(float(line[0]), *map(int, line[1:5]), line[5]) for line in lines]
        return sorted(found, key=lambda step: step.at)

    def wait_for(self, what: Callable[[], object], seconds: float = 120.0, name: str = "") -> None:
        """Wait until the condition is true; fail if the run ends before."""

        def holds() -> object:
            if (there := what()) or self.entered.poll() is None:
                return there
            self.wait()
            return pytest.fail(f"the run ended with {self.code}:\n{self.err}")

        try:
            wait_until(holds, seconds, name or "the run to do it")
        except pytest.fail.Exception as error:
            lines = "\n".join(map(json.dumps, self.journal()[1:]))
            raise pytest.fail.Exception(f"{error}; it did:\n{lines}") from None

    def wait_for_world(self, size: int, *, after: int = 0, seconds: float = 120.0) -> int:
        """Wait until all ranks of a world of that size are in their second step, in an attempt after `after`; return it.

        From the second step on, they have asked `should_checkpoint`, so the attempt can be saved.
        """
        found: list[int] = []

        def trains() -> object:
            done = Counter((step.attempt, step.world, step.rank) for step in self.steps())
            ranks = Counter((attempt, world) for (attempt, world, _), steps in done.items() if steps > 1)
            full = sorted(number for (number, world), seen in ranks.items() if world == size == seen and number > after)
            found[:] = full[-1:]
            return full and len(self.pids(full[-1])) == size  # workers may be quicker than the word of their start

        self.wait_for(trains, seconds, f"a world of {size} to train")
        return found[0]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one rank; `at` is CLOCK_MONOTONIC, the same on all hosts."""

    at: float
    attempt: int
    rank: int
    world: int
    number: int
    host: str


STEPS = """
import os, socket, sys, time
from pathlib import Path
import raylaunch.worker as launch
saving = "--saving" in sys.argv
attempt, rank, world = (os.environ[name] for name in ("RAYLAUNCH_ATTEMPT", "RANK", "WORLD_SIZE"))
saved = Path("saved")
step = int(saved.read_text()) + 1 if saved.exists() else 0
with open(f"steps.{attempt}.{rank}.{os.getpid()}", "w", buffering=1) as log:
    while not os.path.exists("enough"):
        launch.heartbeat()
        log.write(f"{time.monotonic()} {attempt} {rank} {world} {step} {socket.gethostname()}\\n")
        time.sleep(0.02)
        if saving and launch.should_checkpoint(step):
            if rank == "0":
                saved.write_text(str(step))
            launch.checkpointed(step)
        step += 1
"""
"""A script that pretends to train until the file `enough` exists, and records every step of every rank."""


@dataclass
class Launcher:
    """Starts `raylaunch`, in a folder of its own."""

    folder: Path
    hosts: Hosts
    warm_torch: WarmPython
    runs: list[Run] = field(default_factory=list)

    def script(self, text: str, name: str = "train.py") -> str:
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    def start(
        self,
        text: str = STEPS,
        *args: str,
        on: Host | None = None,
        around: dict[str, str] | None = None,
        more: dict[str, str] | None = None,
        **job: Any,
    ) -> Run:
        """Run the script with one worker on each of three nodes and no restarts, unless the arguments say otherwise.

        `on`: where the driver is, the head if not said; `around`: more of its environment. With that it is a new
        interpreter, in which Ray has not read its settings yet, else a fork of one that has imported Ray. `more`: more of
        its environment, without that.
        """
        mark = secrets.token_hex(8)
        defaults = {"nnodes": 3, "nproc_per_node": 1, "cpus_per_worker": 1, "preload": [], "last_call": 0.5}
        job = {"entrypoint": {"script": self.script(text), "args": list(args)}} | defaults | {"show": "none"} | job
        torch = {WARM_TORCH: str(self.warm_torch.executable())}  # a fork server would take 2 s of CPU to import it
        job["env"] = {MARK: mark} | (torch if job["preload"] else {}) | job.get("env", {})
        (self.folder / "job.yaml").write_text(json.dumps(job))
        host, env = on or self.hosts.head, self.hosts.env(**{MARK: mark} | (around or {}) | (more or {}))
        if around:
            command = [sys.executable, "-m", "raylaunch", "job.yaml"]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            entered = self.hosts.popen(host, command, cwd=self.folder, env=env, **pipes, preexec_fn=lambda: dispose(()))
            run = Run(self.hosts, entered, inside(entered), self.folder, mark)
        else:
            forked = WarmCommand(self.hosts.warm, "raylaunch", "job.yaml", env=env, cwd=self.folder, beside=host.init)
            run = Run(self.hosts, forked, forked.pid, self.folder, mark)
        self.runs.append(run)
        return run


@pytest.fixture
def launcher(tmp_path: Path, hosts: Hosts, warm_torch: WarmPython) -> Iterator[Launcher]:
    """Check after each test that no process of its runs is left on any host."""
    found = Launcher(tmp_path, hosts, warm_torch)
    try:
        yield found
        for run in found.runs:
            with contextlib.suppress(ProcessLookupError):
                run.signal(signal.SIGKILL)
            run.wait()
        for host in hosts.hosts:
            hosts.heal(host)
            hosts.resume(host)
        for run in found.runs:
            wait_until(
                lambda run=run: run.everywhere() == [],
                100,
                f"processes of the run to be gone: {run.everywhere()}",
            )
    finally:
        for run in found.runs:
            send((process.pid for process in run.everywhere()), signal.SIGKILL)


@pytest.fixture
def now() -> Callable[[], float]:
    """Return the time of the clock that `Step.at` uses."""
    return time.monotonic
