"""A node between two runs: its fork server stays, and nothing of the first run reaches the second."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.core.machine.events_and_actions import WorkersStarted
from raylaunch.core.machine.workers_status import WorkersStatus
from raylaunch.node.linux import processes
from raylaunch.node.linux.ram_folder import RamFolder
from raylaunch.node.protocol.node_status import Ready
from raylaunch.node.state.state_memory import StateMemory
from raylaunch.node.supervisor.forkserver_client import ForkServerClient
from raylaunch.node.supervisor.supervisor import Supervisor
from raylaunch.worker.heartbeats.shared_page import SharedPage
from raylaunch.worker.runtime import staleness
from tests.node.harness import MessagePipe, Node, basic_env, is_listening, marked, send_signal, until, wait_gone
from tests.node.test_lease import renew_lease

pytestmark = pytest.mark.timeout(300)

LINGERS = (
    "import subprocess, time\nsubprocess.Popen(['sleep', '60'], start_new_session=True)\nsay('up')\ntime.sleep(60)"
)


@pytest.fixture
def first_run(tmp_path: Path, mark: str, pipe: MessagePipe) -> Iterator[Node]:
    """A node whose fork server has imported a module of the user."""
    (tmp_path / "mine.py").write_text("WORD = 'old'")
    node = Node(env=basic_env(mark) | {"PYTHONPATH": str(tmp_path)}, preload=("mine",))
    node.use_for_test(tmp_path, mark, pipe)
    yield node
    node.supervisor.close()


def released_client(node: Node) -> ForkServerClient:
    client = node.supervisor.release_client()
    assert client is not None
    return client


def next_run(node: Node) -> Ready:
    """Start a second run with the same fork server."""
    client = released_client(node)
    assert client.activate()
    spec = node.supervisor.spec
    told = replace(spec.agent, run_dir=str(node.folder / "second"))
    node.supervisor = Supervisor(told, address=spec.address, env=spec.env, cwd=spec.cwd, client=client)
    node.attempt, node.told = 0, WorkersStatus()
    node.unseen.clear()
    return node.start()


def test_the_folders_are_not_made_before_there_are_processes_that_remove_them(mark: str) -> None:
    """An agent may be killed in its first second, and its subreaper with it, before that is more than an interpreter."""
    node = Node(env=basic_env(mark), preload=(), run_dir="")
    with contextlib.closing(node.supervisor):
        node.supervisor.start()
        files, logs = node.supervisor.client.ram_folder.path, node.supervisor.spec.run_dir
        send_signal(node.supervisor.client.subreaper_pid)
        assert not os.path.exists(os.path.dirname(files))
        assert not os.path.exists(logs)
        node.wait(Ready)
        assert os.path.isdir(files)
        assert os.path.isdir(logs)
    assert not os.path.exists(logs)


def test_the_fork_server_serves_the_next_run(first_run: Node, pipe: MessagePipe) -> None:
    """No process of the first run is left; attempts begin at 1 again, in the new run folder."""
    ready = first_run.start()
    first_run.run(first_run.script("import sys; sys.exit(1)"))
    stores = [first_run.open_store()]
    first_run.launch(first_run.script(LINGERS), nproc=2)
    first_run.wait(WorkersStarted)
    pipe.read_lines(2)
    stores.append(first_run.open_store())
    assert next_run(first_run) == ready
    assert first_run.children() == set()
    assert not any(map(is_listening, stores))
    port = first_run.open_store()
    outcome = first_run.run(first_run.script("import os, sys; print(os.environ['RAYLAUNCH_ATTEMPT']); sys.exit(3)"))
    assert outcome.failure.attempt == 1
    assert outcome.exit_code == 3
    assert outcome.stdout() == "1\n"
    assert outcome.folders[0] == first_run.folder / "second" / "attempt-1" / "rank-0"
    assert is_listening(port)


def test_late_events_of_a_run_do_not_reach_the_next(first_run: Node, pipe: MessagePipe) -> None:
    """Workers that failed or still ran when the first run ended are no failures of the second."""
    first_run.start()
    first_run.launch(first_run.script("import time; say('up'); time.sleep(60)"), nproc=2)
    pipe.read_lines(2)
    for pid in first_run.children():
        send_signal(pid)
    next_run(first_run)
    assert first_run.events_within(0.1) == []
    assert first_run.supervisor.heartbeat() is None
    assert first_run.supervisor.read_result(0, 0) == b""
    assert first_run.run(first_run.script("print('well')")).exit_code == 0


def test_a_fork_server_that_does_not_answer_is_not_released(first_run: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """It and all its processes are killed, and no client is returned."""
    ready = first_run.start()
    monkeypatch.setattr("raylaunch.node.supervisor.forkserver_client.RESET_SECONDS", 0.1)
    send_signal(ready.pid, signal.SIGSTOP)
    assert first_run.supervisor.release_client() is None
    wait_gone(ready.pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_fork_server_that_is_gone_or_stopped_is_not_activated(
    first_run: Node, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    ready = first_run.start()
    client = released_client(first_run)
    monkeypatch.setattr("raylaunch.node.supervisor.forkserver_client.ACTIVATE_SECONDS", 0.1)
    send_signal(ready.pid, number)
    assert not client.activate()
    client.close()
    wait_gone(ready.pid)


def test_a_fork_server_with_an_edited_module_is_not_activated(first_run: Node) -> None:
    """Whatever the modification time of its file is. The fork server ends."""
    ready = first_run.start()
    assert next_run(first_run) == ready
    module = first_run.folder / "mine.py"
    module.write_text("WORD = 'new'")
    os.utime(module, (1.0, 1.0))
    client = released_client(first_run)
    assert not client.activate()
    client.close()
    wait_gone(ready.pid)


def test_an_installed_package_makes_imports_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Site-packages has changed, whatever its modification time says. Changes elsewhere in the path do not count."""
    installed, other = tmp_path / "site-packages", tmp_path / "mine"
    for folder in (installed, other):
        folder.mkdir()
    path = [str(installed), str(other), "/nonexistent/site-packages"]
    seen = SimpleNamespace(path=path, modules={}, prefix="/usr", base_prefix="/usr")
    monkeypatch.setattr(staleness, "sys", seen)
    began = installed.stat().st_ctime
    until(lambda: time.time() > began + 0.05, "the clock does not advance")
    (other / "file").touch()
    assert not staleness.changed_since(began)
    (installed / "torch").mkdir()
    os.utime(installed, (1.0, 1.0))
    assert staleness.changed_since(began)


@pytest.mark.parametrize("is_told", [True, False])
def test_when_the_lease_has_expired_the_next_agent_gets_what_state_has(
    tmp_path: Path, mark: str, pipe: MessagePipe, is_told: bool
) -> None:
    """Whether the agent ends the rest, or the rest ends by itself first. What keeps it ends with the agent.

    Ray kills the children of an actor before the actor, so it is no child.
    """
    secret = secrets.token_hex(8)
    node = Node(env=basic_env(mark), preload=(), state_secret=secret)
    node.use_for_test(tmp_path, mark, pipe)
    with contextlib.closing(node.supervisor):
        node.start()
        node.launch(node.script(LINGERS))
        pipe.read_lines()
        client, held = node.supervisor.client, HeldCommit(rank=0, world_size=1, commit=Commit(1, 5))
        assert node.supervisor.state.files.reserve((0, 0), 10_000) == ""
        node.supervisor.state.files.get((0, 0)).header().seal(held, tensors=0, pickled=0)
        Path(client.ram_folder.path, "snapshot").write_text("x")
        if is_told:
            client.leave_state()
        else:
            renew_lease(node, 0.1)
            node.wait(Ready)
        until(lambda: client.subreaper_pid not in marked(mark), "the subreaper is still a child of the agent")
        (keeper,) = marked(mark)
        assert keeper not in processes.children(os.getpid())
        page, fd = SharedPage.create()
        folder = RamFolder()
        with contextlib.closing(StateMemory(page, secret, None, folder)) as heir:
            folder.create()
            heir.files.adopt()
            assert heir.held() == (held,)
            assert os.listdir(folder.path) == ["snapshot"]
        folder.remove()
        os.close(fd)
    assert marked(mark) == {}
