"""Where other agents of the run leave copies of parts of commits, and get those that this node has."""

from __future__ import annotations

import socket
from collections.abc import Callable

from raylaunch.cluster.agent.copies.file_server import FileServer
from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.node.protocol import acceptor
from raylaunch.node.state import file_transfer, part_transfer
from raylaunch.node.state.part_service import PartService
from raylaunch.node.state.state_files import StateFiles
from raylaunch.worker.state.commit_buffer import HEADER_BYTES

_MOST_NUMBER = 1 << 40
"""Above any rank, world size or number of bytes."""


class PartServer(PartService):
    """Serves the parts and files of a node."""

    def __init__(self, address: str, files: StateFiles, spared: Callable[[], tuple[Commit | None, ...]]) -> None:
        """Listen at this address of the machine only. `spared`: copies of which commits must stay. Raises OSError."""
        super().__init__(acceptor.listen(address))
        self._files = files
        self._file_server = FileServer(files)
        self._spared = spared

    def fileno(self) -> int:
        """Return the descriptor of the listening socket."""
        return self._server.fileno()

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
