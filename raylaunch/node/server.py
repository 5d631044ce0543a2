"""The fork server and its keeper as their parent sees them: how they are started, and how their end is made sure."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

from raylaunch.node import keeper, processes
from raylaunch.node.patience import WAIT_SECONDS
from raylaunch.node.settings import NodeSettings


class Server:
    """The keeper, whose child is the fork server. They end by themselves when `control` is closed at our end."""

    def __init__(self, settings: NodeSettings, control: socket.socket) -> None:
        self._keeper = subprocess.Popen(  # noqa: S603
            [sys.executable, "-u", keeper.__file__, str(control.fileno()), *settings.temporary()],
            pass_fds=[control.fileno()],
            stdin=subprocess.DEVNULL,
            env=settings.env,
            cwd=settings.cwd,
            start_new_session=True,
        )
        self.pid = self._keeper.pid

    def end(self) -> None:
        """Wait until they have ended everything; make them go on where they are stopped, by force in the end."""
        for press in (self.resume, self._kill_fork_server, self._kill):
            press()
            try:
                self._keeper.wait(timeout=WAIT_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            return

    def resume(self) -> None:
        """Have them go on where they are stopped."""
        for group in (self.pid, *processes.children(self.pid)):
            processes.signal_group(group, signal.SIGCONT)

    def _kill_fork_server(self) -> None:
        """The keeper then ends what it leaves."""
        for pid in processes.children(self.pid):
            processes.kill_tree(pid)
        self.resume()

    def _kill(self) -> None:
        processes.kill_tree(self.pid)
