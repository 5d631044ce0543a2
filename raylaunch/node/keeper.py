"""The program that the supervisor starts: it forks the fork server, outlives it, and ends whatever it left behind.

It stands between the agent and the fork server for one more reason: a Ray worker that exits kills its own children
outright, and would leave the fork server no time to end its workers' children. It forks before anything large is
imported, and stays small.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Started by path: make our own package importable without putting the current folder on sys.path.
    sys.path[: not sys.flags.safe_path] = [__file__.rsplit("/", 3)[0]]

import contextlib
import os
import signal
import time

from raylaunch.node import processes
from raylaunch.node.patience import END_SECONDS, WAIT_SECONDS

_LOOK_SECONDS = 1.0


def main() -> int:
    """`keeper.py CONTROL_FD [FOLDER]`. Returns in the keeper, in fork servers, and in every worker forked there."""
    began = time.time()
    control, folders, agent = int(sys.argv[1]), sys.argv[2:], os.getppid()
    processes.be_as_nice_as_others()
    processes.become_reaper()
    processes.on_death_of_parent(signal.SIGCONT, agent)  # where we are stopped, we go on, and see to the rest
    me = os.getpid()
    baton, pass_baton = os.pipe()
    server = os.fork()
    if server:
        os.close(control)
        os.close(baton)
        processes.give_back_memory()
        _keep(server, agent, pass_baton)
        processes.end_children(END_SECONDS)
        if os.getppid() != agent:
            _remove(folders)
        return 0
    os.close(pass_baton)
    os.setpgid(0, 0)  # a group that loses its last tie to the session is woken by the kernel, with SIGHUP
    from raylaunch.node import forkserver, reserve  # noqa: PLC0415

    post = reserve.Post(keeper=me, baton=baton, began=began, folders=folders)
    post.take()
    return forkserver.main(post, control)


def _keep(server: int, agent: int, pass_baton: int) -> None:
    """Have a fork server's reserve follow it, until there is none."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while server:
        _outlive(server, agent)
        server = _reserve() if os.getppid() == agent else 0
        if server and not processes.end_children(END_SECONDS, spared=server):
            return
        if server:
            os.kill(server, signal.SIGCONT)
            with contextlib.suppress(BrokenPipeError):  # it has died: `_outlive` finds out
                os.write(pass_baton, b".")


def _reserve() -> int:
    """The child that alone leads a process group in our session, which no process can join; 0: there is none."""
    me = os.getpid()
    leaders = [pid for pid in processes.children() if os.getsid(pid) == me and os.getpgid(pid) == pid]
    alive = [pid for pid in leaders if not os.waitpid(pid, os.WNOHANG)[0]]
    return alive[0] if len(alive) == 1 else 0


def _outlive(server: int, agent: int) -> None:
    """Wait for the fork server's end, which comes after the agent's by itself, unless the fork server is stopped."""
    alone_since = None
    while not os.waitpid(server, os.WNOHANG)[0]:
        if os.getppid() != agent:
            alone_since = alone_since or time.monotonic()
            out_of_time = time.monotonic() - alone_since > WAIT_SECONDS
            os.kill(server, signal.SIGKILL if out_of_time else signal.SIGCONT)
        signal.sigtimedwait([signal.SIGCHLD], _LOOK_SECONDS)


def _remove(folders: list[str]) -> None:
    from raylaunch.node import spool  # noqa: PLC0415

    for folder in folders:
        spool.remove(folder)


if __name__ == "__main__":
    sys.exit(main())
