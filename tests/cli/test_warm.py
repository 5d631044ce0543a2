"""`keep_warm` for the command: a driver that stays, as if each run were in the command's own process. Without Ray."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import raylaunch
from raylaunch.cli import fitness, main, status, warm_command, warm_folder
from raylaunch.cli.warm_folder import NoWarmDriverError
from raylaunch.cli.warm_words import State
from raylaunch.errors import ExitCode

pytestmark = pytest.mark.timeout(300)

FAKE = Path(__file__).with_name("warm_fake.py")
STOPS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


@dataclass
class Terminal:
    """Commands of one user in one folder, and the warm drivers that they start."""

    folder: Path
    runtime: Path

    def start(self, *words: str, keep_warm: float = 60, ignored: tuple[str, ...] = (), env=None, **more: Any):
        """`words`: what the run does."""

        def dispose() -> None:
            for name in STOPS:
                signal.signal(signal.Signals[name], signal.SIG_IGN if name in ignored else signal.SIG_DFL)

        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
        flags = ["--keep-warm", str(keep_warm), "--set=signals_to_forward=[SIGUSR1]"]
        return subprocess.Popen(
            [sys.executable, FAKE, "command", *flags, "train.py", *words],
            **{"cwd": self.folder, "text": True, "preexec_fn": dispose} | options,
            env=self.env(**(env or {})),
        )

    def env(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "XDG_", "PYTEST_"))}
        return kept | {"XDG_RUNTIME_DIR": str(self.runtime), "RAY_ADDRESS": "10.0.0.1:6379"} | more

    def run(self, *words: str, code: int = 0, **more: Any) -> tuple[str, str]:
        """What it prints."""
        command = self.start(*words, **more)
        out, err = command.communicate(timeout=200)
        assert command.returncode == code, err
        return out, err

    def facts(self, *words: str, **more: Any) -> dict[str, Any]:
        return json.loads(self.run("facts", *words, **more)[0])

    def pids(self) -> list[int]:
        return [warm_folder.pid_of(path) for path in warm_folder.sockets(self.runtime / "raylaunch")]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    (tmp_path / "train.py").touch()
    runtime = Path(tempfile.mkdtemp(prefix="rl-", dir="/tmp"))  # paths of sockets are short
    found = Terminal(tmp_path, runtime)
    yield found
    for pid in found.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(runtime)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def has_a_terminal() -> None:
    """stdin is the terminal of the session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# One process, as if it were each command's own.


def test_the_next_command_is_served_by_the_same_process(terminal, tmp_path):
    """Folder, umask, environment, stdin and exit code are each command's own, and nothing of them is kept."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.py").touch()
    first = terminal.facts(env={"COLUMNS": "77"})
    (pid,) = terminal.pids()
    with open(other / "train.py") as file:
        second = terminal.facts("3", cwd=other, stdin=file, umask=0o027, ignored=("SIGQUIT",), code=3)
    assert first["pid"] == second["pid"] == pid
    assert (first["cwd"], second["cwd"]) == (str(tmp_path), str(other))
    assert second["umask"] == 0o027
    assert second["stdin"] == str(other / "train.py")
    assert (first["environ"].get("COLUMNS"), second["environ"].get("COLUMNS")) == ("77", os.environ.get("COLUMNS"))
    assert set(STOPS) & set(second["ignored"]) == {"SIGQUIT"}
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert {os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)} == {"/dev/null"}


def test_output_goes_where_the_command_stands(terminal):
    """Colours on a terminal, none on a pipe; stdout and stderr are the command's own."""
    ours, its = pty.openpty()
    out, _ = terminal.run("facts", stderr=its)
    os.close(its)
    said = os.read(ours, 10_000)
    os.close(ours)
    assert b"\x1b[33ma word of ours" in said
    again, plain = terminal.run("facts")
    assert "raylaunch: a word of ours" in plain
    assert json.loads(out)["pid"] == json.loads(again)["pid"]


def test_the_command_itself_is_small(terminal, tmp_path):
    """It loads neither Ray nor torch, nor what only drivers need; without `keep_warm`, nothing of all this."""
    modules = tmp_path / "modules"
    terminal.run("facts", env={"MODULES": str(modules)})
    loaded = set(modules.read_text().split())
    assert "raylaunch.cli.warm_command" in loaded
    assert loaded.isdisjoint({"ray", "torch", "raylaunch.cluster.ray_session"})


def test_without_keep_warm_nothing_changes(monkeypatch, tmp_path):
    """Nor for `check`, which looks at the cluster as it is: no warm driver is asked for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("raylaunch.cli.warm_command.run", Mock(side_effect=AssertionError))
    ran = Mock(return_value=0)
    monkeypatch.setattr("raylaunch.cli.one_run.run", ran)
    assert main.main(["train.py"]) == ExitCode.OK
    assert main.main(["check", "--keep-warm", "60"]) == ExitCode.OK
    assert [call.args[0].keep_warm for call in ran.call_args_list] == [0.0, 0.0]


# Signals, and deaths.


def test_signals_to_the_command_are_the_runs(terminal):
    """All of them, the second Ctrl-C too, with the exit code of a command that runs by itself."""
    command = terminal.start("wait", "5")
    up = command.stdout.readline()
    for name in ("SIGUSR1", *STOPS):
        command.send_signal(signal.Signals[name])
        assert command.stdout.readline() == f"{name}\n"
    command.send_signal(signal.SIGINT)
    assert command.communicate(timeout=200)[0] == "SIGINT\n"
    assert command.returncode == 130
    assert f"up {terminal.facts()['pid']}\n" == up, "the driver has outlived it"


def test_what_was_ignored_stays_ignored(terminal):
    """As under `nohup`, whoever started the driver."""
    terminal.facts()
    command = terminal.start("wait", ignored=("SIGHUP",))
    command.stdout.readline()
    command.send_signal(signal.SIGHUP)
    command.send_signal(signal.SIGTERM)
    assert command.communicate(timeout=200)[0] == "SIGTERM\n"
    assert command.returncode == 143


def test_a_command_that_is_gone_ends_its_run(terminal):
    """As SIGTERM to it would have; the driver is as good as before."""
    command = terminal.start("wait")
    pid = int(command.stdout.readline().split()[1])
    command.kill()
    command.communicate()
    until((terminal.folder / "heard").exists, "the run to hear of it")
    assert (terminal.folder / "heard").read_text() == "SIGTERM\n"
    until(lambda: "rests" in status.text(terminal.env(), end=False), "its end")
    assert terminal.facts()["pid"] == pid


def test_a_terminal_that_is_gone_ends_the_run(terminal):
    """The command gets SIGHUP; nobody reads what follows, which harms neither the run nor the driver."""
    ours, its = pty.openpty()
    owns = {"stdin": its, "stdout": its, "stderr": its, "start_new_session": True, "preexec_fn": has_a_terminal}
    command = terminal.start("wait", **owns)
    os.close(its)
    pid = int(os.read(ours, 1000).decode().split()[1])
    os.close(ours)
    assert command.wait(20) == 129
    assert (terminal.folder / "heard").read_text() == "SIGHUP\n"
    assert terminal.facts()["pid"] == pid


def test_a_driver_that_dies_is_said(terminal):
    """The command has lost its run, and says so with an exit code."""
    command = terminal.start("wait")
    pid = int(command.stdout.readline().split()[1])
    os.kill(pid, signal.SIGKILL)
    _, err = command.communicate(timeout=200)
    assert command.returncode == ExitCode.INTERNAL
    assert "error: the warm driver that had the run has died" in err
    assert terminal.facts()["pid"] != pid


def test_what_dead_drivers_leave_is_swept(tmp_path):
    """The others are found as before."""
    gone, _ = warm_folder.listen(tmp_path, "a")
    stays, path = warm_folder.listen(tmp_path, "b")
    gone.close()
    warm_folder.sweep(tmp_path)
    assert warm_folder.sockets(tmp_path) == [path]
    stays.close()


def test_a_driver_whose_cluster_is_gone_is_replaced(terminal):
    """It is of no use, and knows before it begins: another driver does it."""
    pid = terminal.facts()["pid"]
    (terminal.folder / "another-cluster").touch()
    out, err = terminal.run("facts")
    assert json.loads(out)["pid"] != pid
    assert err.count("\n") == 2, "a word of the run's, and its end"


@pytest.mark.parametrize(("what", "code"), [("mistake", 4), ("linger", 0)])
def test_a_process_that_is_not_as_before_is_not_used_again(terminal, what, code):
    """After a mistake of ours, or with something left that could write to the next one's terminal."""
    first = terminal.facts()["pid"]
    _, err = terminal.run(what, code=code)
    assert ("this is a mistake of raylaunch" in err) == (what == "mistake")
    assert terminal.facts()["pid"] != first


def test_errors_are_said_as_ever(terminal):
    """And are no reason to end the driver."""
    pid = terminal.facts()["pid"]
    assert terminal.run("refuse", code=3)[1] == "error: no cluster\n\nhint: start one\n"
    assert terminal.facts()["pid"] == pid


# Who is served.


def test_another_environment_is_not_served(terminal):
    """It might mean something to Ray or to the workers; another terminal of the same person does not."""
    pid = terminal.facts(env={"LR": "1", "TMUX_PANE": "%1"})["pid"]
    again = terminal.facts(env={"LR": "1", "TMUX_PANE": "%2"})
    assert (again["pid"], again["environ"]["TMUX_PANE"]) == (pid, "%2")
    assert terminal.facts(env={"LR": "2"})["pid"] != pid


def test_edited_code_is_not_served_by_what_it_was(terminal, tmp_path):
    """Every file of the package counts."""
    shutil.copytree(Path(raylaunch.__file__).parent, tmp_path / "raylaunch")
    env = {"PYTHONPATH": str(tmp_path)}
    pid = terminal.facts(env=env)["pid"]
    assert terminal.facts(env=env)["pid"] == pid
    file = tmp_path / "raylaunch" / "core" / "words.py"
    os.utime(file, ns=(1, file.stat().st_mtime_ns - 1))
    assert terminal.facts(env=env)["pid"] != pid


def test_one_that_is_at_work_is_not_waited_for(terminal):
    """Another one runs the next."""
    busy = terminal.start("wait")
    pid = int(busy.stdout.readline().split()[1])
    assert terminal.facts()["pid"] != pid
    busy.terminate()
    busy.communicate(timeout=200)


def test_one_that_is_promised_is_not_given_to_another(terminal, monkeypatch):
    """From the word that it is free until the command has its run, however long that lasts, or is gone."""
    pid = terminal.facts()["pid"]
    folder = terminal.runtime / "raylaunch"
    (path,) = warm_folder.sockets(folder)
    started = []
    monkeypatch.setattr(warm_command, "_started", lambda *_: started.append("another"))
    lines = warm_command._lines(folder, path.name.partition("-")[0])
    assert next(lines).gettimeout() is None
    assert next(warm_command._lines(folder, path.name.partition("-")[0])) is None
    assert started == ["another"]
    lines.close()
    assert terminal.facts()["pid"] == pid


def test_there_are_never_many(monkeypatch, tmp_path):
    """Those that rest for longest make room; where all are at work, the run does without."""
    paths = [tmp_path / f"k-{pid}.sock" for pid in range(warm_command._MOST)]
    states = {path: State(pid=n, title="", seconds=10.0 - n, left=1.0) for n, path in enumerate(paths)}
    ended = []
    monkeypatch.setattr(warm_folder, "sockets", lambda _: paths)
    monkeypatch.setattr(warm_command, "ask", lambda path, word: ended.append(path) if word == "end" else states[path])
    warm_command._make_room(tmp_path)
    assert ended == [paths[0]]
    states = {path: State(pid=n, title="train", seconds=1.0, left=1.0) for n, path in enumerate(paths)}
    with pytest.raises(NoWarmDriverError, match="at work already"):
        warm_command._make_room(tmp_path)


def test_it_ends_when_nobody_comes(terminal):
    """`keep_warm` seconds after its last run, and takes its socket along."""
    pid = terminal.facts(keep_warm=0.2)["pid"]
    until(lambda: is_gone(pid), "the end of the driver")
    assert terminal.pids() == []


# Runs that do without.


@pytest.mark.parametrize(
    ("why", "env", "more"),
    [
        ("no Ray cluster is running", {"RAY_ADDRESS": "", "RAY_TMPDIR": "/nowhere"}, {}),
        ("a submitted Ray job ends with all its processes", {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, {}),
        ("stdin, stdout or stderr is closed", {}, {"preexec_fn": lambda: os.close(0), "stdin": None}),
        ("is open to others", {"XDG_RUNTIME_DIR": "", "TMPDIR": "open"}, {}),
    ],
)
def test_a_run_that_cannot_be_kept_warm_says_why(terminal, why, env, more):
    """One line, and the run is as without `keep_warm`."""
    (terminal.folder / "open" / f"raylaunch-{os.geteuid()}").mkdir(parents=True)
    (terminal.folder / "open" / f"raylaunch-{os.geteuid()}").chmod(0o755)
    out, err = terminal.run("facts", env=env, **more)
    assert re.search(f"raylaunch: keep_warm is left out: .*{why}", err)
    assert json.loads(out)["keep_warm"] == 0.0
    assert terminal.pids() == []


def test_a_folder_must_be_the_users_alone(tmp_path, monkeypatch):
    """Somebody else's, an open one or a link is none; nor is there one in a runtime folder that is not the user's."""
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    tmp_path.chmod(0o755)
    found = warm_folder.folder(environ)
    assert found.name == f"raylaunch-{os.geteuid()}", "an open runtime folder is nobody's"
    assert found.stat().st_mode & 0o777 == 0o700
    tmp_path.chmod(0o700)
    assert warm_folder.folder(environ) == tmp_path / "raylaunch"
    (tmp_path / "raylaunch").rmdir()
    (tmp_path / "raylaunch").symlink_to(found)
    with pytest.raises(NoWarmDriverError, match="is no folder"):
        warm_folder.folder(environ)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert warm_folder._objection(found) == "belongs to somebody else"


def test_strangers_are_not_heard(terminal, monkeypatch):
    """The kernel says who is at the other end."""
    terminal.facts()
    (path,) = warm_folder.sockets(terminal.runtime / "raylaunch")
    assert warm_command.ask(path, "state") is not None
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert warm_command.ask(path, "state") is None


def test_the_key_tells_nothing_of_what_it_is_of():
    """It names a file."""
    assert len(fitness.key({"TOKEN": "hunter22"})) == 24
    assert fitness.key({"TOKEN": "hunter22"}) != fitness.key({})


# `raylaunch status`.


def test_status(terminal, capsys, monkeypatch, golden):
    """What is there and what it does, and the end of it."""
    for name, value in terminal.env().items():
        monkeypatch.setenv(name, value)
    assert main.main(["status"]) == ExitCode.OK
    assert capsys.readouterr().out == "no warm driver on this machine\n"
    pid = terminal.facts(keep_warm=59)["pid"]
    main.main(["status"])
    golden("status", re.sub(r"\d+ s", "N s", capsys.readouterr().out.replace(str(pid), "1234")))
    command = terminal.start("wait", "1", "--token=hunter22")
    command.stdout.readline()
    assert main.main(["status", "--end"]) == ExitCode.OK
    ending = re.sub(r"for \d+ s", "for N s", capsys.readouterr().out)
    assert ending == f"pid {pid}: runs train: train.py wait 1 --token=***, for N s; it ends after that\n"
    command.terminate()
    assert command.wait(20) == 143
    until(lambda: is_gone(pid), "the end of the driver")
