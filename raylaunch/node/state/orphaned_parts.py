"""Lets a state keeper whose agent was killed give the parts of commits that it holds to other agents.

It answers clients that know the agent's secret, at the agent's own port: it has a duplicate of its listening socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Mapping

from raylaunch.core.machine.commits import HeldCommit
from raylaunch.node.state import part_transfer
from raylaunch.node.state.memory_file import MemoryFile
from raylaunch.node.state.part_service import PartService
from raylaunch.worker.state.commit_buffer import OWN_BUFFERS


class OrphanedParts(PartService):
    """Serves the files until the process ends."""

    def __init__(
        self, server: socket.socket, secret: str, files: Mapping[tuple[int, int], int], lock: threading.Lock
    ) -> None:
        """`files`: descriptors by rank and index of the buffer, which change only while the lock is held.

        Raises OSError.
        """
        super().__init__(server, secret=secret)
        self._files = files
        self._lock = lock

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
