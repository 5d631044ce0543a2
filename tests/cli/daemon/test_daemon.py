"""The daemon of `keep_warm`, with fake runs: for the user, each run looks as if the command ran it. Without Ray."""

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
from raylaunch.cli import main
from raylaunch.cli.daemon import client, daemon, fingerprint, socket_dir, status
from raylaunch.cli.daemon.daemon_messages import DaemonState
from raylaunch.cli.daemon.socket_dir import NoDaemonError
from raylaunch.errors import ExitCode
from tests.warm_python import WarmPython

pytestmark = pytest.mark.timeout(300)

FAKE = Path(__file__).with_name("fake_daemon.py")
STOPS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


@dataclass
class Terminal:
    """Starts commands of one user in one folder, and knows the daemons that they start."""

    folder: Path
    runtime: Path
    warm: WarmPython

    def start(
        self,
        *run: str,
        keep_warm: float = 60,
        ignored: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        fresh: bool = False,
        **more: Any,
    ):
        """Start a command. `run`: a method of `Runs` in fake_daemon.py, and its arguments.

        It is forked from a process that has imported its modules, unless it is to be `fresh`; daemons always are.
        """

        def dispose() -> None:
            for name in STOPS:
                signal.signal(signal.Signals[name], signal.SIG_IGN if name in ignored else signal.SIG_DFL)

        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
        flags = ["--keep-warm", str(keep_warm), "--set=signals_to_forward=[SIGUSR1]"]
        return subprocess.Popen(
            [sys.executable if fresh else self.warm.executable(), FAKE, "command", *flags, "train.py", *run],
            **{"cwd": self.folder, "text": True, "preexec_fn": dispose} | options,
            env=self.env(**(env or {})),
        )

    def env(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "XDG_", "PYTEST_"))}
        return kept | {"XDG_RUNTIME_DIR": str(self.runtime), "RAY_ADDRESS": "10.0.0.1:6379"} | more

    def run(self, *run: str, code: int = 0, **more: Any) -> tuple[str, str]:
        """Run a command and return its stdout and stderr."""
        command = self.start(*run, **more)
        out, err = command.communicate(timeout=200)
        assert command.returncode == code, err
        return out, err

    def facts(self, *arguments: str, **more: Any) -> dict[str, Any]:
        return json.loads(self.run("facts", *arguments, **more)[0])

    def pids(self) -> list[int]:
        return [socket_dir.pid_of(path) for path in socket_dir.sockets(self.runtime / "raylaunch")]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    modules = (
        "raylaunch.cli.config.load",
        "raylaunch.cli.daemon.daemon",
        "raylaunch.cluster.run",
        "raylaunch.cli.main",
        "raylaunch.cli.html_report.page",
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    found = WarmPython(*modules, env=env, at=tmp_path_factory.mktemp("warm") / "cli.sock")
    yield found
    found.close()


@pytest.fixture
def terminal(tmp_path: Path, warm: WarmPython) -> Iterator[Terminal]:
    (tmp_path / "train.py").touch()
    runtime = Path(tempfile.mkdtemp(prefix="rl-", dir="/tmp"))  # paths of sockets are short
    found = Terminal(tmp_path, runtime, warm)
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
    """Make stdin the controlling terminal of the session."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# One process serves all commands.


def test_the_next_command_is_served_by_the_same_process(terminal, tmp_path):
    """Each command has its own folder, umask, environment, stdin and exit code, and the daemon keeps none of them."""
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
    """The output goes to the command's stdout and stderr, with colours on a terminal and without on a pipe."""
    ours, its = pty.openpty()
    out, _ = terminal.run("facts", stderr=its)
    os.close(its)
    said = os.read(ours, 10_000)
    os.close(ours)
    assert b"\x1b[33ma warning" in said
    again, plain = terminal.run("facts")
    assert "raylaunch: a warning" in plain
    assert json.loads(out)["pid"] == json.loads(again)["pid"]


def test_the_command_itself_is_small(terminal, tmp_path):
    """The command itself loads neither Ray nor torch."""
    modules = tmp_path / "modules"
    terminal.run("facts", env={"MODULES": str(modules)}, fresh=True)
    loaded = set(modules.read_text().split())
    assert "raylaunch.cli.daemon.client" in loaded
    assert loaded.isdisjoint({"ray", "torch", "raylaunch.cluster.session.ray_session"})


def test_without_keep_warm_nothing_changes(monkeypatch, tmp_path):
    """Without `keep_warm`, and for `check`, no daemon is used."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("raylaunch.cli.daemon.client.run", Mock(side_effect=AssertionError))
    ran = Mock(return_value=0)
    monkeypatch.setattr("raylaunch.cli.run_once.run", ran)
    assert main.main(["train.py"]) == ExitCode.OK
    assert main.main(["check", "--keep-warm", "60"]) == ExitCode.OK
    assert [call.args[0].keep_warm for call in ran.call_args_list] == [0.0, 0.0]


# Signals and deaths.


def test_signals_are_forwarded_to_the_run(terminal):
    """All signals reach the run, including a second Ctrl-C, and the exit code is that of a run without a daemon."""
    command = terminal.start("wait", "5")
    up = command.stdout.readline()
    for name in ("SIGUSR1", *STOPS):
        command.send_signal(signal.Signals[name])
        assert command.stdout.readline() == f"{name}\n"
    command.send_signal(signal.SIGINT)
    assert command.communicate(timeout=200)[0] == "SIGINT\n"
    assert command.returncode == 130
    assert f"up {terminal.facts()['pid']}\n" == up, "the daemon has outlived it"


def test_ignored_signals_stay_ignored(terminal):
    """A signal that the command ignores, as under `nohup`, is ignored whichever command started the daemon."""
    terminal.facts()
    command = terminal.start("wait", ignored=("SIGHUP",))
    command.stdout.readline()
    command.send_signal(signal.SIGHUP)
    command.send_signal(signal.SIGTERM)
    assert command.communicate(timeout=200)[0] == "SIGTERM\n"
    assert command.returncode == 143


def test_a_command_that_is_gone_ends_its_run(terminal):
    """The run stops as if the command had got SIGTERM, and the daemon serves the next run."""
    command = terminal.start("wait", fresh=True)
    pid = int(command.stdout.readline().split()[1])
    command.kill()
    command.communicate()
    until((terminal.folder / "heard").exists, "the run to get the signal")
    assert (terminal.folder / "heard").read_text() == "SIGTERM\n"
    until(lambda: "idle" in status.text(terminal.env(), end=False), "its end")
    assert terminal.facts()["pid"] == pid


def test_a_terminal_that_is_gone_ends_the_run(terminal):
    """The command gets SIGHUP; output that has no reader harms neither the run nor the daemon."""
    ours, its = pty.openpty()
    owns = {"stdin": its, "stdout": its, "stderr": its, "start_new_session": True, "preexec_fn": has_a_terminal}
    command = terminal.start("wait", fresh=True, **owns)
    os.close(its)
    pid = int(os.read(ours, 1000).decode().split()[1])
    until(lambda: len(os.listdir(f"/proc/{command.pid}/task")) > 1, "the thread that forwards signals")
    os.close(ours)
    assert command.wait(200) == 129
    assert (terminal.folder / "heard").read_text() == "SIGHUP\n"
    assert terminal.facts()["pid"] == pid


def test_a_daemon_that_dies_is_reported(terminal):
    """The command prints an error, exits with 4, and the next run starts a new daemon."""
    command = terminal.start("wait")
    pid = int(command.stdout.readline().split()[1])
    os.kill(pid, signal.SIGKILL)
    _, err = command.communicate(timeout=200)
    assert command.returncode == ExitCode.INTERNAL
    assert "error: the daemon that ran this job died" in err
    assert terminal.facts()["pid"] != pid


def test_a_folder_with_a_long_path(tmp_path):
    """A socket's name has at most 107 bytes, and TMPDIR may be longer."""
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    server, path = socket_dir.listen(folder, "a")
    connection = socket_dir.connect(path, 5.0)
    assert connection is not None
    connection.close()
    server.close()


def test_sockets_of_dead_daemons_are_removed(tmp_path):
    """Only the sockets of dead daemons are removed."""
    gone, _ = socket_dir.listen(tmp_path, "a")
    stays, path = socket_dir.listen(tmp_path, "b")
    gone.close()
    socket_dir.sweep(tmp_path)
    assert socket_dir.sockets(tmp_path) == [path]
    stays.close()


def test_a_daemon_whose_cluster_is_gone_is_replaced(terminal):
    """The daemon notices before the run starts, and a new daemon runs the job."""
    pid = terminal.facts()["pid"]
    (terminal.folder / "another-cluster").touch()
    out, err = terminal.run("facts")
    assert json.loads(out)["pid"] != pid
    assert err.count("\n") == 2, "a line of the run, and one about its end"


@pytest.mark.parametrize(("what", "code"), [("mistake", 4), ("linger", 0)])
def test_a_process_that_may_be_damaged_is_not_used_again(terminal, what, code):
    """After an internal error, or with a thread left that could write to the next terminal, the daemon exits."""
    first = terminal.facts()["pid"]
    _, err = terminal.run(what, code=code)
    assert ("this is a bug in raylaunch" in err) == (what == "mistake")
    assert terminal.facts()["pid"] != first


def test_errors_are_reported_as_without_a_daemon(terminal):
    """The error is the same as without a daemon, and the daemon stays."""
    pid = terminal.facts()["pid"]
    assert terminal.run("refuse", code=3)[1] == "error: no cluster\n\nhint: start one\n"
    assert terminal.facts()["pid"] == pid


# Which commands a daemon serves.


def test_another_environment_is_not_served(terminal):
    """Any variable may matter to Ray or the workers, except those that describe the terminal."""
    pid = terminal.facts(env={"LR": "1", "TMUX_PANE": "%1"})["pid"]
    again = terminal.facts(env={"LR": "1", "TMUX_PANE": "%2"})
    assert (again["pid"], again["environ"]["TMUX_PANE"]) == (pid, "%2")
    assert terminal.facts(env={"LR": "2"})["pid"] != pid


def test_edited_code_is_not_run_by_an_old_daemon(terminal, tmp_path):
    """A change in one file of raylaunch makes the next command start a new daemon."""
    shutil.copytree(Path(raylaunch.__file__).parent, tmp_path / "raylaunch")
    env = {"PYTHONPATH": str(tmp_path)}
    pid = terminal.facts(env=env, fresh=True)["pid"]
    assert terminal.facts(env=env, fresh=True)["pid"] == pid
    file = tmp_path / "raylaunch" / "core" / "text.py"
    os.utime(file, ns=(1, file.stat().st_mtime_ns - 1))
    assert terminal.facts(env=env, fresh=True)["pid"] != pid


EDIT_EVERY_FILE = """
import os
from pathlib import Path
from raylaunch.cli.daemon import fingerprint

root = Path(fingerprint.__file__).parents[2]
key = fingerprint.key({})
for file in sorted(root.rglob("*.py")):
    os.utime(file, ns=(1, 1))
    before, key = key, fingerprint.key({})
    if key == before:
        print(file.relative_to(root))
"""


def test_the_fingerprint_covers_every_module(tmp_path):
    """Editing any file of raylaunch, in whichever package it is, gives another fingerprint."""
    shutil.copytree(Path(raylaunch.__file__).parent, tmp_path / "raylaunch")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", EDIT_EVERY_FILE]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout == ""


def test_the_command_that_starts_the_daemon_names_its_module():
    """The client starts it by a string, which no import checks."""
    assert daemon.__name__ in client.PROGRAM[-1]


def test_a_busy_daemon_is_not_waited_for(terminal):
    """While one daemon is busy, another runs the next job."""
    busy = terminal.start("wait")
    pid = int(busy.stdout.readline().split()[1])
    assert terminal.facts()["pid"] != pid
    busy.terminate()
    busy.communicate(timeout=200)


def test_a_daemon_serves_one_connection_from_its_answer_on(terminal, monkeypatch):
    """After the answer `FREE`, no other command gets the daemon until the connection is closed."""
    pid = terminal.facts()["pid"]
    folder = terminal.runtime / "raylaunch"
    (path,) = socket_dir.sockets(folder)
    started = []
    monkeypatch.setattr(client, "start_daemon", lambda *_: started.append("another"))
    lines = client.connections(folder, path.name.partition("-")[0])
    assert next(lines).gettimeout() is None
    assert next(client.connections(folder, path.name.partition("-")[0])) is None
    assert started == ["another"]
    lines.close()
    assert terminal.facts()["pid"] == pid


def test_the_number_of_daemons_is_limited(monkeypatch, tmp_path):
    """The daemon that is idle for longest ends; if all are busy, none is started."""
    paths = [tmp_path / f"k-{pid}.sock" for pid in range(client.MAX_DAEMONS)]
    states = {path: DaemonState(pid=n, title="", seconds=10.0 - n, left=1.0) for n, path in enumerate(paths)}
    ended = []
    monkeypatch.setattr(socket_dir, "sockets", lambda _: paths)
    monkeypatch.setattr(
        client, "request_state", lambda path, word: ended.append(path) if word == "end" else states[path]
    )
    client.make_room(tmp_path)
    assert ended == [paths[0]]
    states = {path: DaemonState(pid=n, title="train", seconds=1.0, left=1.0) for n, path in enumerate(paths)}
    with pytest.raises(NoDaemonError, match="running jobs already"):
        client.make_room(tmp_path)


def test_an_idle_daemon_ends(terminal):
    """It exits `keep_warm` seconds after its last run, and removes its socket."""
    pid = terminal.facts(keep_warm=0.2)["pid"]
    until(lambda: is_gone(pid), "the end of the daemon")
    assert terminal.pids() == []


# Runs without a daemon.


@pytest.mark.parametrize(
    ("why", "env", "more"),
    [
        ("it works on a Ray cluster only, and this run uses none", {"RAY_ADDRESS": "", "PET_STANDALONE": "1"}, {}),
        ("Ray ends all processes of a submitted job", {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, {}),
        ("stdin, stdout or stderr is closed", {}, {"preexec_fn": lambda: os.close(0), "stdin": None}),
        ("is accessible to other users", {"XDG_RUNTIME_DIR": "", "TMPDIR": "open"}, {}),
    ],
)
def test_a_run_that_cannot_be_kept_warm_says_why(terminal, why, env, more):
    """One line says why, and the run is as without `keep_warm`."""
    (terminal.folder / "open" / f"raylaunch-{os.geteuid()}").mkdir(parents=True)
    (terminal.folder / "open" / f"raylaunch-{os.geteuid()}").chmod(0o755)
    out, err = terminal.run("facts", env=env, fresh=True, **more)
    assert re.search(f"raylaunch: keep_warm has no effect: .*{why}", err)
    assert json.loads(out)["keep_warm"] == 0.0
    assert terminal.pids() == []


def test_the_folder_must_be_private(tmp_path, monkeypatch):
    """A folder of another user, one that others may use, or a link is refused."""
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    tmp_path.chmod(0o755)
    found = socket_dir.folder(environ)
    assert found.name == f"raylaunch-{os.geteuid()}", "a runtime folder that others may use is ignored"
    assert found.stat().st_mode & 0o777 == 0o700
    tmp_path.chmod(0o700)
    assert socket_dir.folder(environ) == tmp_path / "raylaunch"
    (tmp_path / "raylaunch").rmdir()
    (tmp_path / "raylaunch").symlink_to(found)
    with pytest.raises(NoDaemonError, match="is not a folder"):
        socket_dir.folder(environ)
    (tmp_path / "raylaunch-12345").mkdir(mode=0o700)
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(NoDaemonError, match="belongs to another user"):
        socket_dir.folder({"TMPDIR": str(tmp_path)})


def test_other_users_are_refused(terminal, monkeypatch):
    """The kernel says which user is at the other end."""
    terminal.facts()
    (path,) = socket_dir.sockets(terminal.runtime / "raylaunch")
    assert client.request_state(path, "state") is not None
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert client.request_state(path, "state") is None


def test_the_fingerprint_reveals_no_variable():
    """The fingerprint is part of a file name, so it is a hash."""
    assert len(fingerprint.key({"TOKEN": "hunter22"})) == 24
    assert fingerprint.key({"TOKEN": "hunter22"}) != fingerprint.key({})


# `raylaunch ps`.


def test_ps(terminal, capsys, monkeypatch, golden, tmp_path):
    """`ps` lists what each daemon does, and `--end` ends it."""
    for name, value in (terminal.env() | {"XDG_STATE_HOME": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    nothing = "no run is going on; `raylaunch ps -a` lists those that ended\n"
    assert main.main(["ps"]) == ExitCode.OK
    assert capsys.readouterr().out == nothing
    pid = terminal.facts(keep_warm=59)["pid"]
    main.main(["ps"])
    said = capsys.readouterr().out.removeprefix(f"{nothing}\n")
    golden("ps_daemons", re.sub(r"\d+ s", "N s", said.replace(str(pid), "1234")))
    main.main(["ps", "--json"])
    (state,) = json.loads(capsys.readouterr().out)["daemons"]
    assert (state["pid"], state["title"]) == (pid, "")
    command = terminal.start("wait", "1", "--token=hunter22")
    command.stdout.readline()
    assert main.main(["ps", "--end"]) == ExitCode.OK
    ending = re.sub(r"for \d+ s", "for N s", capsys.readouterr().out)
    assert ending == f"pid {pid}: running train: train.py wait 1 --token=*** for N s; it ends after this run\n"
    command.terminate()
    assert command.wait(200) == 143
    until(lambda: is_gone(pid), "the end of the daemon")
