"""The state keeper's program: `fd_store.py LISTENING_FD SECONDS`. It holds descriptors of memory files for agents.

As systemd's descriptor store does for a service (`sd_pid_notify_with_fds`), it gives them back to an agent that takes
the place of one that was killed. There is one for each run on each host. It ends when its last agent has taken its
leave, or was gone for SECONDS. As long as its agents live, it only holds the files and never reads them. When one was
killed, it gives them to other agents at that agent's port: see `orphaned_parts`.

It also has a lock on the agents' folders of files (`fast_dir`), so that nobody else removes them. At its end it removes
each folder whose agent was killed and that no other agent has taken over.

Messages are packets of JSON, with one descriptor at most; what an agent sends is in `fd_store_client`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Started by path: make our own package importable without putting the current folder on sys.path.
    sys.path[: not getattr(sys.flags, "safe_path", False)] = [__file__.rsplit("/", 4)[0]]

import contextlib
import json
import os
import select
import socket
import threading
import time
from typing import TYPE_CHECKING

from raylaunch.node.linux import command_line
from raylaunch.node.protocol import wire

if TYPE_CHECKING:
    from raylaunch.node.state.orphaned_parts import OrphanedParts

MESSAGE_BYTES = 65536
_SEND_SECONDS = 2.0
"""How long an agent may take to receive what it has asked for."""


class FdStore:
    """The files, and the connections of the agents."""

    def __init__(self, listener: socket.socket, seconds: float) -> None:
        self._listener = listener
        self._seconds = seconds
        #: By rank and index of the buffer.
        self._files: dict[tuple[int, int], int] = {}
        self._agents: dict[int, socket.socket] = {}
        #: By descriptor of an agent's connection: what serves its files when it was killed.
        self._heirs: dict[int, OrphanedParts] = {}
        #: By path: the descriptors of the lock and of the agent's connection; the latter is -1 if the agent was killed.
        self._folders: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        #: When to end, if no agent comes before; None: an agent was never lost.
        self._deadline: float | None = None

    def serve(self) -> None:
        """Serve until the last agent has taken its leave, or was gone for too long."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        wait: float | None = self._seconds
        while wait is None or wait > 0:
            ready = {fd for fd, _ in poll.poll(None if wait is None else 1000 * wait)}
            if self._listener.fileno() in ready and (agent := self._accept()) is not None:
                poll.register(agent, select.POLLIN)
            for fd in [fd for fd in self._agents if fd in ready]:  # the oldest first, which others may follow
                if not self._receive(self._agents[fd]):
                    poll.unregister(fd)
                    self._agents.pop(fd).close()
            wait = None if self._agents else self._seconds_left()
        for folder in self._orphaned_folders():
            import shutil  # noqa: PLC0415  # it would delay the start

            shutil.rmtree(folder, ignore_errors=True)

    def _accept(self) -> socket.socket | None:
        agent = self._listener.accept()[0]
        if not wire.peer_is_same_user(agent):
            return None
        agent.setblocking(False)  # Python 3.11's `recv_fds` ignores its flags
        self._agents[agent.fileno()] = agent
        return agent

    def _seconds_left(self) -> float:
        return 0.0 if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _receive(self, agent: socket.socket) -> bool:
        """Take all messages that there are. Return False where the agent is gone."""
        try:
            while True:
                data, fds, _, _ = socket.recv_fds(agent, MESSAGE_BYTES, 1)
                if not data:
                    break
                if not self._handle(agent, json.loads(data), fds):
                    return False
        except BlockingIOError:
            return True
        except OSError:
            pass
        self._deadline = time.monotonic() + self._seconds
        for path, (fd, owner) in self._folders.items():
            self._folders[path] = fd, -1 if owner == agent.fileno() else owner
        if (heir := self._heirs.pop(agent.fileno(), None)) is not None:
            with contextlib.suppress(RuntimeError):  # "can't start new thread"
                heir.start()
        return False

    def _handle(self, agent: socket.socket, message: dict[str, object], fds: list[int]) -> bool:
        match message:
            case {"do": "keep", "rank": int(rank), "index": int(index)} if fds:
                with self._lock:
                    self._drop((rank, index))
                    self._files[rank, index] = fds.pop()
            case {"do": "drop", "rank": int(rank), "index": int(index)}:
                with self._lock:
                    self._drop((rank, index))
            case {"do": "protect" | "release" as do, "path": str(path)}:
                self._release(path)
                if do == "protect" and fds:
                    self._folders[path] = fds.pop(), agent.fileno()
            case {"do": "answer", "secret": str(secret)} if fds:
                self._close_port(agent)
                with contextlib.suppress(OSError):  # no descriptors are left
                    self._heirs[agent.fileno()] = self._heir(socket.socket(fileno=fds.pop()), secret)
            case {"do": "take"}:
                self._give(agent)
            case {"do": "leave"}:
                self._leave(agent)
                return False
            case _:
                pass  # of another version
        for unexpected in fds:
            os.close(unexpected)
        return True

    def _heir(self, server: socket.socket, secret: str) -> OrphanedParts:
        from raylaunch.node.state.orphaned_parts import OrphanedParts  # noqa: PLC0415  # it would delay the start

        return OrphanedParts(server, secret, self._files, self._lock)

    def _give(self, agent: socket.socket) -> None:
        """Give an agent all files, and the paths of the folders of agents that were killed."""
        if self._files or self._orphaned_folders():
            self._deadline = None  # it takes the place of the agent that was lost
        agent.settimeout(_SEND_SECONDS)
        for (rank, index), fd in sorted(self._files.items()):
            socket.send_fds(agent, [json.dumps({"rank": rank, "index": index}).encode()], [fd])
        agent.send(json.dumps({"folders": self._orphaned_folders()}).encode())
        agent.setblocking(False)

    def _leave(self, agent: socket.socket) -> None:
        self._close_port(agent)
        for path in [path for path, (_, owner) in self._folders.items() if owner == agent.fileno()]:
            self._release(path)

    def _close_port(self, agent: socket.socket) -> None:
        if (heir := self._heirs.pop(agent.fileno(), None)) is not None:
            heir.close()

    def _orphaned_folders(self) -> list[str]:
        return [path for path, (_, owner) in self._folders.items() if owner < 0]

    def _release(self, path: str) -> None:
        fd, _ = self._folders.pop(path, (-1, -1))
        if fd >= 0:
            os.close(fd)

    def _drop(self, key: tuple[int, int]) -> None:
        fd = self._files.pop(key, None)
        if fd is not None:
            os.close(fd)


def main() -> int:
    """Run as the program of a process of its own; return its exit code."""
    command_line.prepare_titles()
    command_line.set_helper_title("state keeper")
    with contextlib.closing(socket.socket(fileno=int(sys.argv[1]))) as listener:
        FdStore(listener, float(sys.argv[2])).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
