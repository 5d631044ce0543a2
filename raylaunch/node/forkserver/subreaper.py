"""The subreaper: the program that the supervisor starts. It forks the fork server and kills what that leaves behind.

It stands between the agent and the fork server because a Ray worker that exits kills its children at once, which would
leave the fork server no time to kill its workers' children. It forks before anything large is imported, and so stays
small.

When one of the two is killed, the other one ends all that is left, and itself. The supervisor then starts both again.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Started by path: make our own package importable without putting the current folder on sys.path.
    sys.path[: not getattr(sys.flags, "safe_path", False)] = [__file__.rsplit("/", 4)[0]]

import fcntl
import os
import signal
import time

from raylaunch.node.forkserver.lifeline import agent_is_gone, remove_folders
from raylaunch.node.linux import command_line, processes
from raylaunch.node.linux.processes import CLEANUP_SECONDS, CLEANUP_WAIT_SECONDS

_POLL_SECONDS = 1.0


def main() -> int:
    """`subreaper.py CONTROL_FD LIFELINE_FD [FOLDER...]`. Returns in the subreaper, in fork servers, and in workers."""
    started_at = time.time()
    control, lifeline, folders = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    command_line.prepare_titles()
    processes.become_subreaper()
    me = os.getpid()
    try:
        server = os.fork()
    except OSError as error:
        _tell(control, error)
        return 1
    if server:
        command_line.set_helper_title("subreaper")
        os.close(control)
        processes.release_memory()
        _wait_for(server, lifeline)
        processes.kill_children(CLEANUP_SECONDS)
        remove_folders(folders, lifeline)
        return 0
    os.setpgid(0, 0)  # a group that loses its last tie to the session is woken by the kernel, with SIGHUP
    from raylaunch.node.forkserver import server as forkserver  # noqa: PLC0415

    return forkserver.main(me, control, lifeline, folders, started_at)


def _wait_for(server: int, lifeline: int) -> None:
    """Wait for the fork server's end. It exits by itself after the agent's death, unless it is stopped."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    # The kernel continues this process, if it is stopped, when the agent closes the socket or dies: see fcntl(2).
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, processes.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    orphaned_at = None
    while not os.waitpid(server, os.WNOHANG)[0]:
        if agent_is_gone(lifeline):
            orphaned_at = orphaned_at or time.monotonic()
            out_of_time = time.monotonic() - orphaned_at > CLEANUP_WAIT_SECONDS
            os.kill(server, signal.SIGKILL if out_of_time else signal.SIGCONT)
        signal.sigtimedwait([signal.SIGCHLD], _POLL_SECONDS)


def _tell(control: int, error: OSError) -> None:
    """Tell the supervisor why there is no fork server."""
    import socket  # noqa: PLC0415

    from raylaunch.node.linux import limits  # noqa: PLC0415
    from raylaunch.node.protocol import forkserver_messages, wire  # noqa: PLC0415

    wire.send(
        socket.socket(fileno=control), forkserver_messages.ServerFailed(why=limits.explained(error, "the subreaper"))
    )


if __name__ == "__main__":
    sys.exit(main())
