"""How one rank's part of a commit goes from one agent to another over TCP: its file byte for byte, then a checksum.

All messages have a fixed layout, and nothing of them is unpickled. A connection begins with a hello as at the link port
(see `acceptor`). Then come requests: PUSH, with a part that the server is to keep, FETCH, for a part that it has, or
LIST, for the names of all parts, which only the state keeper of a killed agent answers.

The source may be overwritten while it is read. So the sender looks before and after whether the file has that part, as
a reader of a seqlock does, and says in the trailer whether it had; the receiver seals only what was whole.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.core.text import printable
from raylaunch.node.protocol.copy_messages import CopyAddress
from raylaunch.node.state.memory_file import MemoryFile
from raylaunch.worker.state.commit_buffer import HEADER_BYTES, CommitHeader

PUSH, FETCH, LIST = b"P", b"F", b"L"
ADMITTED = b"+"
TIMEOUT = 10.0
"""Seconds without a byte after which a connection counts as broken."""
COPY_BYTES_PER_SECOND = 256 * 2**20
"""How fast an agent copies in the background, at most."""
_CHUNK = 2**20
_NICE = 10
"""A tenth of the weight of other threads (sched(7)). With 19, a hundredth, copies were seconds behind where workers use
all CPUs, however small they were."""
REQUEST = struct.Struct("!c5q")
"""PUSH, FETCH or LIST; rank, size of its world, attempt, steps; bytes of the part, 0 but for PUSH."""
_ANSWER = struct.Struct("!?qH")
"""Whether it is done; bytes of the part, for FETCH, or the number of parts, for LIST; the length of the text that
follows, which says why not."""
_LISTED = struct.Struct("!4q??3q?")
"""A part in the answer to LIST: rank, size of its world, attempt, steps; the other fields of `HeldCommit`."""
_MOST_LISTED = 100_000
TRAILER = struct.Struct("!?I")
"""Whether the part was whole all the time; the CRC-32 of its bytes."""
_MOST_TEXT = 500


class CopyRefusedError(Exception):
    """The other agent has answered why it does not do what it was asked for."""


class TornError(OSError):
    """A part did not arrive as it was: it was overwritten meanwhile, or bytes are damaged."""


@contextlib.contextmanager
def connection(address: CopyAddress, *, seconds: float = TIMEOUT) -> Iterator[socket.socket]:
    """Connect to an agent, and say hello. Raises OSError, also where it does not answer for `seconds`."""
    with socket.create_connection((address.host, address.port), timeout=seconds) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(f"{address.secret} copies\n".encode())
        if line.recv(1) != ADMITTED:
            msg = "the other agent does not admit the connection"
            raise ConnectionError(msg)
        yield line


def lower_priority() -> None:
    """Let the rest of the machine go before this thread. It cannot be raised again."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


# Requests and answers.


def send_request(line: socket.socket, kind: bytes, part: HeldCommit, size: int = 0) -> None:
    """Ask another agent to take a part or to send it."""
    line.sendall(REQUEST.pack(kind, part.rank, part.world_size, part.commit.attempt, part.commit.steps, size))


def read_request(line: socket.socket) -> tuple[bytes, HeldCommit, int] | None:
    """Return kind, part and size; None: the connection is at its end. Raises OSError."""
    try:
        data = read_bytes(line, REQUEST.size)
    except EOFError:
        return None
    kind, rank, world_size, attempt, steps, size = REQUEST.unpack(data)
    return kind, HeldCommit(rank=rank, world_size=world_size, commit=Commit(attempt, steps)), size


def answer(line: socket.socket, *, size: int = 0, why: str = "") -> None:
    """Answer a request. `why`: why it is refused, for a person."""
    text = why.encode()[:_MOST_TEXT]
    line.sendall(_ANSWER.pack(not why, size, len(text)) + text)


def read_answer(line: socket.socket) -> int:
    """Return the size in an answer. Raises CopyRefusedError, and OSError."""
    try:
        is_done, size, length = _ANSWER.unpack(read_bytes(line, _ANSWER.size))
        text = read_bytes(line, length)
    except EOFError:
        raise ConnectionResetError from None
    if not is_done:
        raise CopyRefusedError(printable(text.decode(errors="replace")))
    return int(size)


def read_bytes(line: socket.socket, size: int) -> bytes:
    """Return the next `size` bytes. Raises EOFError where the connection ends before, and OSError."""
    data = bytearray()
    while len(data) < size:
        more = line.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


def answer_list(line: socket.socket, parts: Collection[HeldCommit]) -> None:
    """Answer the request LIST: tell which parts of commits there are, so that the other end can fetch some."""
    answer(line, size=len(parts))
    line.sendall(
        b"".join(
            _LISTED.pack(one.rank, one.world_size, one.commit.attempt, one.commit.steps, *_described(one))
            for one in parts
        )
    )


def ask_list(address: CopyAddress, *, seconds: float) -> tuple[HeldCommit, ...]:
    """Return which parts the state keeper of a killed agent has. Raises CopyRefusedError, and OSError."""
    with connection(address, seconds=seconds) as line:
        line.sendall(REQUEST.pack(LIST, 0, 0, 0, 0, 0))
        number = read_answer(line)
        if not 0 <= number <= _MOST_LISTED:
            raise ConnectionAbortedError
        try:
            data = read_bytes(line, number * _LISTED.size)
        except EOFError:
            raise ConnectionResetError from None
    return tuple(
        HeldCommit(
            rank=rank,
            world_size=world,
            commit=Commit(attempt, steps),
            replicated=replicated,
            copied=copied,
            first_sharer=first,
            sharers=sharers,
            digest=digest,
            light=light,
        )
        for rank, world, attempt, steps, replicated, copied, first, sharers, digest, light in _LISTED.iter_unpack(data)
    )


def _described(one: HeldCommit) -> tuple[bool, bool, int, int, int, bool]:
    return one.replicated, one.copied, one.first_sharer, one.sharers, one.digest, one.light


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
    is_stopped: Callable[[], bool] = lambda: False,
    rate: float = float("inf"),
) -> None:
    """Send a part, as `part_bytes` has measured it, and the trailer. `rate`: bytes per second at most.

    Raises OSError, also where it is stopped.
    """
    checksum = send_bytes(line, fd, size, is_stopped=is_stopped, rate=rate)
    try:
        is_whole = part_bytes(fd, part) == size
    except TornError:
        is_whole = False
    line.sendall(TRAILER.pack(is_whole, checksum))


def send_bytes(line: socket.socket, fd: int, size: int, *, is_stopped: Callable[[], bool], rate: float) -> int:
    """Send the first bytes of a file, with zeros where it has become shorter. Returns their CRC-32.

    `rate`: bytes per second at most. Raises OSError, also where it is stopped.
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
    return checksum


def receive_part(line: socket.socket, file: MemoryFile, part: HeldCommit, size: int) -> None:
    """Receive a part into a file, and seal it. Raises OSError, and TornError where it is not whole."""
    top = bytearray(HEADER_BYTES)
    with mmap.mmap(file.fd, size) as memory, memoryview(memory) as view, memoryview(top) as header_view:
        checksum = _receive_into(line, header_view, 0)
        with view[HEADER_BYTES:size] as body:
            checksum = _receive_into(line, body, checksum)
    try:
        is_whole, expected = TRAILER.unpack(read_bytes(line, TRAILER.size))
    except EOFError:
        raise ConnectionResetError from None
    if not is_whole or expected != checksum:
        msg = "the part was overwritten while it was copied" if not is_whole else "the checksum of the part is wrong"
        raise TornError(msg)
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


def _receive_into(line: socket.socket, view: memoryview, checksum: int) -> int:
    start = 0
    while start < len(view):
        with view[start : start + _CHUNK] as chunk:
            got = line.recv_into(chunk)
            if not got:
                raise ConnectionResetError
            checksum = zlib.crc32(chunk[:got], checksum)
        start += got
    return checksum
