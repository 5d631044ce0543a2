"""One private Ray cluster for the session, and a check after every test that nothing of it is left behind."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.private_cluster import MARK, WARM_TORCH, Cluster, end_marked, marked, private_cluster
from tests.warm_command import WarmCommand
from tests.warm_python import WarmPython

_LIMIT = 200


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with private_cluster(cpus=4, lean=True) as found:
        yield found


@dataclass
class Run:
    """A `raylaunch` process, its output, and what it left in its run folder."""

    process: subprocess.Popen[str] | WarmCommand
    folder: Path
    mark: str
    code: int = -1
    out: str = ""
    err: str = ""

    def wait(self) -> Run:
        self.out, self.err = self.process.communicate(timeout=_LIMIT)
        self.code = self.process.returncode
        return self

    @property
    def run_dir(self) -> Path:
        (found,) = [path.parent.resolve() for path in self.folder.glob("runs/*/latest/events.jsonl")]
        return found

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "result.json").read_text())

    def log(self, rank: int, *, attempt: int = 1, name: str = "stdout.log") -> str:
        path = self.run_dir / f"attempt-{attempt}" / f"rank-{rank}" / name
        return path.read_text() if path.exists() else ""

    def processes(self, word: str) -> list[int]:
        """Return the run's processes whose command line contains the word."""
        found = []
        for pid in marked(self.mark):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if word in line:
                found.append(pid)
        return found


def dispose(ignored: tuple[int, ...]) -> None:
    """Set signals to their defaults, or ignore them: the process that runs the tests may ignore some itself."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)


@dataclass
class Launcher:
    """Starts `raylaunch` in a folder of its own."""

    folder: Path
    cluster: Cluster
    runs: list[Run] = field(default_factory=list)
    warm_torch: Callable[[], WarmPython] | None = None
    """Returns what fork servers of jobs that preload torch are forked from: each would take 2 s of CPU to import it."""

    def script(self, text: str, name: str = "train.py") -> str:
        (self.folder / name).write_text(textwrap.dedent(text))
        return name

    def preload(self) -> list[str]:
        """Preload torch only if a script uses it: to import it takes most of the time of a run."""
        wanted = any("torch" in script.read_text() for script in self.folder.glob("*.py"))
        return ["torch"] if wanted else []

    def torch_env(self, preload: Iterable[str]) -> dict[str, str]:
        """Return the variables of a job by which its fork servers find imported what they preload of torch."""
        if self.warm_torch is None or not any(name.startswith("torch") for name in preload):
            return {}
        return {WARM_TORCH: str(self.warm_torch().executable())}

    def start(
        self,
        *overrides: str,
        plan: bool = False,
        env: dict[str, str] | None = None,
        ignored: tuple[int, ...] = (),
        warm: bool = True,
        **job: Any,
    ) -> Run:
        """Start a run. `env`: variables of the driver; `ignored`: signals that are ignored when it starts.

        `warm`: fork servers find torch imported if they preload it. With either of the others the driver is a new
        interpreter, as a person starts it, else a fork of one that has imported Ray.
        """
        mark = secrets.token_hex(8)
        job = {"nnodes": 2, "nproc_per_node": 2, "placement": "pack", "preload": self.preload()} | job
        job["env"] = {MARK: mark} | (self.torch_env(job["preload"]) if warm else {}) | job.get("env", {})
        (self.folder / "job.yaml").write_text(json.dumps(job))
        command = ["-m", "raylaunch", "job.yaml", *overrides, *(["--plan"] if plan else [])]
        run = Run(self._process(command, env, ignored), self.folder, mark)
        self.runs.append(run)
        return run

    def _process(
        self, command: list[str], env: dict[str, str] | None, ignored: tuple[int, ...]
    ) -> subprocess.Popen[str] | WarmCommand:
        if env is None and not ignored and self.cluster.warm is not None:
            return WarmCommand(self.cluster.warm, *command[1:], env=self.cluster.env(), cwd=self.folder)
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=self.folder,
            env=self.cluster.env(**(env or {})),
            preexec_fn=lambda: dispose(ignored),  # noqa: PLW1509
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def command(self, program: str, *args: str, env: dict[str, str] | None = None) -> WarmCommand:
        """Start what `python` runs."""
        assert self.cluster.warm is not None
        environ = self.cluster.env(**(env or {}))
        return WarmCommand(self.cluster.warm, program, *args, env=environ, cwd=self.folder)

    def python(self, program: str, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a module or a file in a fork of a process that has imported Ray."""
        command = self.command(program, *args, env=env)
        out, err = command.communicate(_LIMIT)
        return subprocess.CompletedProcess([program, *args], command.wait(), out, err)

    def run(self, *overrides: str, **job: Any) -> Run:
        return self.start(*overrides, **job).wait()


@pytest.fixture
def launcher(tmp_path: Path, cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Launcher]:
    """Check after each test that no process of its runs, no actor and no placement group is left."""
    found = Launcher(tmp_path, cluster, warm_torch=lambda: request.getfixturevalue("warm_torch"))
    try:
        yield found
        for run in found.runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.communicate()
            wait_until(lambda run=run: not marked(run.mark), 100, f"processes of the run to be gone ({run.mark})")
        try:
            wait_until(lambda: left_in_ray(cluster) == [], 100, "actors and placement groups to be gone")
        except pytest.fail.Exception as error:
            raise pytest.fail.Exception(f"{error}: {left_in_ray(cluster)}") from None
    finally:
        for run in found.runs:
            end_marked(run.mark)
        left_in_ray(cluster, "end")  # of a test that failed: other tests use the cluster


_INSPECTOR = """
import contextlib, json, ray, sys
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from ray._private.state import actors
OURS = "AgentActor", "DriverActor", "InterimKeeper", "ObjectLender", "PlacementGroupCreator", "PortHolder"
ray.init(log_to_driver=False, logging_level="ERROR")
def end():
    for each in ray.util.list_named_actors(all_namespaces=True):
        with contextlib.suppress(ValueError):  # it has ended meanwhile
            if each["namespace"] == "raylaunch":
                ray.kill(ray.get_actor(each["name"], each["namespace"]))
    for group in placement_group_table().values():
        if group["name"].startswith("raylaunch-slots") and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group["placement_group_id"]))))

for line in sys.stdin:
    if line.strip() == "end":
        end()
    found = [
        f"actor {actor['ActorID']} {actor['State']}"
        for actor in actors().values()
        if actor["State"] != "DEAD" and actor["ActorClassName"] in OURS
    ]
    found += [
        f"group {group['placement_group_id']} {group['state']}"
        for group in placement_group_table().values()
        if group["state"] != "REMOVED"
    ]
    print(json.dumps(found), flush=True)
"""
_inspectors: dict[Path, subprocess.Popen[str]] = {}
"""By the folder of the cluster, as a later one may have the same port. To connect takes seconds, so each lives as long as
its cluster."""


def left_in_ray(cluster: Cluster, order: str = "") -> list[str]:
    """Return the agents' actors and all placement groups that the cluster still has.

    `order` "end": end those of detached runs first, which would else go on.
    """
    if cluster.folder not in _inspectors:
        _inspectors[cluster.folder] = subprocess.Popen(
            [sys.executable, "-c", _INSPECTOR],
            env=cluster.env(**{MARK: cluster.mark}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    inspector = _inspectors[cluster.folder]
    assert inspector.stdin is not None
    assert inspector.stdout is not None
    inspector.stdin.write(f"{order}\n")
    inspector.stdin.flush()
    while not (line := inspector.stdout.readline()).startswith("["):
        assert line, "the inspector is gone"  # else it is the autoscaler, which has Ray print what it cannot give
    return json.loads(line)


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until the condition is true; fail after so many seconds."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > seconds:
            pytest.fail(f"waited {seconds} s in vain for {what}")
        time.sleep(min(0.1, max(0.02, waited / 20)))  # many conditions read all of /proc, and others need the CPUs


@pytest.fixture
def until() -> Callable[[Callable[[], object], float, str], None]:
    return wait_until


def kill(pid: int, number: int = 9) -> None:
    os.kill(pid, number)
