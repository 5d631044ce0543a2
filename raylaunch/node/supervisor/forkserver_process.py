"""The fork server and its subreaper as child processes of the agent: how they are started and how they are ended."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

from raylaunch.node.forkserver import subreaper
from raylaunch.node.linux import processes
from raylaunch.node.linux.processes import CLEANUP_WAIT_SECONDS
from raylaunch.node.protocol.node_spec import NodeSpec


class ForkServerProcess:
    """The subreaper, whose child is the fork server. Both exit by themselves when our end of `control` is closed."""

    def __init__(self, spec: NodeSpec, control: socket.socket) -> None:
        """Start them. `control` is the fork server's end. Raises OSError."""
        self._subreaper = subprocess.Popen(  # noqa: S603
            [sys.executable, "-u", subreaper.__file__, str(control.fileno()), *spec.temporary_folders()],
            pass_fds=[control.fileno()],
            stdin=subprocess.DEVNULL,
            env=spec.env,
            cwd=spec.cwd,
            start_new_session=True,
        )
        self.pid = self._subreaper.pid

    def end(self) -> None:
        """Wait until they have killed everything and exited. Continues those that are stopped, then kills them."""
        for escalate in (self.resume, self._kill_fork_server, self._kill):
            escalate()
            try:
                self._subreaper.wait(timeout=CLEANUP_WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            return

    def resume(self) -> None:
        """Continue them if they are stopped (SIGCONT)."""
        for group in (self.pid, *processes.children(self.pid)):
            processes.signal_group(group, signal.SIGCONT)

    def _kill_fork_server(self) -> None:
        """Kill the fork server; the subreaper then kills what it leaves."""
        for pid in processes.children(self.pid):
            processes.kill_with_group(pid)
        self.resume()

    def _kill(self) -> None:
        processes.kill_with_group(self.pid)
