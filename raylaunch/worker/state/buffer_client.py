"""How a worker gets its buffers from the agent of its node: a request and an answer over a Unix socket, in JSON."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

from raylaunch.worker.state.commit_buffer import CommitBuffer

ADDRESS_VARIABLE = "RAYLAUNCH_STATE"
"""In a worker's environment: the abstract name of the agent's socket (unix(7)), without its first byte."""
MESSAGE_BYTES = 1 << 18
"""More than the kernel lets pass."""
NO_PART = -1
"""In a request: that for a buffer."""
WHOLE_PART = -2
"""In a request: that for a part that has all tensors that are equal on all ranks."""
_SECONDS = 60.0
"""How long the agent may take to answer. It only makes a file; but its machine may be busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A worker asks for one of its buffers, for a part of the commit to restore, or for what the node holds."""

    attempt: int
    rank: int
    index: int
    """As in `commit_buffer`: 0 or 1, 2 for the one that is written to disk, and so on."""
    bytes: int = 0
    """How large it must be at least; 0: as it is, if it exists."""
    node_bytes: int = 0
    """What all buffers of the node will need, if all its workers need as much as this one."""
    part: int = NO_PART
    """The rank that has written the part to read, in the world of the commit to restore, or WHOLE_PART; then `index` is
    not used.
    """
    folder: str = ""
    """Where the node is to write checkpoints; "": nowhere."""
    keep: int = 0
    """How many checkpoints stay in that folder."""
    write: bool = False
    """The buffer is sealed, and to be written to disk as soon as the buffers of the node's ranks all are."""
    asks_held: bool = False
    """For what the node holds, and lost ones, which is the note: `Holder`s as JSON, or "", if that may change."""
    order: str = ""
    """What the node's ranks restore, a `RestoreOrder` as JSON; "": it asks for something."""


def ask(request: Request) -> tuple[int | None, str]:
    """Return the descriptor of the buffer, None if it does not exist, and a note for a person, `""` for none.

    For a part, it is the descriptor of the buffer that has it, or of a copy, and None if the node does not have it.
    It is only to be read: it may be another rank's.

    Raises MemoryError where the node may not use so much, and OSError where the agent cannot be reached.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(_SECONDS)
        sock.connect("\0" + os.environ.get(ADDRESS_VARIABLE, ""))
        sock.send(json.dumps(asdict(request)).encode())
        data, fds, _, _ = socket.recv_fds(sock, MESSAGE_BYTES, 1)
    if not data:
        msg = "the agent does not know this worker"
        raise ConnectionError(msg)
    answer = json.loads(data)
    if answer["error"]:
        raise MemoryError(answer["error"])
    return (fds[0] if fds else None), answer["note"]


_mapped: dict[tuple[int, int], CommitBuffer] = {}
"""What is mapped, by inode and size of the file. It stays so until the process ends: a survivor uses it again."""


def mapped(fd: int) -> CommitBuffer:
    """Map a buffer, unless it is, and close the descriptor. Raises OSError."""
    found = os.fstat(fd)
    key = found.st_ino, found.st_size
    if key in _mapped:
        os.close(fd)
    else:
        _mapped[key] = CommitBuffer(fd)
    return _mapped[key]


class BufferClient:
    """Gets buffers for a rank in an attempt, and maps them. Raises OSError where the agent cannot be reached."""

    def __init__(
        self,
        attempt: int,
        rank: int,
        ask: Callable[[Request], tuple[int | None, str]] = ask,
        *,
        folder: str = "",
        keep: int = 0,
    ) -> None:
        """`ask`: does what the function of this name does. `folder` and `keep`: as in requests."""
        self._attempt = attempt
        self._rank = rank
        self._ask = ask
        self._folder = folder
        self._keep = keep
        self._notes: set[str] = set()

    def buffer(self, index: int, size: int = 0, node_bytes: int = 0, *, write: bool = False) -> CommitBuffer | None:
        """Return a buffer, as it is, or with `size` bytes at least; None: it does not exist, and no size is given.

        `node_bytes` and `write`: as in a request. Raises MemoryError where the node does not have so much memory.
        """
        fd, note = self._ask(
            Request(
                attempt=self._attempt,
                rank=self._rank,
                index=index,
                bytes=size,
                node_bytes=node_bytes,
                folder=self._folder,
                keep=self._keep,
                write=write,
            )
        )
        self.say(note)
        return mapped(fd) if fd is not None else None

    def part(self, rank: int) -> CommitBuffer | None:
        """Return the part of the commit to restore that a rank has written; None: the node does not have it.

        `rank`: may be WHOLE_PART. Nothing may be written into the part, since it may be memory of another rank.
        """
        fd, _ = self._ask(Request(attempt=self._attempt, rank=self._rank, index=0, part=rank))
        return mapped(fd) if fd is not None else None

    def say(self, note: str) -> None:
        """Print a note on memory for a person, once; "": there is none."""
        if note and note not in self._notes:
            self._notes.add(note)
            print(f"raylaunch: {note}", file=sys.stderr, flush=True)
