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

from raylaunch.node import processes


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
        while os.wait()[0] != server:
            pass
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
    return code


def _remove(folders: list[str]) -> None:
    from raylaunch.node import spool  # noqa: PLC0415

    for folder in folders:
        spool.remove(folder)


if __name__ == "__main__":
    sys.exit(main())
