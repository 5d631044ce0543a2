"""Where other agents of the run leave copies of parts of commits and of files, and get those that this node has.

Each agent has a server as long as the run lasts. If the agent was killed, its subreaper serves in its place what is
left (`inheritance`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.node.linux import limits
from raylaunch.node.protocol.acceptor import Acceptor
from raylaunch.node.state import fast_dir, transfer
from raylaunch.node.state.fast_dir import FilesOwner, FileStamp, TooManyFilesError
from raylaunch.node.state.state_files import StateFiles
from raylaunch.node.state.transfer import CopyRequest, TornError
from raylaunch.worker.state.commit_buffer import HEADER_BYTES

MOST_CONNECTIONS = 32
"""Other agents that are served at a time. Those that are not try again."""
_MOST_NUMBER = 1 << 40
"""Above any rank, world size or number of bytes."""


class PartServer(Acceptor):
    """Serves each connection with the secret in a thread of its own. `close` may be called from any thread."""

    def __init__(
        self,
        server: socket.socket,
        files: StateFiles,
        spared: Callable[[], tuple[Commit | None, ...]] = tuple,
        *,
        secret: str = "",
    ) -> None:
        """`server` and `secret`: as in `Acceptor`. `spared`: copies of which commits must stay. Raises OSError."""
        super().__init__(server, thread="raylaunch-part-server", secret=secret)
        self._files = files
        self._folder = files.folder
        self._spared = spared
        self._lines: set[socket.socket] = set()
        self._is_closed = False

    def fileno(self) -> int:
        """Return the descriptor of the listening socket."""
        return self._server.fileno()

    def start(self) -> None:
        """Take connections from now on, in a thread of its own. Raises RuntimeError where there can be no thread."""
        self._listen_in_thread()

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
            with line, contextlib.suppress(OSError, ValueError):  # or it asks for what cannot be
                line.settimeout(transfer.TIMEOUT)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.sendall(transfer.ADMITTED)
                while (request := transfer.read_request(line)) is not None:
                    self._answer(line, request)
        finally:
            self._lines.discard(line)

    def _answer(self, line: socket.socket, request: CopyRequest) -> None:
        """Answer a request. Raises OSError, and ValueError for what is no request: the connection is closed."""
        try:
            match request:
                case CopyRequest(do="held"):
                    transfer.answer(line, self._files.held())
                case CopyRequest(do="push", part=HeldCommit() as part, size=size) if _is_possible(part, size):
                    self._take_part(line, part, size, is_marked=request.is_marked)
                case CopyRequest(do="fetch", part=HeldCommit() as part) if _is_possible(part, HEADER_BYTES):
                    self._give_part(line, part)
                case CopyRequest(do="get"):
                    self._give_file(line, request.node, request.name)
                case CopyRequest(do="put", stamp=FileStamp() as stamp):
                    self._take_file(line, request.node, request.name, stamp)
                case CopyRequest(do="owners"):
                    transfer.answer(line, self._folder.owners(before=request.before))
                case CopyRequest(do="list"):
                    transfer.answer(line, fast_dir.scan(self._folder.folder(request.node)))
                case CopyRequest(owner=FilesOwner() as owner):
                    self._answer_owner(line, request, owner)
                case _:
                    raise ConnectionAbortedError
        except TooManyFilesError:
            transfer.answer(line, why=f"it has more than {fast_dir.MOST_FILES} files")

    def _answer_owner(self, line: socket.socket, request: CopyRequest, owner: FilesOwner) -> None:
        folder = self._copies(owner.node)
        if request.do == "offer":
            if owner.node not in self._folder.owners():
                self._folder.copied(owner)  # what comes is better than nothing, even if it is not all
            transfer.answer(line, _lacking(folder, request.files))
        elif request.do == "finish":
            fast_dir.prune(folder, set(request.files))
            self._folder.copied(owner)
            transfer.answer(line)
        else:
            raise ConnectionAbortedError

    # Parts of commits.

    def _take_part(self, line: socket.socket, part: HeldCommit, size: int, *, is_marked: bool) -> None:
        """Take a copy. If it is not of a marked commit, the last marked one may not be on two hosts everywhere yet."""
        transfer.lower_priority()
        with self._files.writing_copy(part, size, self._spared(), staying=1 if is_marked else 2) as file:
            if isinstance(file, str):
                transfer.answer(line, why=file)
                return
            transfer.answer(line)
            try:
                transfer.receive_part(line, file, part, size)
            except TornError as error:
                transfer.answer(line, why=str(error))
                return
        transfer.answer(line)

    def _give_part(self, line: socket.socket, part: HeldCommit) -> None:
        with self._files.reading(part.rank, part.commit, part.world_size) as fd:
            try:
                size = transfer.part_bytes(fd, part) if fd is not None else 0
            except TornError:
                size = 0
            if fd is None or not size:
                transfer.answer(line, why="this node does not have the part")
                return
            transfer.answer(line, size)
            transfer.send_part(line, fd, part, size)

    # Files.

    def _copies(self, node: str) -> str:
        """Return where copies of a node's files are, which is never the folder itself. Raises ValueError."""
        if not node:
            msg = "copies have no owner"
            raise ValueError(msg)
        return self._folder.folder(node)

    def _give_file(self, line: socket.socket, node: str, name: str) -> None:
        try:
            fd = fast_dir.open_complete(self._folder.folder(node), name, settled=0.0)
        except OSError as error:
            transfer.answer(line, why=f"{name} cannot be read: {error.strerror}")
            return
        if fd is None:
            transfer.answer(line, why=f"{name} is being written")
            return
        try:
            stamp = fast_dir.stamp_of(fd)
            assert stamp is not None
            transfer.answer(line, stamp)
            transfer.send_file(line, fd, stamp.size, lambda: fast_dir.stamp_of(fd) == stamp)
        finally:
            os.close(fd)

    def _take_file(self, line: socket.socket, node: str, name: str, stamp: FileStamp) -> None:
        fast_dir.checked(name)
        folder = self._copies(node)
        transfer.lower_priority()
        try:
            if why := self._files.why_no_room(stamp.size):
                transfer.answer(line, why=why)
                return
            with self._folder.incoming(stamp.size) as (path, fd):
                transfer.answer(line)
                transfer.receive_file(line, fd, stamp.size)
                self._folder.place(path, folder, name, stamp)
            self._folder.added(node, stamp.size)
            transfer.answer(line)
        except TornError as error:
            transfer.answer(line, why=str(error))
        except ConnectionError:
            raise
        except OSError as error:
            transfer.answer(line, why=f"{name}: {limits.explained(error, 'the agent')}")


def _is_possible(part: HeldCommit, size: int) -> bool:
    numbers = (part.rank, part.world_size, part.commit.attempt, part.commit.steps, size)
    is_valid = all(0 <= number < _MOST_NUMBER for number in numbers)
    return is_valid and part.rank < part.world_size and size >= HEADER_BYTES


def _lacking(folder: str, offered: dict[str, FileStamp]) -> list[str]:
    there = {name: fast_dir.stamp_of(os.path.join(folder, fast_dir.checked(name))) for name in offered}
    return [name for name, stamp in offered.items() if there[name] != stamp]
