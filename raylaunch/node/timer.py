"""torchelastic's file timer: `torch.distributed.elastic.timer.expires` in a script, with a server on its node.

torchrun starts one where TORCHELASTIC_ENABLE_FILE_TIMER is 1, and so do we. It kills workers that overstay a time they
set themselves; their death is then a failure like any other.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[: not sys.flags.safe_path] = [__file__.rsplit("/", 3)[0]]

import os
import signal
import tempfile
import uuid
from collections.abc import Mapping

from raylaunch.worker import boot

ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE = "TORCHELASTIC_TIMER_FILE"
_INTERVAL = 0.1
"""Seconds between looks, as torchrun has it."""


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """What workers are told: where the server listens, if there is to be one."""
    if env.get(ENABLE) != "1" or FILE in env:
        return {}
    return {FILE: os.path.join(tempfile.gettempdir(), f"watchdog_timer_{uuid.uuid4()}")}


def file_of(env: Mapping[str, str]) -> str:
    """The pipe of the server; `""`: no server is wanted."""
    return env.get(FILE, "") if env.get(ENABLE) == "1" else ""


def serve(path: str) -> None:
    """Serve until killed. torch's server ends its own process too when it has killed a worker, so each has its own."""
    me = os.getpid()
    while True:
        child = os.fork()
        if child == 0:
            boot.die_with_parent(me)
            _serve_once(path)
        os.waitpid(child, 0)


def _serve_once(path: str) -> None:
    from torch.distributed.elastic.timer import FileTimerServer  # noqa: PLC0415

    FileTimerServer(path, run_id="", max_interval=_INTERVAL, daemon=True).start()
    while True:
        signal.pause()


def main() -> None:
    """The program of a server that could not be forked: `timer.py PARENT PATH`."""
    parent, path = sys.argv[1:]
    boot.die_with_parent(int(parent))
    serve(path)


if __name__ == "__main__":
    main()
