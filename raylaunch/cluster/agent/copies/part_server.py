"""Where other agents of the run leave copies of parts of commits, and get those that this node has."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from raylaunch.cluster.agent.acceptor import Acceptor
from raylaunch.cluster.agent.copies.file_server import FileServer
from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.node.state import file_transfer, part_transfer
from raylaunch.node.state.state_files import StateFiles
from raylaunch.worker.state.commit_buffer import HEADER_BYTES

MOST_CONNECTIONS = 32
"""Other agents that are served at a time. Those that are not try again."""
_MOST_NUMBER = 1 << 40
"""Above any rank, world size or number of bytes."""


class PartServer(Acceptor):
    """Serves each connection with the secret in a thread of its own. `close` may be called from any thread."""

    def __init__(self, address: str, files: StateFiles, spared: Callable[[], tuple[Commit | None, ...]]) -> None:
        """Listen at this address of the machine only. `spared`: copies of which commits must stay. Raises OSError."""
        super().__init__(address, thread="raylaunch-part-server")
        self._files = files
        self._file_server = FileServer(files)
        self._spared = spared
        self._lines: set[socket.socket] = set()
        self._is_closed = False

    def start(self) -> None:
        """Take connections from now on, in a thread of its own."""
        self._listen_in_thread()

    def fileno(self) -> int:
        """Return the descriptor of the listening socket."""
        return self._server.fileno()

    def close(self) -> None:
        """Close the port and all connections."""
        self._is_closed = True
        super().close()
        for line in [*self._lines]:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def _admit(self, line: socket.socket, name: str) -> bool:
        del name
        if len(self._lines) >= MOST_CONNECTIONS or self._is_closed:
            return False
        self._lines.add(line)
        try:
            threading.Thread(target=self._serve, args=(line,), daemon=True, name="raylaunch-part").start()
        except RuntimeError:  # "can't start new thread"
            self._lines.discard(line)
            return False
        return True

    def _serve(self, line: socket.socket) -> None:
        try:
            with line, contextlib.suppress(OSError):
                line.settimeout(part_transfer.TIMEOUT)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.sendall(part_transfer.ADMITTED)
                while (request := part_transfer.read_request(line)) is not None:
                    self._answer(line, *request)
        finally:
            self._lines.discard(line)

    def _answer(self, line: socket.socket, kind: bytes, part: HeldCommit, size: int) -> None:
        if kind == file_transfer.FILES:
            self._file_server.answer(line, size)
            return
        numbers = (part.rank, part.world_size, part.commit.attempt, part.commit.steps, size)
        if not all(0 <= number < _MOST_NUMBER for number in numbers) or part.rank >= part.world_size:
            raise ConnectionAbortedError
        if kind == part_transfer.PUSH and size >= HEADER_BYTES:
            self._take(line, part, size)
        elif kind == part_transfer.FETCH:
            self._give(line, part)
        else:
            raise ConnectionAbortedError

    def _take(self, line: socket.socket, part: HeldCommit, size: int) -> None:
        part_transfer.lower_priority()
        with self._files.writing_copy(part, size, self._spared()) as file:
            if isinstance(file, str):
                part_transfer.answer(line, why=file)
                return
            part_transfer.answer(line)
            try:
                part_transfer.receive_part(line, file, part, size)
            except part_transfer.TornError as error:
                part_transfer.answer(line, why=str(error))
                return
        part_transfer.answer(line)

    def _give(self, line: socket.socket, part: HeldCommit) -> None:
        with self._files.reading(part.rank, part.commit, part.world_size) as fd:
            try:
                size = part_transfer.part_bytes(fd, part) if fd is not None else 0
            except part_transfer.TornError:
                size = 0
            if fd is None or not size:
                part_transfer.answer(line, why="this node does not have the part")
                return
            part_transfer.answer(line, size=size)
            part_transfer.send_part(line, fd, part, size)
