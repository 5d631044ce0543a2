"""A fork of the fork server that does nothing, until it takes the place of one that died: it has imported all it needs.

Its line to the supervisor is its own from the beginning. When the fork server is dead, its orphans come to the keeper,
who ends them all but the reserve, and then passes the baton to it: a byte through a pipe, whose end says that the
keeper is gone. The reserve is known by its process group, since nobody else leads one in the keeper's session.
"""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from raylaunch.node import messages, processes, spool, wire
from raylaunch.node.lesson import Lesson
from raylaunch.worker import boot

_MOST_LOSSES = 10
"""For one fork server. What ends them one after the other ends the next one too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """What the first fork server is given, and leaves to its reserve."""

    keeper: int
    baton: int
    began: float
    """The time.time() before anything was imported."""
    folders: Sequence[str]
    """They go with the agent. Of the keeper and the fork server, either may be killed together with it."""

    def take(self) -> None:
        """Serve from now on: the keeper's death is ours, and orphans of ours come to us."""
        processes.on_death_of_parent(signal.SIGTERM, self.keeper)
        processes.become_reaper()

    def leave(self) -> None:
        """All of ours has ended."""
        for folder in self.folders:
            spool.remove(folder)
        if os.getppid() == self.keeper:
            os.kill(self.keeper, signal.SIGCONT)  # one that was stopped goes on, and ends


class Reserve:
    """The fork server's own: none, or one."""

    def __init__(self, *, wanted: bool, say: Callable[[messages.Word, int], None]) -> None:
        self.pid = 0
        #: What it has imported beyond what the fork server has.
        self.lesson: Lesson | None = None
        self._say = say
        self._losses_left = _MOST_LOSSES if wanted else 0

    @property
    def is_wanted(self) -> bool:
        """Whether there is to be one."""
        return self._losses_left > 0

    def fork(self) -> socket.socket | None:
        """Fork one. In the child: its end of its line."""
        try:
            ours, supervisors = wire.pair()
            pid = os.fork()
        except OSError:
            self._losses_left -= 1
            return None
        if pid == 0:
            supervisors.close()
            return ours
        ours.close()
        self.adopt(pid, supervisors.detach())
        return None

    def adopt(self, pid: int, line: int, lesson: Lesson | None = None) -> None:
        """A child of ours is the reserve from now on. The supervisor is told, and given its end of the line."""
        before, self.pid, self.lesson = self.pid, pid, lesson
        try:
            os.setpgid(pid, pid)
            self._say(messages.Reserve(), line)
        except OSError:
            pass  # it is gone, or the supervisor is, which we shall see
        finally:
            os.close(line)
        if before:
            processes.kill_tree(before)

    def ended(self, pids: Collection[int]) -> None:
        """These processes are no more."""
        if self.pid in pids:
            self.pid, self.lesson = 0, None
            self._losses_left -= 1

    def dismiss(self) -> None:
        """End it, if there is one."""
        if self.pid:
            processes.kill_tree(self.pid)
        self.pid, self.lesson = 0, None


def stand_by(post: Post, line: socket.socket) -> bool:
    """In the reserve: wait for its turn. False: the supervisor or the keeper is gone."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    boot.keep_only(line.fileno(), post.baton)
    poll = select.poll()
    poll.register(line, 0)  # its end alone: the supervisor may write before our turn has come
    poll.register(post.baton, select.POLLIN)
    happened = dict(poll.poll())
    return line.fileno() not in happened and os.read(post.baton, 1) != b""
