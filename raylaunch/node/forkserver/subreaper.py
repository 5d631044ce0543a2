"""The subreaper: the program that the supervisor starts. It forks the fork server and kills what that leaves behind.

It also stands between the agent and the fork server because a Ray worker that exits kills its children at once, which
would leave the fork server no time to kill its workers' children. It forks before anything large is imported, and so
stays small.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Started by path: make our own package importable without putting the current folder on sys.path.
    sys.path[: not getattr(sys.flags, "safe_path", False)] = [__file__.rsplit("/", 4)[0]]

import contextlib
import os
import signal
import time

from raylaunch.node.linux import processes
from raylaunch.node.linux.processes import CLEANUP_SECONDS, CLEANUP_WAIT_SECONDS

_POLL_SECONDS = 1.0
_PATIENCE = 5.0


def main() -> int:
    """`subreaper.py CONTROL_FD [FOLDER...]`. Returns in the subreaper, in fork servers, and in every worker."""
    started_at = time.time()
    control, folders, agent = int(sys.argv[1]), sys.argv[2:], os.getppid()
    processes.become_subreaper()
    processes.signal_on_parent_death(signal.SIGCONT, agent)  # one that was stopped goes on, and cleans up
    me = os.getpid()
    promotion, promote = os.pipe()
    server = _fork(control, agent)
    if server:
        os.close(control)
        os.close(promotion)
        processes.release_memory()
        _run_standbys(server, agent, promote)
        processes.kill_children(CLEANUP_SECONDS)
        if os.getppid() != agent:
            _remove(folders)
        return 0
    os.close(promote)
    os.setpgid(0, 0)  # a group that loses its last tie to the session is woken by the kernel, with SIGHUP
    from raylaunch.node.forkserver import hot_standby, lifecycle  # noqa: PLC0415

    link = hot_standby.StandbyLink(subreaper=me, promotion=promotion, started_at=started_at, folders=folders)
    link.become_active()
    return lifecycle.main(link, control)


def _fork(control: int, agent: int) -> int:
    """Fork. Where processes or memory are lacking, try again for seconds, then tell the supervisor why, and exit."""
    give_up_at = time.monotonic() + _PATIENCE
    while True:
        try:
            return os.fork()
        except OSError as error:
            if time.monotonic() > give_up_at or os.getppid() != agent:
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


def _run_standbys(server: int, agent: int, promote: int) -> None:
    """Wait for the fork server's end, kill what it leaves, promote its standby, and so on until there is none."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    while server:
        _wait_for(server, agent)
        server = _standby() if os.getppid() == agent else 0
        if server and not processes.kill_children(CLEANUP_SECONDS, spared=server):
            return
        if server:
            os.kill(server, signal.SIGCONT)
            with contextlib.suppress(BrokenPipeError):  # it has died: `_wait_for` finds out
                os.write(promote, b".")


def _standby() -> int:
    """Return the process id of the standby, 0 where there is none.

    It is the only child that leads a process group in this session, which no other process can join.
    """
    me = os.getpid()
    leaders = [pid for pid in processes.children() if os.getsid(pid) == me and os.getpgid(pid) == pid]
    alive = [pid for pid in leaders if not os.waitpid(pid, os.WNOHANG)[0]]
    return alive[0] if len(alive) == 1 else 0


def _wait_for(server: int, agent: int) -> None:
    """Wait for the fork server's end. It exits by itself after the agent's death, unless it is stopped."""
    orphaned_at = None
    while not os.waitpid(server, os.WNOHANG)[0]:
        if os.getppid() != agent:
            orphaned_at = orphaned_at or time.monotonic()
            out_of_time = time.monotonic() - orphaned_at > CLEANUP_WAIT_SECONDS
            os.kill(server, signal.SIGKILL if out_of_time else signal.SIGCONT)
        signal.sigtimedwait([signal.SIGCHLD], _POLL_SECONDS)


def _remove(folders: list[str]) -> None:
    from raylaunch.node.linux import scratch  # noqa: PLC0415

    for folder in folders:
        scratch.remove(folder)


if __name__ == "__main__":
    sys.exit(main())
