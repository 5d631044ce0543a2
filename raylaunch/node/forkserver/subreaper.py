"""The subreaper: the program that the supervisor starts. It forks the fork server and kills what that leaves behind.

It stands between the agent and the fork server because a Ray worker that exits kills its children at once, which would
leave the fork server no time to kill its workers' children. It forks before anything large is imported, and so stays
small.

When one of the two is killed, the other one ends all that is left, and itself. The supervisor then starts both again.

It also holds the memory for `State` and the folder for files, for the case that the agent is killed: see `fd_store`.
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

from raylaunch.node.forkserver.lifeline import (
    agent_is_dead,
    agent_is_gone,
    remove_folders,
    tell_that_all_have_ended,
    wait_for_end,
)
from raylaunch.node.linux import command_line, processes
from raylaunch.node.linux.fd_store import FdStore
from raylaunch.node.linux.processes import CLEANUP_SECONDS, CLEANUP_WAIT_SECONDS

_POLL_SECONDS = 1.0


def main() -> int:
    """`subreaper.py CONTROL_FD LIFELINE_FD STORE_FD [FOLDER...]`.

    Returns in the subreaper, in fork servers, and in workers.
    """
    started_at = time.time()
    control, lifeline, stored = map(int, sys.argv[1:4])
    folders = sys.argv[4:]
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
        store = FdStore(stored)
        serves = _wait_for(server, lifeline, store)
        _end_the_rest(lifeline)
        _wait_for_heir(lifeline, store, serves=serves)
        remove_folders(folders, lifeline, is_last=True)
        return 0
    os.close(stored)
    os.setpgid(0, 0)  # a group that loses its last tie to the session is woken by the kernel, with SIGHUP
    from raylaunch.node.forkserver import server as forkserver  # noqa: PLC0415

    return forkserver.main(me, control, lifeline, folders, started_at)


def _wait_for(server: int, lifeline: int, store: FdStore) -> bool:
    """Wait for the fork server's end. It exits by itself after the agent's death, unless it is stopped.

    Returns whether this process serves in the place of an agent that was killed.
    """
    signals = [signal.SIGCHLD, signal.SIGCONT]
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    # The kernel sends SIGCONT when the agent has sent something, closes the lifeline or dies: see fcntl(2). That
    # continues this process, if it is stopped.
    for fd in (lifeline, store.fileno()):
        fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(fd, processes.F_SETSIG, signal.SIGCONT)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    orphaned_at, serves = None, False
    while not os.waitpid(server, os.WNOHANG)[0]:
        store.receive()
        if agent_is_gone(lifeline):
            orphaned_at = orphaned_at or time.monotonic()
            out_of_time = time.monotonic() - orphaned_at > CLEANUP_WAIT_SECONDS
            os.kill(server, signal.SIGKILL if out_of_time else signal.SIGTERM)  # it may still import torch, for seconds
            os.kill(server, signal.SIGCONT)
            serves = serves or _serve_if_killed(lifeline, store)
        signal.sigtimedwait(signals, _POLL_SECONDS)
    return serves


def _serve_if_killed(lifeline: int, store: FdStore) -> bool:
    """Serve in the place of an agent that was killed and had a `State`. The end of its workers may take a while."""
    if not agent_is_dead(lifeline):
        return False
    store.receive()
    if store.fds:
        from raylaunch.node.state import inheritance  # noqa: PLC0415  # the subreaper stays small

        os.chdir("/")
        inheritance.serve(store.fds)
    return True


def _end_the_rest(lifeline: int) -> None:
    """Kill what the fork server has left, however long it takes to end, as long as the agent waits for that."""
    while not processes.kill_children(CLEANUP_SECONDS) and not agent_is_gone(lifeline):
        pass
    if not agent_is_gone(lifeline):
        tell_that_all_have_ended(lifeline)


def _wait_for_heir(lifeline: int, store: FdStore, *, serves: bool) -> None:
    """If the agent was killed, keep what it has put into the store until another one has it, or for a minute."""
    store.receive()
    if store.fds:
        wait_for_end(lifeline)
        if serves or _serve_if_killed(lifeline, store):
            from raylaunch.node.state import inheritance  # noqa: PLC0415

            inheritance.wait_for_heir(store.fds)
    store.close()


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
