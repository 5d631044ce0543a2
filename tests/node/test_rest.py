"""A node between two runs: what stays, what is gone, and that the second run knows nothing of the first."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from raylaunch.core.events import WorkersStarted
from raylaunch.node import outdated
from raylaunch.node.hearth import Hearth
from raylaunch.node.messages import Ready
from raylaunch.node.supervisor import Supervisor
from tests.node.harness import Ears, Node, basic_env, is_listening, send, until, wait_gone

pytestmark = pytest.mark.timeout(300)

LINGERS = (
    "import subprocess, time\nsubprocess.Popen(['sleep', '60'], start_new_session=True)\nsay('up')\ntime.sleep(60)"
)


@pytest.fixture
def first(tmp_path: Path, mark: str, ears: Ears) -> Iterator[Node]:
    """A node whose fork server has imported next to nothing: a module of the user's own."""
    (tmp_path / "mine.py").write_text("WORD = 'old'")
    node = Node(env=basic_env(mark) | {"PYTHONPATH": str(tmp_path)}, preload=("mine",))
    node.move_to(tmp_path, mark, ears)
    yield node
    node.supervisor.close()


def rested(node: Node) -> Hearth:
    hearth = node.supervisor.rest()
    assert hearth is not None
    return hearth


def next_run(node: Node) -> Ready:
    """Another run at the same place."""
    hearth = rested(node)
    assert hearth.wake()
    settings = replace(node.supervisor.settings, run_dir=str(node.folder / "second"))
    node.supervisor = Supervisor(settings, hearth)
    node.attempt = 0
    node._unseen.clear()
    return node.start()


def test_all_of_a_run_is_gone_and_its_fork_server_serves_the_next(first: Node, ears: Ears) -> None:
    """Workers, what left their groups, and stores; attempts begin at 1, in the folders of the new run."""
    ready = first.start()
    first.run(first.script("import sys; sys.exit(1)"))
    stores = [first.open_store()]
    first.launch(first.script(LINGERS), nproc=2)
    first.wait(WorkersStarted)
    ears.hear(2)
    stores.append(first.open_store())
    assert next_run(first) == ready
    assert first.children() == set()
    assert not any(map(is_listening, stores))
    port = first.open_store()
    outcome = first.run(first.script("import os, sys; print(os.environ['RAYLAUNCH_ATTEMPT']); sys.exit(3)"))
    assert outcome.failure.attempt == 1
    assert outcome.exit_code == 3
    assert outcome.stdout() == "1\n"
    assert outcome.folders[0] == first.folder / "second" / "attempt-1" / "rank-0"
    assert is_listening(port)


def test_late_words_of_a_run_do_not_reach_the_next(first: Node, ears: Ears) -> None:
    """Workers that failed, or were still running, when the run was over are nobody's failures."""
    first.start()
    first.launch(first.script("import time; say('up'); time.sleep(60)"), nproc=2)
    ears.hear(2)
    for pid in first.children():
        send(pid)
    next_run(first)
    assert first.silence(0.1) == []
    assert first.supervisor.pulse() is None
    assert first.supervisor.values() == {}
    assert first.run(first.script("print('well')")).exit_code == 0


def test_a_fork_server_that_does_not_answer_is_of_no_use(first: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ends that it has started, and nothing is handed on."""
    ready = first.start()
    monkeypatch.setattr("raylaunch.node.hearth._CLEAR_SECONDS", 0.1)
    send(ready.pid, signal.SIGSTOP)
    assert first.supervisor.rest() is None
    wait_gone(ready.pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_fork_server_that_is_gone_or_stuck_is_not_woken(
    first: Node, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    ready = first.start()
    hearth = rested(first)
    monkeypatch.setattr("raylaunch.node.hearth._WAKE_SECONDS", 0.1)
    send(ready.pid, number)
    assert not hearth.wake()
    hearth.close()
    wait_gone(ready.pid)


def test_a_module_that_was_edited_is_not_woken_as_it_was(first: Node) -> None:
    """Whatever time its file bears; and all that it was imported by ends."""
    ready = first.start()
    assert next_run(first) == ready
    module = first.folder / "mine.py"
    module.write_text("WORD = 'new'")
    os.utime(module, (1.0, 1.0))
    hearth = rested(first)
    assert not hearth.wake()
    hearth.close()
    wait_gone(ready.pid)


def test_a_package_that_was_installed_outdates_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder changes, whatever becomes of its files; what is elsewhere in the path says nothing."""
    installed, other = tmp_path / "site-packages", tmp_path / "mine"
    for folder in (installed, other):
        folder.mkdir()
    path = [str(installed), str(other), "/nonexistent/site-packages"]
    seen = SimpleNamespace(path=path, modules={}, prefix="/usr", base_prefix="/usr")
    monkeypatch.setattr(outdated, "sys", seen)
    began = installed.stat().st_ctime
    until(lambda: time.time() > began + 0.05, "the clock goes on")
    (other / "file").touch()
    assert not outdated.since(began)
    (installed / "torch").mkdir()
    os.utime(installed, (1.0, 1.0))
    assert outdated.since(began)
