"""The subreaper: the program that the supervisor starts. It forks the fork server and kills what that leaves behind.

If it is killed, the fork server takes its place, and the hot standby becomes the fork server.

It also stands between the agent and the fork server because a Ray worker that exits kills its children at once, which
would leave the fork server no time to kill its workers' children. It forks before anything large is imported, and so
stays small.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Started by path: make our own package importable without putting the current folder on sys.path.
    sys.path[: not getattr(sys.flags, "safe_path", False)] = [__file__.rsplit("/", 4)[0]]

import os
import time

from raylaunch.node.forkserver.promotion import agent_is_gone, remove_folders, run_standbys
from raylaunch.node.linux import command_line, processes

_PATIENCE = 5.0


def main() -> int:
    """`subreaper.py CONTROL_FD LIFELINE_FD [FOLDER...]`. Returns in the subreaper, in fork servers, and in workers."""
    started_at = time.time()
    control, lifeline, folders = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    command_line.prepare_titles()
    processes.become_subreaper()
    me = os.getpid()
    promotion, promote = os.pipe()
    server = _fork(control, lifeline)
    if server:
        command_line.set_helper_title("subreaper")
        os.close(control)
        os.close(promotion)
        processes.release_memory()
        run_standbys(server, promote, lifeline)
        remove_folders(folders, lifeline)
        return 0
    os.close(promote)
    os.setpgid(0, 0)  # a group that loses its last tie to the session is woken by the kernel, with SIGHUP
    from raylaunch.node.forkserver import hot_standby, lifecycle  # noqa: PLC0415

    link = hot_standby.StandbyLink(
        subreaper=me, promotions=(promotion,), lifeline=lifeline, started_at=started_at, folders=folders
    )
    link.become_active()
    return lifecycle.main(link, control)


def _fork(control: int, lifeline: int) -> int:
    """Fork. Where processes or memory are lacking, try again for seconds, then tell the supervisor why, and exit."""
    give_up_at = time.monotonic() + _PATIENCE
    while True:
        try:
            return os.fork()
        except OSError as error:
            if time.monotonic() > give_up_at or agent_is_gone(lifeline):
                _tell(control, error)
                raise SystemExit(1) from error
        time.sleep(_PATIENCE / 20)


def _tell(control: int, error: OSError) -> None:
    import socket  # noqa: PLC0415

    from raylaunch.node.linux import limits  # noqa: PLC0415
    from raylaunch.node.protocol import forkserver_messages, wire  # noqa: PLC0415

    wire.send(
        socket.socket(fileno=control), forkserver_messages.ServerFailed(why=limits.explained(error, "the subreaper"))
    )


if __name__ == "__main__":
    sys.exit(main())
