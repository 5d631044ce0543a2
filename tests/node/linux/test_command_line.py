"""Secrets of the command line are overwritten where other users could read them; processes get titles."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys
from pathlib import Path
from raylaunch.core.job.secrets import shown_arguments
from raylaunch.node.linux import command_line
before, own = Path("/proc/self/cmdline").read_bytes(), list(sys.argv)
command_line.overwrite(lambda words: words)
assert Path("/proc/self/cmdline").read_bytes() == before
command_line.overwrite(shown_arguments)
assert sys.argv == own
environ = Path("/proc/self/environ").read_bytes()
assert b"SENTINEL=1" in environ
sys.stdout.buffer.write(Path("/proc/self/cmdline").read_bytes())
"""


def test_arguments_of_any_length():
    """Each keeps its place and its length; arguments that are not UTF-8, and the environment behind them, stay."""
    arguments = [b"caf\xe9", b"--api-key=abcdef", b"--password", b"hunter2", b"", b"--token=a", b"--auth", b"x", b"end"]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        capture_output=True,
        check=True,
        env=os.environ | {"SENTINEL": "1"},
    )
    assert done.stdout.split(b"\0")[3:-1] == [
        *(b"caf\xe9", b"--api-key=***   ", b"--password", b"***    ", b"", b"--token=*", b"--auth", b"*", b"end"),
    ]


TITLES = """
import os, sys
from pathlib import Path
from raylaunch.node.linux import command_line

def shown():
    line, name = Path("/proc/self/cmdline").read_bytes(), Path("/proc/self/comm").read_text()
    print(line.rstrip(b"\\0").decode(), "python" if name == first else name.rstrip(), sep="|", flush=True)

first = Path("/proc/self/comm").read_text()
command_line.prepare_titles()
command_line.set_helper_title("fork server")
shown()
os.environ.update({"A": "1", "PATH": "/elsewhere"})
if os.fork() == 0:
    before = sys.argv[:], sys.orig_argv[:], Path("/proc/self/environ").read_bytes()
    command_line.set_worker_title("raylaunch: train.py rank 3 of 8 (charlm)")
    assert (sys.argv, sys.orig_argv, Path("/proc/self/environ").read_bytes()) == before
    shown()
    command_line.set_worker_title("caf\xe9")
    shown()
    command_line.set_worker_title("x" * 5000)
    line = Path("/proc/self/cmdline").read_bytes()
    assert 50 < len(line) < 5000 and line == b"x" * (len(line) - 1) + b"\\0", line
    os._exit(0)
os.wait()
shown()
"""


def test_titles():
    """A fork has its own; a title that is too long is cut; environment and arguments stay as they are."""
    arguments = ["--password", "hunter2", "argument" * 10]
    done = subprocess.run(
        [sys.executable, "-c", TITLES, *arguments], capture_output=True, check=False, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "raylaunch: fork server|rl:fork server",
        "raylaunch: train.py rank 3 of 8 (charlm)|python",
        "café|python",
        "raylaunch: fork server|rl:fork server",
    ]
