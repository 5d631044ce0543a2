"""What the state keeper does when its agent was killed: it gives the parts of commits that it holds to other agents.

It answers at the agent's own port, whose listening socket it has a duplicate of, those who know the agent's secret.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
from collections.abc import Iterator, Mapping

from raylaunch.core.machine.commits import HeldCommit
from raylaunch.node.state import part_transfer
from raylaunch.node.state.memory_file import MemoryFile
from raylaunch.worker.state.commit_buffer import OWN_BUFFERS

_HELLO_SECONDS = 5.0
_MOST_HELLO_BYTES = 256
_MOST_CONNECTIONS = 64
"""Those that are served at a time. Others are closed, and try again."""


class OrphanedParts:
    """Serves the files from a thread of its own, and each connection from another one, until the process ends."""

    def __init__(
        self, server: socket.socket, secret: str, files: Mapping[tuple[int, int], int], lock: threading.Lock
    ) -> None:
        """`files`: descriptors by rank and index of the buffer, which change only while the lock is held."""
        self._server = server
        self._secret = secret
        self._files = files
        self._lock = lock
        self._places = threading.Semaphore(_MOST_CONNECTIONS)

    def start(self) -> None:
        """Begin to serve. Raises RuntimeError where there can be no thread."""
        self._server.setblocking(True)
        threading.Thread(target=self._accept, daemon=True, name="raylaunch-orphans").start()

    def close(self) -> None:
        """Close the port, which nobody has begun to serve."""
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                line = self._server.accept()[0]
            except OSError:
                return
            if not self._places.acquire(blocking=False):
                line.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(line,), daemon=True, name="raylaunch-orphan").start()
            except RuntimeError:  # "can't start new thread"
                self._places.release()
                line.close()

    def _serve(self, line: socket.socket) -> None:
        try:
            with line, contextlib.suppress(OSError):
                line.settimeout(_HELLO_SECONDS)
                if not self._is_admitted(line):
                    return
                line.settimeout(part_transfer.TIMEOUT)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.sendall(part_transfer.ADMITTED)
                while (request := part_transfer.read_request(line)) is not None:
                    self._answer(line, *request)
        finally:
            self._places.release()

    def _is_admitted(self, line: socket.socket) -> bool:
        """Read the hello: the secret, a space, a name and a newline."""
        hello = b""
        while not hello.endswith(b"\n"):
            more = line.recv(1)
            if not more or len(hello) == _MOST_HELLO_BYTES:
                return False
            hello += more
        return hmac.compare_digest(hello.partition(b" ")[0], self._secret.encode())

    def _answer(self, line: socket.socket, kind: bytes, part: HeldCommit, size: int) -> None:
        del size
        if kind == part_transfer.LIST:
            with self._open() as files:
                found = [file.held(copied=index >= OWN_BUFFERS) for (_, index), file in files.items()]
            part_transfer.answer_list(line, [one for one in found if one is not None])
        elif kind == part_transfer.FETCH:
            self._give(line, part)
        else:
            part_transfer.answer(line, why="the agent was killed")

    def _give(self, line: socket.socket, part: HeldCommit) -> None:
        with self._open() as files:
            own = [file for (rank, _), file in files.items() if rank == part.rank]
            for file in sorted(own, key=lambda file: file.is_light):  # what is needed may be the whole part
                if file.has(part.commit, part.world_size):
                    try:
                        size = part_transfer.part_bytes(file.fd, part)
                    except part_transfer.TornError:
                        continue
                    part_transfer.answer(line, size=size)
                    part_transfer.send_part(line, file.fd, part, size)
                    return
        part_transfer.answer(line, why="the state keeper does not have the part")

    @contextlib.contextmanager
    def _open(self) -> Iterator[dict[tuple[int, int], MemoryFile]]:
        """Give all files, which stay open meanwhile."""
        with self._lock:
            found = {key: MemoryFile(os.dup(fd)) for key, fd in sorted(self._files.items())}
        try:
            yield found
        finally:
            for file in found.values():
                file.close()
