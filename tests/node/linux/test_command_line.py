"""Secrets of the command line are overwritten where other users of the machine could read them."""

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
