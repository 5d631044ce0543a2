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

import os
import signal
import time

from raylaunch.node import processes

_LOOK_SECONDS = 1.0
_SERVER_SECONDS = 6.0
"""One more than the fork server takes to end what it has."""


def main() -> int:
    """`keeper.py CONTROL_FD [FOLDER]`. Returns in the keeper, in the fork server, and in every worker forked there.

    The folder goes with the agent; of the keeper and the fork server, either may be killed together with it.
    """
    control, folders, agent = int(sys.argv[1]), sys.argv[2:], os.getppid()
    processes.be_as_nice_as_others()
    processes.become_reaper()
    me = os.getpid()
    server = os.fork()
    if server:
        os.close(control)
        processes.give_back_memory()
        _outlive(server, agent)
        processes.end_children(seconds=5.0)
        if os.getppid() != agent:
            _remove(folders)
        return 0
    processes.on_death_of_parent(signal.SIGTERM, me)
    processes.become_reaper()
    from raylaunch.node import forkserver  # noqa: PLC0415

    server = os.getpid()
    code = forkserver.main(control)
    if os.getpid() == server:
        _remove(folders)
        if os.getppid() == me:
            os.kill(me, signal.SIGCONT)  # a keeper that was stopped goes on, and ends
    return code


def _outlive(server: int, agent: int) -> None:
    """Wait for the fork server's end, which comes after the agent's by itself, unless the fork server is stopped."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    alone_since = None
    while not os.waitpid(server, os.WNOHANG)[0]:
        if os.getppid() != agent:
            alone_since = alone_since or time.monotonic()
            out_of_time = time.monotonic() - alone_since > _SERVER_SECONDS
            os.kill(server, signal.SIGKILL if out_of_time else signal.SIGCONT)
        signal.sigtimedwait([signal.SIGCHLD], _LOOK_SECONDS)


def _remove(folders: list[str]) -> None:
    from raylaunch.node import spool  # noqa: PLC0415

    for folder in folders:
        spool.remove(folder)


if __name__ == "__main__":
    sys.exit(main())
