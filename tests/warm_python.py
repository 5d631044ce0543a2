"""Python programs that are forked from a process which has imported what they need: see warm_python_server.py."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

SERVER = Path(__file__).with_name("warm_python_server.py")
EXEC = Path(__file__).with_name("warm_exec.py")
NAMESPACES = ("uts", "ipc", "net", "pid", "time", "mnt")


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
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, signal.SIGKILL)


class WarmPython:
    """A Python that has imported some modules. It ends when it is closed, or with us."""

    def __init__(
        self, *modules: str, env: Mapping[str, str], flags: Sequence[str] = (), at: Path | None = None
    ) -> None:
        """`flags`: of the interpreter; `at`: where there is to be a socket for requests of other processes."""
        self._at = at
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as stack:
            socks = [stack.enter_context(theirs)]
            if at is not None:
                socks.append(stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)))
                socks[1].bind(str(at))
            numbers = [each.fileno() for each in socks]
            self._server = subprocess.Popen(
                [sys.executable, *flags, str(SERVER), ",".join(map(str, numbers)), *modules],
                env=env,
                pass_fds=numbers,
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
        beside: int | None = None,
    ) -> ForkedProcess:
        """Start `python -m module *argv` in a session of its own. From any thread.

        `module`: a module or a file; `files`: stdin, stdout and stderr; `fds`: other files that it has open under the
        same numbers as we; `beside`: it is to be in the namespaces of that process.
        """
        ours, theirs = os.pipe()
        names = NAMESPACES if beside is not None else ()
        request = {"module": module, "argv": [*argv], "env": dict(env), "cwd": str(cwd), "fds": [*fds]}
        numbers = [file if isinstance(file, int) else file.fileno() for file in files]
        with contextlib.ExitStack() as stack:
            entered = [stack.enter_context(open(f"/proc/{beside}/ns/{name}")).fileno() for name in names]
            message = json.dumps(request | {"namespaces": len(entered), "bound": False}).encode()
            socket.send_fds(self._sock, [message], [*numbers, *fds, *entered, theirs])
        os.close(theirs)
        return ForkedProcess(["-m", module, *argv], ours)

    def executable(self) -> Path:
        """Return a program that does what Python does, except that it forks: see warm_exec.py. There must be a socket."""
        assert self._at is not None
        path = self._at.with_name(f"{self._at.name}.sh")
        path.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-IS", str(EXEC), str(self._at)])} "$@"\n')
        path.chmod(0o755)
        return path

    def close(self) -> None:
        """End the server."""
        self._sock.close()
        self._server.wait()
