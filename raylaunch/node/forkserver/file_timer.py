"""torchelastic's file timer: the server for `torch.distributed.elastic.timer.expires` in scripts.

Like torchrun, the fork server starts one where TORCHELASTIC_ENABLE_FILE_TIMER is 1. It kills workers that exceed a time
limit which they set themselves; their death is a failure like any other.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    sys.path[: not getattr(sys.flags, "safe_path", False)] = [__file__.rsplit("/", 4)[0]]

import contextlib
import os
import signal
import tempfile
import uuid
from collections.abc import Collection, Mapping

from raylaunch.node.linux import command_line, processes
from raylaunch.node.linux.processes import Run, fork

ENABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE = "TORCHELASTIC_TIMER_FILE"
_INTERVAL = 0.1
"""Seconds between two checks of the timers, as in torchrun."""


def variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that tells workers where the server listens; empty where the job wants none or sets it."""
    if env.get(ENABLE) != "1" or FILE in env:
        return {}
    return {FILE: os.path.join(tempfile.gettempdir(), f"watchdog_timer_{uuid.uuid4()}")}


def file_of(env: Mapping[str, str]) -> str:
    """Return the path of the server's named pipe, `""` where no server is wanted."""
    return env.get(FILE, "") if env.get(ENABLE) == "1" else ""


class FileTimer:
    """The fork server's child that runs the file timer server, where `path` names a pipe for it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.pid = 0

    def start(self, run: Run) -> None:
        """Fork the child, where one is wanted and there is none. Raises OSError."""
        if self.path and not self.pid:
            self.pid = fork(run)

    def reaped(self, pids: Collection[int]) -> None:
        """Handle the end of these processes."""
        if self.pid in pids:
            self.pid = 0

    def kill(self) -> None:
        """Kill it, and remove its pipe."""
        if self.pid:
            processes.kill_with_group(self.pid)
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def run(parent: int, path: str, *, forked: bool) -> None:
    """In the timer's process: serve, in a fresh interpreter unless it was forked from one that could be used."""
    if not forked:
        os.execv(sys.executable, [sys.executable, __file__, str(parent), path])
    serve(path)


def serve(path: str) -> None:
    """Serve until killed. torch's server exits when it has killed a worker, so it runs in a child that is replaced."""
    command_line.set_helper_title("file timer")
    me = os.getpid()
    while True:
        child = os.fork()
        if child == 0:
            processes.signal_on_parent_death(signal.SIGKILL, me)
            _serve_once(path)
        os.waitpid(child, 0)


def _serve_once(path: str) -> None:
    from torch.distributed.elastic.timer import FileTimerServer  # noqa: PLC0415

    FileTimerServer(path, run_id="", max_interval=_INTERVAL, daemon=True).start()
    while True:
        signal.pause()


def main() -> None:
    """The program of a server that could not be forked: `file_timer.py PARENT PATH`."""
    parent, path = sys.argv[1:]
    processes.signal_on_parent_death(signal.SIGKILL, int(parent))
    serve(path)


if __name__ == "__main__":
    main()
