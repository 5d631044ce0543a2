"""`--debug` and `--pty`, with the command in a terminal."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.terminal import Terminal

pytestmark = pytest.mark.timeout(300)
# Each line is written at once: a line of raylaunch may come between two writes.
SCRIPT = """
import os, signal, sys
rank = int(os.environ["RANK"])
print(f"rank {rank} pid {os.getpid()} {[os.isatty(fd) for fd in range(3)]}\\n", end="", flush=True)
if rank == int(sys.argv[1]):
    answer = 41
    breakpoint()
    next_line = True
    print(f"answer {answer}\\n", end="", flush=True)
    print("size {} {}\\n".format(*os.get_terminal_size()), end="", flush=True)
"""
COMMAND = (sys.executable, "-m", "raylaunch", "--set", "preload=[]", "--log-dir")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Start the command in a terminal, which is closed at the end."""
    opened: list[Terminal] = []
    (tmp_path / "train.py").write_text(SCRIPT)

    def start(*flags: str, rank: int, env: dict[str, str] | None = None) -> Terminal:
        argv = (*COMMAND, str(tmp_path), *flags, "--nproc-per-node", "2", str(tmp_path / "train.py"), str(rank))
        opened.append(Terminal(argv, 100, 30, env))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def _is_restored(terminal: Terminal) -> bool:
    return bool(terminal.modes[3] & termios.ECHO and terminal.modes[3] & termios.ICANON)


def _pid(terminal: Terminal, rank: int) -> int:
    found = re.search(rf"rank {rank} pid (\d+)", terminal.text)
    assert found is not None, terminal.text
    return int(found[1])


def debug(terminal: Terminal, tmp_path: Path) -> None:
    """Step through the script on rank 1 of 2 until the run ends well."""
    terminal.until(lambda: "(Pdb)" in terminal.text)
    assert not _is_restored(terminal)
    terminal.type("n\r")
    terminal.until(lambda: terminal.text.count("(Pdb)") > 1)
    terminal.type("answer + 1\r")
    terminal.until(lambda: "\n42\n" in terminal.text)
    terminal.resize(77, 33)  # readline may draw its line again, amid what is typed
    terminal.type("!answer = 7\r")
    terminal.until(lambda: terminal.text.count("(Pdb)") > 3)
    terminal.type("c\r")
    assert terminal.end() == 0
    for part in (b"answer 7\r\n", b"size 77 33\r\n", b"rank 1 pid", b"[True, True, True]"):
        assert part in terminal.raw
    assert b"rank 0 pid" not in terminal.raw
    assert _is_restored(terminal)
    logs = [path.read_text() for path in tmp_path.rglob("stdout.log")]
    (log,) = (log for log in logs if "(Pdb)" in log)
    # What was typed and what came of it, in this order. readline may draw its line again when the size changes.
    assert re.search(r"answer \+ 1\n.*42\n.*answer = 7\n.*answer 7\n.*size 77 33\n", log, re.DOTALL), log
    assert any("[False, False, False]" in log for log in logs)


def test_a_rank_is_debugged(start, tmp_path):
    """On this machine. tests/cluster/test_debug.py has it on a cluster."""
    debug(start("--standalone", "--debug", "1", rank=1), tmp_path)


def test_the_debugged_worker_is_interrupted_and_killed(start):
    """Ctrl-C goes to the worker. When it dies, the run ends, and the terminal is as before."""
    terminal = start("--standalone", "--debug", "1", rank=1)
    terminal.until(lambda: "(Pdb)" in terminal.text)
    terminal.type("import time; time.sleep(100)\r")
    terminal.until(lambda: "sleep(100)" in terminal.text)
    terminal.type("\x03")
    terminal.until(lambda: "KeyboardInterrupt" in terminal.text)
    os.kill(_pid(terminal, 1), signal.SIGKILL)
    assert terminal.end() == 1
    assert "was killed by SIGKILL" in terminal.text
    assert _is_restored(terminal)


def test_the_end_of_a_debugged_run(start):
    """Ctrl-\\ stops the run, and the terminal is as before."""
    terminal = start("--standalone", "--debug", "1", rank=1)
    terminal.until(lambda: "(Pdb)" in terminal.text)
    terminal.type("\x1c")
    assert terminal.end() == 128 + signal.SIGQUIT
    assert _is_restored(terminal)


def test_the_driver_of_a_debugged_run_is_killed(tmp_path):
    """Bash restores the terminal."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = shlex.join([*COMMAND, str(tmp_path), "--standalone", "--debug", "0", str(tmp_path / "train.py"), "0"])
    terminal = Terminal(["/bin/bash", "--norc", "--noprofile", "-i"], 200, 30, {"PS1": "$ "})
    try:
        terminal.type(f"{command}\n")
        terminal.until(lambda: "(Pdb)" in terminal.text)
        assert not _is_restored(terminal)
        (driver,) = Path(f"/proc/{terminal.pid}/task/{terminal.pid}/children").read_text().split()
        os.kill(int(driver), signal.SIGKILL)
        terminal.until(lambda: "Killed" in terminal.text)
        terminal.type("cat; exit\n")  # readline has a mode of its own, and `cat` the shell's
        terminal.until(lambda: _is_restored(terminal))
        terminal.type("\x04")
        assert terminal.end() == 0
    finally:
        terminal.close()


def test_rank_0_has_a_terminal_for_its_output(start):
    """What it writes is shown as it is, below all ranks' plain output; its stdin is as always."""
    terminal = start("--standalone", "--pty", rank=5)
    assert terminal.end() == 0
    assert re.search(r"rank 0 pid \d+ \[False, True, True\]", terminal.text)
    assert re.search(r"rank 1 pid \d+ \[False, False, False\]", terminal.text)
    assert _is_restored(terminal)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--debug", "1"), "`--debug 1` needs a terminal, and stdin or stdout is none"),
        (("--pty",), "`--pty` needs a terminal, and stdout is none"),
    ],
)
def test_without_a_terminal(flags, message, tmp_path):
    """As in `ray job submit`."""
    (tmp_path / "train.py").write_text(SCRIPT)
    found = subprocess.run(
        [*COMMAND, str(tmp_path), "--standalone", *flags, str(tmp_path / "train.py"), "1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 2
    assert found.stderr.startswith(f"error: {message}\n")


def test_a_rank_that_does_not_exist(start):
    """It is refused, and not waited for."""
    terminal = start("--standalone", "--debug", "2", rank=1)
    assert terminal.end() == 2
    assert "there is no rank 2: the job has 2 workers" in terminal.text
