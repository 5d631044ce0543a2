"""How a subreaper promotes hot standbys, one after the other, and notices the end of its agent.

The `subreaper` does this, and after its death a fork server that takes its place (`lifecycle`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import time
from collections.abc import Iterable

from raylaunch.node.linux import processes
from raylaunch.node.linux.processes import CLEANUP_SECONDS, CLEANUP_WAIT_SECONDS

_POLL_SECONDS = 1.0
_REMOVE_SECONDS = 2.0


def agent_is_gone(lifeline: int) -> bool:
    """Return whether the agent is dead, or wants everything of the node to end: its end of the socket is closed."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)  # nothing is ever sent
    return bool(poll.poll(0))


def remove_folders(folders: Iterable[str], lifeline: int) -> None:
    """Remove folders of the node at its end, but not those that the agent or the state keeper has a lock on.

    Waits until the agent is gone, for a short time: what kills the subreaper often kills the agent next. If it lives,
    it notices the end of the fork server, and closes the socket, but goes on with what it has a lock on. The lock of a
    dead agent does not count, since its end may take a while.
    """
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    happened = poll.poll(1000 * _REMOVE_SECONDS)
    if not happened:
        return
    from raylaunch.node.linux import scratch  # noqa: PLC0415  # the subreaper stays small

    is_dead = bool(happened[0][1] & select.POLLHUP)  # else only its end is shut down
    for folder in folders:
        scratch.remove_unless_locked(folder, *([] if is_dead else [os.path.join(folder, scratch.AGENT_LOCK)]))


def run_standbys(server: int, promote: int, lifeline: int) -> bool:
    """Be the subreaper of a fork server and, when it has ended, of its standby, and so on until there is none.

    Between them, kill what the last one has left. `server`: its process id, 0 for one that has ended. Into the pipe
    `promote` goes the id of this process, for a standby that is to serve. Returns whether the agent is gone.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    # The kernel continues this process, if it is stopped, when the agent closes the socket or dies: see fcntl(2).
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, processes.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    while True:
        if server:
            _wait_for(server, lifeline)
        server = 0 if agent_is_gone(lifeline) else _standby()
        if not processes.kill_children(CLEANUP_SECONDS, spared=server) or not server:
            return agent_is_gone(lifeline)
        os.kill(server, signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it has died: `_wait_for` finds out
            os.write(promote, b"%d" % os.getpid())


def _standby() -> int:
    """Return the process id of the standby, 0 where there is none.

    It is the only child that leads a process group in this session, which no other process can join.
    """
    session = os.getsid(0)
    leaders = [pid for pid in processes.children() if os.getsid(pid) == session and os.getpgid(pid) == pid]
    alive = [pid for pid in leaders if not os.waitpid(pid, os.WNOHANG)[0]]
    return alive[0] if len(alive) == 1 else 0


def _wait_for(server: int, lifeline: int) -> None:
    """Wait for the fork server's end. It exits by itself after the agent's death, unless it is stopped."""
    orphaned_at = None
    while not os.waitpid(server, os.WNOHANG)[0]:
        if agent_is_gone(lifeline):
            orphaned_at = orphaned_at or time.monotonic()
            out_of_time = time.monotonic() - orphaned_at > CLEANUP_WAIT_SECONDS
            os.kill(server, signal.SIGKILL if out_of_time else signal.SIGCONT)
        signal.sigtimedwait([signal.SIGCHLD], _POLL_SECONDS)
