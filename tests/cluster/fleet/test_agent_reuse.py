"""`keep_warm`: idle agents between runs of one process, which the next run uses or which end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import left_in_ray, wait_until
from tests.private_cluster import Cluster, end_marked, marked

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

BEGINNING = """
import json, os, signal, sys, time
import raylaunch
from raylaunch.cluster.session import local_session
if os.environ.get("RAY_ADDRESS"):
    import ray
ADDRESS = "auto" if os.environ.get("RAY_ADDRESS") else "none"

def launch(function, *args, **settings):
    told = dict(nnodes=2, nproc_per_node=1, placement="pack", keep_warm=1000, backend="none", preload=[], show="none",
        ray={"address": ADDRESS})
    return raylaunch.launch(function, args, **{**told, "env": {"RAYLAUNCH_TEST_MARK": sys.argv[1]}, **settings})

def pools():
    found = [local_session.FORK_SERVERS]
    if "ray" in sys.modules:
        from raylaunch.cluster.session import ray_session
        found.append(ray_session.AGENTS)
    return found

def servers():
    return sorted(one.pid for pool in pools() for one in pool.agents())

def close_pools():
    for pool in pools():
        pool.close()

def parent():
    import os
    return os.getppid()

def free():
    deadline = time.monotonic() + 100
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline, "the run's resources are still taken"
        time.sleep(0.05)
"""


class Program:
    """A process that launches several times. It prints lines of JSON, and waits for lines on stdin."""

    def __init__(self, cluster: Cluster | None, folder: Path, text: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self.mark = secrets.token_hex(8)
        path = folder / "program.py"
        path.write_text(BEGINNING + textwrap.dedent(text))
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(path), self.mark],
            cwd=folder,
            env=cluster.env() if cluster is not None else without_cluster(folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "stderr").open("w"),
            text=True,
        )

    def say(self) -> Any:
        """Return the next line that it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, (self.folder / "stderr").read_text()
        return json.loads(line)

    def go_on(self) -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def nothing_left(self) -> None:
        """Wait until no process, actor or group of a run is left."""
        wait_until(lambda: not marked(self.mark), 100, "its processes to be gone")
        if (cluster := self.cluster) is not None:
            wait_until(lambda: left_in_ray(cluster) == [], 100, "its actors and groups to be gone")


def without_cluster(folder: Path) -> dict[str, str]:
    """Return an environment for runs on this machine alone."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"TMPDIR": str(folder)}


@pytest.fixture
def program(launcher) -> Iterator[Callable[[str], Program]]:
    with programs(launcher.cluster, launcher.folder) as run:
        yield run


@contextlib.contextmanager
def programs(cluster: Cluster | None, folder: Path) -> Iterator[Callable[[str], Program]]:
    """Start programs, and check that nothing of them is left."""
    found: list[Program] = []

    def run(text: str) -> Program:
        found.append(Program(cluster, folder, text))
        return found[-1]

    try:
        yield run
        for one in found:
            one.process.kill()
            one.process.communicate()
            one.nothing_left()
    finally:
        for one in found:
            one.process.kill()
            end_marked(one.mark)


def test_the_next_run_uses_the_same_fork_servers(program, launcher):
    """And nothing else of the last run. Between runs no resources are reserved."""
    found = program(
        """
        def fails(text, attempts):
            import os
            print(text, flush=True)
            if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < attempts:
                raise KeyError(text)
            return os.environ["RAYLAUNCH_ATTEMPT"], os.getppid()

        first = launch(parent, node_timeout=5)
        free()
        print(json.dumps([sorted(first), servers()]))
        time.sleep(5.1)  # longer than a node may be silent in a run
        try:
            launch(fails, "one", 9, max_restarts=1, name="one")
        except raylaunch.JobFailedError as error:
            print(json.dumps([str(error.__cause__), servers()]))
        print(json.dumps([launch(fails, "two", 1, max_restarts=1, name="two"), servers()]))
        """
    )
    first, resting = found.say()
    assert first == resting
    assert found.say() == ["'one'", resting]
    results, again = found.say()
    assert [attempt for attempt, _ in results] == ["2", "2"]
    assert sorted(pid for _, pid in results) == resting == again
    assert found.process.wait(100) == 0
    runs = {name: next(launcher.folder.glob(f"runs/{name}/latest")) for name in ("one", "two")}
    assert {path.name for path in runs["two"].glob("attempt-*")} == {"attempt-1", "attempt-2"}
    for name, run in runs.items():
        logs = run.glob("attempt-*/rank-*/stdout.log")
        assert {log.read_text() for log in logs} - {""} == {f"{name}\n"}  # who was stopped may have said nothing
        assert "NodeLost" not in (run / "events.jsonl").read_text()
    codes = {name: json.loads((run / "result.json").read_text())["exit_code"] for name, run in runs.items()}
    assert codes == {"one": 1, "two": 0}
    found.nothing_left()


def test_a_run_with_another_key_ends_the_idle_agents(program):
    """Another environment, another number of workers. A run without `keep_warm` leaves none."""
    found = program(
        """
        first = launch(parent)
        second = launch(parent, env={"RAYLAUNCH_TEST_MARK": sys.argv[1], "OTHER": "1"})
        print(json.dumps([first, second, servers()]))
        third = launch(parent, nnodes=1, nproc_per_node=2)
        print(json.dumps([third, servers()]))
        launch(parent, keep_warm=0)
        print(json.dumps([servers(), ray.is_initialized()]))
        sys.stdin.readline()
        """
    )
    first, second, resting = found.say()
    assert not {*first} & {*second}
    assert sorted(second) == resting
    third, resting = found.say()
    assert len({*third}) == 1
    assert [third[0]] == resting
    assert found.say() == [[], False]
    found.nothing_left()


def test_an_idle_agent_that_does_not_answer_is_replaced(program):
    """Its fork server died, or it died or hangs itself: the run starts new ones."""
    found = program(
        """
        from raylaunch.cluster.fleet import agent_reuse as warmth

        def above(pid):
            return int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1])

        warmth._WAKE_SECONDS = 5.0
        before = launch(parent)
        for name, number, steps in (("server", 9, 0), ("agent", 9, 2), ("hangs", signal.SIGSTOP, 0)):
            pid = harmed = servers()[0]
            for _ in range(steps):
                pid = above(pid)
            os.kill(pid, number)
            after = launch(parent, name=name)
            print(json.dumps([sorted({*before} - {*after}) == [harmed], sorted(after) == servers()]))
            before = after
        """
    )
    for name in ("server", "agent", "hangs"):
        assert found.say() == [True, True]
        (events,) = found.folder.glob(f"runs/{name}/latest/events.jsonl")
        assert "NodeLost" not in events.read_text()


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_idle_agents_end(program, launcher, end):
    """When their time is over, they are closed, or their process ends or is killed."""
    found = program(
        f"""
        if {end == "exit"}:
            launch(parent, nnodes=1, keep_warm=0.1)
            while ray.is_initialized():
                time.sleep(0.05)
            print(json.dumps(servers()))
            launch(parent, nnodes=1)
            close_pools()
            print(json.dumps([servers(), ray.is_initialized()]))
            sys.stdin.readline()
        launch(parent, nnodes=1)
        print(json.dumps(servers()))
        sys.stdin.readline()
        """
    )
    if end == "exit":
        assert found.say() == []
        assert found.say() == [[], False]
        found.nothing_left()
        found.go_on()
    assert len(found.say()) == 1
    assert [one.split()[0] for one in left_in_ray(launcher.cluster)] == ["actor"]
    if end == "kill":
        os.kill(found.process.pid, signal.SIGKILL)
    else:
        found.go_on()
    found.nothing_left()


def test_a_connection_that_was_there_before_is_used_and_stays(program):
    """With idle agents and without, and without RAY_ADDRESS. What the program does with the connection works on."""
    found = program(
        """
        ray.init(log_to_driver=False, logging_level="ERROR")
        del os.environ["RAY_ADDRESS"]
        job = ray.get_runtime_context().get_job_id()
        launch(parent, nnodes=1, keep_warm=0)
        first = launch(parent, nnodes=1)
        print(json.dumps([first == launch(parent, nnodes=1), len(servers())]))
        close_pools()
        print(json.dumps([ray.get_runtime_context().get_job_id() == job, ray.get(ray.put(1)), servers()]))
        """
    )
    assert found.say() == [True, 1]
    assert found.say() == [True, 1, []]


def test_without_a_cluster_too(tmp_path):
    """The fork servers stay as children of the process, and end with it or when their time is over."""
    with programs(None, tmp_path) as run:
        found = run(
            """
            first = launch(parent)
            print(json.dumps([sorted(first) == servers(), first == launch(parent)]))
            os.environ["OTHER"] = "1"
            print(json.dumps([{*first} & {*launch(parent)} == set(), len(servers())]))
            os.kill(servers()[0], 9)
            print(json.dumps([len({*servers()} & {*launch(parent, keep_warm=0.1)}), "ray" in sys.modules]))
            while servers():
                time.sleep(0.05)
            launch(parent)
            print(json.dumps("done"))
            sys.stdin.readline()
            """
        )
        assert found.say() == [True, True]
        assert found.say() == [True, 2]
        assert found.say() == [1, False]
        assert found.say() == "done"
