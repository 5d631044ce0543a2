"""How agents tell each other of files, and how a file goes from one to the other over TCP: its bytes, then a checksum.

It uses the connections of `part_transfer`. A request of the kind `FILES` is followed by JSON, and so is its answer.
Nothing is unpickled, and names of files are checked by whoever uses them.
"""

from __future__ import annotations

import json
import os
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from raylaunch.node.state import part_transfer
from raylaunch.node.state.fast_dir import FilesOwner, FileStamp
from raylaunch.node.state.part_transfer import TRAILER, TornError

FILES = b"J"
_CHUNK = 2**20
_MOST_BYTES = 32 * 2**20
"""The longest request or answer."""


def ask(line: socket.socket, do: str, **request: object) -> Any:
    """Send a request, and return the answer. Raises CopyRefusedError, and OSError."""
    body = json.dumps({"do": do} | request).encode()
    line.sendall(part_transfer.REQUEST.pack(FILES, 0, 0, 0, 0, len(body)) + body)
    return _load(line, part_transfer.read_answer(line))


def read_body(line: socket.socket, size: int) -> dict[str, Any]:
    """Return what follows a request of the kind `FILES`. Raises OSError."""
    found = _load(line, size)
    if not isinstance(found, dict):
        raise ConnectionAbortedError
    return found


def reply(line: socket.socket, found: object) -> None:
    """Send `found` as JSON on the line of a request, with its size first. Raises OSError."""
    body = json.dumps(found).encode()
    part_transfer.answer(line, size=len(body))
    line.sendall(body)


def _load(line: socket.socket, size: int) -> Any:
    if not 0 <= size <= _MOST_BYTES:
        raise ConnectionAbortedError
    try:
        return json.loads(part_transfer.read_bytes(line, size) or b"null")
    except EOFError:
        raise ConnectionResetError from None
    except ValueError:
        raise ConnectionAbortedError from None


def listed(found: Mapping[str, FileStamp]) -> list[list[object]]:
    """Return files as they are sent."""
    return [[name, stamp.size, stamp.mtime_ns] for name, stamp in found.items()]


def from_list(found: object) -> dict[str, FileStamp]:
    """Return files that were sent. Raises ConnectionAbortedError for anything else."""
    try:
        return {str(name): FileStamp(int(size), int(mtime_ns)) for name, size, mtime_ns in found}  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ConnectionAbortedError from None


def owner_from(found: object) -> FilesOwner:
    """Return whose files some are, as it was sent by `asdict`. Raises ConnectionAbortedError for anything else."""
    if isinstance(found, dict) and found.keys() == {each.name for each in fields(FilesOwner)}:
        node, *numbers = (found[each.name] for each in fields(FilesOwner))
        if isinstance(node, str) and all(type(number) is int and number >= 0 for number in numbers):
            owner = FilesOwner(**found)
            if owner.world_size:
                return owner
    raise ConnectionAbortedError


def send_file(
    line: socket.socket,
    fd: int,
    stamp: FileStamp,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
    rate: float = float("inf"),
) -> bool:
    """Send a file, and whether it has stayed as it was. `rate`: bytes per second at most. Returns the same.

    Raises OSError, also where it is stopped.
    """
    checksum = part_transfer.send_bytes(line, fd, stamp.size, is_stopped=is_stopped, rate=rate)
    status = os.fstat(fd)
    is_whole = FileStamp(status.st_size, status.st_mtime_ns) == stamp
    line.sendall(TRAILER.pack(is_whole, checksum))
    return is_whole


def reserve(path: str, size: int) -> None:
    """Have memory for a file before its bytes come. Raises OSError."""
    if size:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)


def receive_file(line: socket.socket, path: str, size: int) -> None:
    """Receive the bytes of a file. Raises OSError, and TornError where it was changed while it was sent."""
    checksum, left = 0, size
    with open(path, "r+b", buffering=0) as file:
        while left:
            chunk = line.recv(min(_CHUNK, left))
            if not chunk:
                raise ConnectionResetError
            file.write(chunk)
            checksum = zlib.crc32(chunk, checksum)
            left -= len(chunk)
    try:
        is_whole, expected = TRAILER.unpack(part_transfer.read_bytes(line, TRAILER.size))
    except EOFError:
        raise ConnectionResetError from None
    if not is_whole or expected != checksum:
        msg = "the file was changed while it was copied" if not is_whole else "the checksum of the file is wrong"
        raise TornError(msg)
