"""How agents give each other parts of commits and files over TCP.

A connection begins with a hello as at the link port (see `acceptor`). Then come requests, of which each is answered
before the next one. Both are JSON behind its length, and nothing of them is unpickled. The bytes of a part or of a file
follow what announces them, and then a trailer: whether it has stayed as it was, and a checksum.

A part may be overwritten while it is read. So the sender looks before and after whether the file has that part, as a
reader of a seqlock does, and the receiver seals only what was whole.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from raylaunch.core.decoding import prepare
from raylaunch.core.machine.commits import CopyAddress, HeldCommit
from raylaunch.core.text import printable
from raylaunch.node.state.fast_dir import FilesOwner, FileStamp
from raylaunch.node.state.state_files import MemoryFile
from raylaunch.worker.state.commit_buffer import HEADER_BYTES, CommitHeader

ADMITTED = b"+"
TIMEOUT = 10.0
"""Seconds without a byte after which a connection counts as broken."""
COPY_BYTES_PER_SECOND = 256 * 2**20
"""How fast an agent copies in the background, at most."""
_CHUNK = 2**20
_NICE = 10
"""A tenth of the weight of other threads (sched(7)). With 19, a hundredth, copies were seconds behind where workers use
all CPUs, however small they were."""
_LENGTH = struct.Struct("!I")
_MOST_BYTES = 32 * 2**20
"""The longest request or answer."""
TRAILER = struct.Struct("!?I")
"""Whether the part or file did not change while the bytes were read; their CRC-32."""

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRequest:
    """An agent asks another one for something."""

    do: str
    """`held`: which parts of commits there are. `fetch`: send a part. `push`: take one.

    `owners`: whose files there are. `list`: which files. `get`: send one. `offer`: which of these are missing, or are
    others. `put`: take one. `finish`: only these `files` are left.
    """
    part: HeldCommit | None = None
    size: int = 0
    """Bytes of the part that follows."""
    is_marked: bool = True
    """Whether it is part of a commit that all nodes copy; else it is only copied since workers are stopped."""
    owner: FilesOwner | None = None
    node: str = ""
    """Whose files; `""`: the folder itself, else copies."""
    name: str = ""
    stamp: FileStamp | None = None
    files: dict[str, FileStamp] = field(default_factory=dict)
    before: int = 0
    """Owners as they were before this attempt."""


prepare(CopyRequest)


class CopyRefusedError(Exception):
    """The other agent has answered why it does not do what it was asked for."""


class TornError(OSError):
    """A part or file did not arrive as it was: it was changed meanwhile, or bytes are damaged."""


@contextlib.contextmanager
def connection(address: CopyAddress, secret: str, *, seconds: float = TIMEOUT) -> Iterator[socket.socket]:
    """Connect to an agent, and say hello. Raises OSError, also where it does not answer for `seconds`."""
    with socket.create_connection((address.host, address.port), timeout=seconds) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(f"{secret} copies\n".encode())
        if line.recv(1) != ADMITTED:
            msg = "the other agent does not admit the connection"
            raise ConnectionError(msg)
        yield line


def lower_priority() -> None:
    """Let the rest of the machine go before this thread. It cannot be raised again."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


# Requests and answers.


def ask(line: socket.socket, kind: type[_Value], do: str, **more: Any) -> _Value:
    """Send a request, and return the answer, which is of this kind. Raises CopyRefusedError, and OSError."""
    _send(line, CopyRequest(do=do, **more))
    return read_answer(line, kind)


def read_answer(line: socket.socket, kind: type[_Value]) -> _Value:
    """Return the answer to a request. Raises CopyRefusedError, and OSError."""
    try:
        why, found = _read(line, tuple[str, kind | None])  # type: ignore[valid-type]
    except EOFError:
        raise ConnectionResetError from None
    if why:
        raise CopyRefusedError(printable(why))
    return found  # type: ignore[no-any-return]


def read_request(line: socket.socket) -> CopyRequest | None:
    """Return the next request; None: the connection is at its end. Raises OSError, also for what is no request."""
    try:
        found: CopyRequest = _read(line, CopyRequest)
    except EOFError:
        return None
    return found


def answer(line: socket.socket, found: object = None, *, why: str = "") -> None:
    """Answer a request. `why`: why it is refused, for a person."""
    _send(line, (why, found))


def _send(line: socket.socket, value: object) -> None:
    body = json.dumps(msgspec.to_builtins(value)).encode()  # names may have bytes that are no text
    line.sendall(_LENGTH.pack(len(body)) + body)


def _read(line: socket.socket, kind: Any) -> Any:
    (length,) = _LENGTH.unpack(_read_bytes(line, _LENGTH.size))
    try:
        if length <= _MOST_BYTES:
            return msgspec.convert(json.loads(_read_bytes(line, length)), kind)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        pass
    raise ConnectionAbortedError


def _read_bytes(line: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes. Raises EOFError where the connection ends before, and OSError."""
    data = bytearray()
    while len(data) < size:
        more = line.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


# Bytes.


def _goes_on() -> bool:
    return False


def send_file(
    line: socket.socket,
    fd: int,
    size: int,
    is_whole: Callable[[], bool],
    *,
    is_stopped: Callable[[], bool] = _goes_on,
    rate: float = float("inf"),
) -> bool:
    """Send the first bytes of a file, with zeros where it has become shorter, and the trailer.

    `is_whole`: whether they are still those that were announced; returns the same. `rate`: bytes per second at most.
    Raises OSError, also where it is stopped.
    """
    checksum, sent, began = 0, 0, time.monotonic()
    while sent < size:
        if is_stopped():
            raise ConnectionAbortedError
        length = min(_CHUNK, size - sent)
        chunk = os.pread(fd, length, sent).ljust(length, b"\0")
        line.sendall(chunk)
        checksum = zlib.crc32(chunk, checksum)
        sent += length
        time.sleep(max(0.0, began + sent / rate - time.monotonic()))
    line.sendall(TRAILER.pack(found := is_whole(), checksum))
    return found


def receive_file(line: socket.socket, fd: int, size: int, *, start: int = 0) -> bytes:
    """Receive a file, of which the bytes before `start` are returned and not written.

    Raises OSError, and TornError where it is not as it was.
    """
    top, checksum, place = b"", 0, 0
    while place < size:
        chunk = line.recv(min(_CHUNK, (size if place >= start else start) - place))
        if not chunk:
            raise ConnectionResetError
        checksum = zlib.crc32(chunk, checksum)
        if place < start:
            top += chunk
        elif os.pwrite(fd, chunk, place) < len(chunk):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        place += len(chunk)
    try:
        is_whole, expected = TRAILER.unpack(_read_bytes(line, TRAILER.size))
    except EOFError:
        raise ConnectionResetError from None
    if not is_whole or expected != checksum:
        msg = "it was changed while it was copied" if not is_whole else "its checksum is wrong"
        raise TornError(msg)
    return top


# Parts.


def part_bytes(fd: int, part: HeldCommit) -> int:
    """Return how many bytes of a file a part has. Raises TornError where it does not have this part."""
    if os.fstat(fd).st_size < HEADER_BYTES:
        msg = "the buffer has no such part any more"
        raise TornError(msg)
    with mmap.mmap(fd, HEADER_BYTES, prot=mmap.PROT_READ) as memory, _header(memory) as header:
        return _size(header, part, most=os.fstat(fd).st_size)


def _size(header: CommitHeader, part: HeldCommit, *, most: int) -> int:
    """Return how many bytes a part has, by its header. `part`: only what a request says of it."""
    held = header.held()
    with contextlib.suppress(ValueError):
        size = header.part_bytes()
        names = (part.rank, part.world_size, part.commit)
        if held is not None and (held.rank, held.world_size, held.commit) == names and size <= most:
            return size
    msg = "the buffer has no such part any more"
    raise TornError(msg)


@contextlib.contextmanager
def _header(memory: mmap.mmap | bytearray) -> Iterator[CommitHeader]:
    with memoryview(memory) as view:
        header = CommitHeader(view)
        try:
            yield header
        finally:
            header.close()


def send_part(
    line: socket.socket,
    fd: int,
    part: HeldCommit,
    size: int,
    *,
    is_stopped: Callable[[], bool] = _goes_on,
    rate: float = float("inf"),
) -> None:
    """Send a part, as `part_bytes` has measured it. Otherwise as `send_file`."""

    def is_whole() -> bool:
        with contextlib.suppress(TornError):
            return part_bytes(fd, part) == size
        return False

    send_file(line, fd, size, is_whole, is_stopped=is_stopped, rate=rate)


def receive_part(line: socket.socket, file: MemoryFile, part: HeldCommit, size: int) -> None:
    """Receive a part into a file, and seal it. Raises OSError, and TornError where it is not whole."""
    top = bytearray(receive_file(line, file.fd, size, start=HEADER_BYTES))
    target = file.header()
    with _header(top) as header:
        if _size(header, part, most=size) != size or target is None:
            msg = "the part is not what was announced"
            raise TornError(msg)
        held = header.held()
        assert held is not None
        tensors, pickled = header.sizes()
        target.seal(
            held,
            tensors=tensors,
            pickled=pickled,
            shared=header.shared_bytes,
            kept=header.is_kept,
            interval=header.interval,
        )
