"""The hot standby: a fork of the fork server that waits, with all its imports, to take its place when it dies.

Each standby has its own socket to the supervisor. When the fork server is dead, its orphans become the subreaper's
children. The subreaper kills all of them but the standby and then promotes it: it writes its process id into a pipe,
whose end of file means that the subreaper is gone. It knows the standby by its process group, since no other process in
the subreaper's session leads one.

When the subreaper is dead, the fork server does the same as its successor: it kills all its children but the standby,
and promotes that. It has a pipe of its own for this, which a standby reads too.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from raylaunch.node.forkserver.promotion import remove_folders
from raylaunch.node.linux import command_line, processes
from raylaunch.node.linux.processes import fork
from raylaunch.node.protocol import wire
from raylaunch.node.protocol.forkserver_messages import ForkServerEvent, StandbyReady
from raylaunch.node.protocol.import_manifest import ImportManifest
from raylaunch.worker.runtime import process_setup

_MOST_LOSSES = 10
"""Standbys in a row that one fork server may lose. What kills one after the other would kill the next one too."""
_STABLE_SECONDS = 60.0
"""The loss of a standby that lived longer is the first of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyLink:
    """What the first fork server is given, and passes on to each standby."""

    subreaper: int
    """Its process id."""
    promotions: tuple[int, ...]
    """The pipes from which a standby reads, when it is promoted, the process id of its subreaper."""
    lifeline: int
    """The socket whose other end the agent holds as long as it lives and wants the node to go on."""
    started_at: float
    """The time.time() before anything was imported."""
    folders: Sequence[str]
    """Folders that are removed at the end, by whoever of fork server and subreaper is alive then."""

    def become_active(self) -> None:
        """Begin to serve: get SIGTERM when the subreaper dies, and become the parent of orphans."""
        command_line.set_helper_title("fork server")
        processes.signal_on_parent_death(signal.SIGTERM, self.subreaper)
        processes.become_subreaper()

    def finish(self) -> None:
        """Clean up after everything of this fork server has ended."""
        remove_folders(self.folders, self.lifeline)
        with contextlib.suppress(ProcessLookupError):
            if os.getppid() == self.subreaper:
                os.kill(self.subreaper, signal.SIGCONT)  # if it was stopped, it goes on and ends


class HotStandby:
    """The fork server's view of its standby: none, or one."""

    def __init__(self, *, wanted: bool, send: Callable[[ForkServerEvent, int], None]) -> None:
        self.pid = 0
        #: What it has imported beyond what the fork server has.
        self.imported: ImportManifest | None = None
        self._send = send
        self._losses_left = _MOST_LOSSES if wanted else 0
        #: When the standby was forked, by time.monotonic().
        self._began = 0.0

    @property
    def is_wanted(self) -> bool:
        """Whether there is to be a standby: it is not forked again after too many have died in a row."""
        return self._losses_left > 0

    def fork(self, run: Callable[[socket.socket], int]) -> None:
        """Fork a standby, which calls `run` with its end of a socket to the supervisor. Raises OSError."""
        ours, supervisors = wire.pair()
        try:
            pid = fork(partial(_run, run, ours, supervisors))
        except OSError:
            ours.close()
            supervisors.close()
            raise
        ours.close()
        self.adopt(pid, supervisors.detach())

    def adopt(self, pid: int, line: int, imported: ImportManifest | None = None) -> None:
        """Make this child the standby, in the place of the one before.

        `line` is the supervisor's end of its socket, which is sent to the supervisor and closed here.
        """
        before, self.pid, self.imported = self.pid, pid, imported
        self._began = time.monotonic()
        try:
            os.setpgid(pid, pid)
            self._send(StandbyReady(), line)
        except OSError:
            pass  # the child is gone and will be reaped, or the supervisor is gone and `serve` finds out
        finally:
            os.close(line)
        if before:
            processes.kill_with_group(before)

    def reaped(self, pids: Collection[int]) -> None:
        """Take note that these processes have ended."""
        if self.pid in pids:
            self.pid, self.imported = 0, None
            if time.monotonic() - self._began >= _STABLE_SECONDS:
                self._losses_left = _MOST_LOSSES
            self._losses_left -= 1

    def kill(self) -> None:
        """Kill the standby, if there is one."""
        if self.pid:
            processes.kill_with_group(self.pid)
        self.pid, self.imported = 0, None


def _run(run: Callable[[socket.socket], int], ours: socket.socket, supervisors: socket.socket) -> int:
    supervisors.close()
    return run(ours)


def wait_for_promotion(link: StandbyLink, line: socket.socket) -> StandbyLink | None:
    """In the standby: wait until it is promoted. None: the supervisor is gone, or all that could promote it are."""
    command_line.set_helper_title("hot standby")
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    process_setup.close_other_fds(line.fileno(), *link.promotions, link.lifeline)
    poll = select.poll()
    poll.register(line, 0)  # its end alone: the supervisor may write before the promotion has come
    left = set(link.promotions)
    for promotion in left:
        poll.register(promotion, select.POLLIN)
    while left:
        happened = dict(poll.poll())
        if line.fileno() in happened:
            return None
        for promotion in left & happened.keys():
            if promoter := os.read(promotion, 32):
                return replace(link, subreaper=int(promoter), promotions=(promotion,))
            poll.unregister(promotion)
            left.remove(promotion)
    return None
