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
    """`keeper.py CONTROL_FD`. Returns in the keeper, in the fork server, and in every worker that was forked there."""
    control = int(sys.argv[1])
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
        return 0
    processes.on_death_of_parent(signal.SIGTERM, me)
    processes.become_reaper()
    from raylaunch.node import forkserver  # noqa: PLC0415

    return forkserver.main(control)


if __name__ == "__main__":
    sys.exit(main())
