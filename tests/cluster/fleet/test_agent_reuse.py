"""`keep_warm`: agents that stay idle after a run, and serve the next one, of any process, or end."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raylaunch.errors import ExitCode
from tests.cluster.conftest import Launcher, Run, left_in_ray, wait_until
from tests.private_cluster import MARK, Cluster, end_marked, marked

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

BEGINNING = """
import json, os, signal, sys, time
import ray
import raylaunch

def launch(function, *args, **settings):
    told = dict(nnodes=2, nproc_per_node=1, placement="pack", keep_warm=1000, backend="none", preload=[], show="none")
    return raylaunch.launch(function, args, **{**told, "env": {"RAYLAUNCH_TEST_MARK": sys.argv[1]}, **settings})

def parent():
    import os
    return os.getppid()
"""


class Program:
    """A process that launches several times. It prints lines of JSON, and waits for lines on stdin."""

    def __init__(self, cluster: Cluster, folder: Path, text: str) -> None:
        self.folder = folder
        self.mark = secrets.token_hex(8)
        path = folder / "program.py"
        path.write_text(BEGINNING + textwrap.dedent(text))
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(path), self.mark],
            cwd=folder,
            env=cluster.env(),
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


@pytest.fixture
def warm(launcher: Launcher) -> Iterator[Launcher]:
    """End the idle agents afterwards, as a person does, and check that nothing is left."""
    yield launcher
    done = launcher.python("raylaunch", "ps", "--end")
    assert done.returncode == ExitCode.OK, done.stderr
    wait_until(lambda: left_in_ray(launcher.cluster) == [], 100, "actors and groups to be gone")


@pytest.fixture
def program(warm: Launcher) -> Iterator[Callable[[str], Program]]:
    found: list[Program] = []

    def run(text: str) -> Program:
        found.append(Program(warm.cluster, warm.folder, text))
        return found[-1]

    yield run
    for one in found:
        one.process.kill()
        one.process.communicate()
        warm.python("raylaunch", "ps", "--end")
        try:
            wait_until(lambda one=one: not marked(one.mark), 100, "its processes to be gone")
        finally:
            end_marked(one.mark)


def command(warm: Launcher, mark: str, *overrides: str, **env: str) -> Run:
    """Start a command whose workers print who has forked them, and do what the file `how` says."""
    script = """
        import os, sys, time
        print(os.getppid(), os.environ.get("OTHER"), flush=True)
        if os.environ.get("OTHER") == "stay":
            time.sleep(1000)
        sys.exit(int(sys.argv[-1]))
    """
    entrypoint = {"script": warm.script(script), "args": [0]}
    words = [f"env.{MARK}={mark}", *overrides]
    return warm.start(*words, env=env or None, entrypoint=entrypoint, keep_warm=1000, show="all", nproc_per_node=1)


def forked_by(run: Run) -> set[str]:
    """Return the process ids of the fork servers."""
    run.wait()
    return {line.split()[-2] for line in run.out.splitlines()}


def test_the_next_command_uses_the_agents_of_the_last_one(warm):
    """Also after a failure. Its environment is its own, and if that differs the agents end. A person ends the rest."""
    mark = secrets.token_hex(8)
    first = forked_by(command(warm, mark))
    assert len(first) == 2, "one fork server for each node"
    failed = command(warm, mark, "entrypoint.args=[7]")
    assert forked_by(failed) <= first
    assert failed.code == 1, failed.err
    assert forked_by(command(warm, mark)) == first
    assert len([line for line in left_in_ray(warm.cluster) if line.startswith("actor")]) == 2
    other = command(warm, mark, OTHER="1")
    assert not forked_by(other) & first
    assert {line.split()[-1] for line in other.out.splitlines()} == {"1"}
    wait_until(lambda: not {int(pid) for pid in first} & {*marked(mark)}, 100, "the agents of the first to end")
    done = warm.python("raylaunch", "ps", "--end")
    assert done.stdout == "2 idle agents ended\n", done.stderr
    wait_until(lambda: not marked(mark), 100, "all to be gone")


def test_commands_that_are_stopped_or_die(warm):
    """Ctrl-C leaves the agents to the next command. A command that is killed, with agents in use, leaves nothing."""
    mark = secrets.token_hex(8)

    def up(name: str) -> set[str]:
        """Return the process ids of the fork servers, once the workers are up."""

        def logs() -> list[str]:
            return [path.read_text() for path in warm.folder.glob(f"runs/{name}/latest/attempt-1/rank-*/stdout.log")]

        wait_until(lambda: len([text for text in logs() if text]) == 2, 100, "the workers to be up")
        return {text.split()[0] for text in logs()}

    first = command(warm, mark, "name=first", OTHER="stay")
    servers = up("first")
    first.process.send_signal(signal.SIGINT)
    first.wait()
    assert first.code == ExitCode.INTERRUPTED, first.err
    second = command(warm, mark, "name=second", OTHER="stay")
    assert up("second") == servers
    second.process.kill()
    wait_until(lambda: not marked(mark), 100, "all to be gone")


def test_the_next_run_of_a_program_uses_the_same_fork_servers(program, warm):
    """And nothing else of the last run. Between runs no resources are reserved."""
    found = program(
        """
        def fails(text, attempts):
            import os
            print(text, flush=True)
            if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < attempts:
                raise KeyError(text)
            return os.environ["RAYLAUNCH_ATTEMPT"], os.getppid()

        first = launch(parent, node_timeout=5, name="first")
        print(json.dumps([sorted(first), ray.is_initialized()]))
        time.sleep(5.1)  # longer than a node may be silent in a run
        try:
            launch(fails, "one", 9, max_restarts=1, name="one")
        except raylaunch.JobFailedError as error:
            print(json.dumps(str(error.__cause__)))
        print(json.dumps(launch(fails, "two", 1, max_restarts=1, name="two")))
        """
    )
    first, is_connected = found.say()
    assert not is_connected
    assert found.say() == "'one'"
    results = found.say()
    runs = {name: next(warm.folder.glob(f"runs/{name}/latest")) for name in ("first", "one", "two")}
    # In place of a node that is lost another agent starts, which ends with its run.
    assert [name for name, run in runs.items() if "NodeLost" in (run / "events.jsonl").read_text()] == []
    assert [attempt for attempt, _ in results] == ["2", "2"]
    assert sorted(pid for _, pid in results) == first
    assert found.process.wait(100) == 0
    assert [line.split()[0] for line in left_in_ray(warm.cluster)] == ["actor"] * 2
    assert {path.name for path in runs["two"].glob("attempt-*")} == {"attempt-1", "attempt-2"}
    for name in ("one", "two"):
        logs = runs[name].glob("attempt-*/rank-*/stdout.log")
        assert {log.read_text() for log in logs} - {""} == {f"{name}\n"}  # who was stopped may have said nothing
    codes = {name: json.loads((run / "result.json").read_text())["exit_code"] for name, run in runs.items()}
    assert codes == {"first": 0, "one": 1, "two": 0}


def test_an_idle_agent_that_does_not_answer_is_replaced(program):
    """Its fork server died, or it died or hangs itself: the run starts new ones."""
    found = program(
        """
        def above(pid):
            return int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1])

        before = launch(parent)
        for name, number, steps in (("server", 9, 0), ("agent", 9, 2), ("hangs", signal.SIGSTOP, 0)):
            pid = harmed = before[0]
            for _ in range(steps):
                pid = above(pid)
            os.kill(pid, number)
            after = launch(parent, name=name)
            print(json.dumps(sorted({*before} - {*after}) == [harmed]))
            before = after
        """
    )
    for name in ("server", "agent", "hangs"):
        assert found.say()
        (events,) = found.folder.glob(f"runs/{name}/latest/events.jsonl")
        assert "NodeLost" not in events.read_text()


def test_idle_agents_end_by_themselves(program, warm):
    """When their time is over, whether their program has ended or not. A connection that was there before stays."""
    found = program(
        """
        ray.init(log_to_driver=False, logging_level="ERROR")
        del os.environ["RAY_ADDRESS"]
        job = ray.get_runtime_context().get_job_id()
        first = launch(parent, nnodes=1)
        print(json.dumps(first == launch(parent, nnodes=1, keep_warm=2.0)))
        print(json.dumps([ray.get_runtime_context().get_job_id() == job, ray.get(ray.put(1))]))
        sys.stdin.readline()
        """
    )
    assert found.say()
    assert found.say() == [True, 1]
    wait_until(lambda: left_in_ray(warm.cluster) == [], 100, "the agent to end")
    wait_until(lambda: marked(found.mark) == [], 100, "its processes to end")
    found.go_on()
