"""What an agent answers to others that copy files of RAYLAUNCH_FAST_DIR to it, or get files from it."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict
from typing import Any

from raylaunch.node.linux import limits
from raylaunch.node.state import fast_dir, file_transfer, part_transfer
from raylaunch.node.state.fast_dir import FileStamp, TooManyFilesError
from raylaunch.node.state.part_transfer import TornError
from raylaunch.node.state.state_files import StateFiles


class FileServer:
    """Answers one request at a time for each connection; any thread may call `answer`."""

    def __init__(self, files: StateFiles) -> None:
        self._files = files
        self._folder = files.folder

    def answer(self, line: socket.socket, size: int) -> None:
        """Read a request of this many bytes, and answer it. Raises OSError, also for what is no request."""
        try:
            self._answer(line, file_transfer.read_body(line, size))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, TooManyFilesError):
            raise ConnectionAbortedError from None

    def _answer(self, line: socket.socket, request: dict[str, Any]) -> None:
        match request["do"]:
            case "owners":
                found = self._folder.owners(before=int(request["before"]))
                file_transfer.reply(line, {node: asdict(owner) for node, owner in found.items()})
            case "list":
                try:
                    there = fast_dir.scan(self._folder.folder(request["node"]))
                except TooManyFilesError:
                    part_transfer.answer(line, why=f"it has more than {fast_dir.MOST_FILES} files")
                    return
                file_transfer.reply(line, file_transfer.listed(there))
            case "get":
                self._give(line, request["node"], request["name"])
            case "offer":
                owner, offered = file_transfer.owner_from(request["owner"]), file_transfer.from_list(request["files"])
                if self._copies(owner.node) and owner.node not in self._folder.owners():
                    self._folder.copied(owner)  # what comes is better than nothing, even if it is not all
                file_transfer.reply(line, self._lacking(self._copies(owner.node), offered))
            case "put":
                stamp = FileStamp(int(request["size"]), int(request["mtime_ns"]))
                self._take(line, request["node"], request["name"], stamp)
            case "finish":
                owner = file_transfer.owner_from(request["owner"])
                fast_dir.prune(self._copies(owner.node), set(request["names"]))
                self._folder.copied(owner)
                file_transfer.reply(line, None)
            case _:
                raise ConnectionAbortedError

    def _copies(self, node: str) -> str:
        """Return where copies of a node's files are, which is never the folder itself. Raises ValueError."""
        if not node:
            msg = "copies have no owner"
            raise ValueError(msg)
        return self._folder.folder(node)

    @staticmethod
    def _lacking(folder: str, offered: dict[str, FileStamp]) -> list[str]:
        there = {name: fast_dir.stamp_of(os.path.join(folder, fast_dir.checked(name))) for name in offered}
        return [name for name, stamp in offered.items() if there[name] != stamp]

    def _give(self, line: socket.socket, node: str, name: str) -> None:
        try:
            fd = fast_dir.open_complete(self._folder.folder(node), name, settled=0.0)
        except OSError as error:
            part_transfer.answer(line, why=f"{name} cannot be read: {error.strerror}")
            return
        if fd is None:
            part_transfer.answer(line, why=f"{name} is being written")
            return
        try:
            status = os.fstat(fd)
            stamp = FileStamp(status.st_size, status.st_mtime_ns)
            file_transfer.reply(line, [stamp.size, stamp.mtime_ns])
            file_transfer.send_file(line, fd, stamp)
        finally:
            os.close(fd)

    def _take(self, line: socket.socket, node: str, name: str, stamp: FileStamp) -> None:
        fast_dir.checked(name)
        folder = self._copies(node)
        part_transfer.lower_priority()
        why = self._files.why_no_room(stamp.size)
        try:
            with self._folder.incoming() as path:
                if not why:
                    file_transfer.reserve(path, stamp.size)
                part_transfer.answer(line, why=why)
                if not why:
                    file_transfer.receive_file(line, path, stamp.size)
                    self._folder.place(path, folder, name, stamp)
                    self._folder.added(node, stamp.size)
                    part_transfer.answer(line)
        except TornError as error:
            part_transfer.answer(line, why=str(error))
        except ConnectionError:
            raise
        except OSError as error:
            part_transfer.answer(line, why=f"{name}: {limits.explained(error, 'the agent')}")
