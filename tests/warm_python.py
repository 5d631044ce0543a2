"""Python programs that are forked from a process which has imported what they need: see warm_python_server.py."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

SERVER = Path(__file__).with_name("warm_python_server.py")


class ForkedProcess:
    """One of them, as much of it as tests use of a `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], status: int) -> None:
        self.args = args
        self.returncode: int | None = None
        self._status = os.fdopen(status)
        self.pid = int(self._status.readline())

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or the negative number of a signal."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            with self._status:
                self.returncode = os.waitstatus_to_exitcode(int(self._status.readline()))
        return self.returncode

    def poll(self) -> int | None:
        """Return the same; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class WarmPython:
    """A Python that has imported some modules. It ends when it is closed, or with us."""

    def __init__(self, *modules: str, env: Mapping[str, str], flags: Sequence[str] = ()) -> None:
        """`flags`: of the interpreter."""
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._server = subprocess.Popen(
                [sys.executable, *flags, str(SERVER), str(number), *modules],
                env=env,
                pass_fds=[number],
                start_new_session=True,
            )

    def start(
        self,
        module: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        files: Sequence[IO | int],
        fds: Sequence[int] = (),
    ) -> ForkedProcess:
        """Start `python -m module *argv` in a session of its own. From any thread.

        `files`: stdin, stdout and stderr; `fds`: other files that it has open under the same numbers as we.
        """
        ours, theirs = os.pipe()
        request = {"module": module, "argv": [*argv], "env": dict(env), "cwd": str(cwd), "fds": [*fds]}
        numbers = [file if isinstance(file, int) else file.fileno() for file in files]
        socket.send_fds(self._sock, [json.dumps(request).encode()], [*numbers, *fds, theirs])
        os.close(theirs)
        return ForkedProcess(["-m", module, *argv], ours)

    def close(self) -> None:
        """End the server."""
        self._sock.close()
        self._server.wait()
