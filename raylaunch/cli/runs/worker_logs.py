"""`raylaunch logs`: what the workers of a run have written, from the files in its run folder.

The files have no times, so ranks are interleaved by file: first all lines of rank 0, then those of rank 1. Following a
run, lines come as the files grow. The bytes of the workers are passed on as they are, as a run itself does.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from raylaunch.core.record.run_layout import LAYOUTS, LOGS

BLOCK_BYTES = 64 * 1024
_RANK = re.compile(r"(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChoice:
    """Which lines are shown, and how."""

    streams: Collection[str]
    """Of `stdout` and `stderr`."""
    ranks: tuple[range, ...] | None
    """None: all."""
    lines: int | None
    """So many last lines of each file; None: all."""
    pattern: re.Pattern[bytes] | None
    """Only lines in which it is found."""
    is_prefixed: bool
    """Whether each line begins with its rank, if the attempt has several and more than one of them is shown."""

    def names(self, rank: int) -> bool:
        """Whether it has this rank."""
        return self.ranks is None or any(rank in some for some in self.ranks)

    def prefix(self, rank: int, world_size: int) -> bytes:
        """Return what each line of a rank begins with: as in the output of a run."""
        is_alone = world_size == 1 or (self.ranks is not None and sum(map(len, self.ranks)) == 1)
        return b"" if is_alone or not self.is_prefixed else f"[{rank}] ".encode()


class WorkerLog:
    """One file: a stream of one rank in one attempt. It may not be there yet."""

    def __init__(self, path: Path, prefix: bytes, pattern: re.Pattern[bytes] | None) -> None:
        self.path = path
        self._prefix = prefix
        self._pattern = pattern
        self._offset = 0
        #: The beginning of a line whose end has not been written.
        self._pending = b""

    def last(self, lines: int | None) -> Iterator[bytes]:
        """Return the last lines so far, with their prefixes. Without a pattern, the others are not read."""
        if lines is not None and self._pattern is None:
            with contextlib.suppress(OSError), self.path.open("rb") as file:
                self._offset = _start_of_last(file, lines)
        return iter(deque(self.more(), maxlen=lines))

    def more(self) -> Iterator[bytes]:
        """Yield the whole lines that were written since."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(self._offset)
            while data := file.read(BLOCK_BYTES):
                self._offset += len(data)
                lines = (self._pending + data).splitlines(keepends=True)
                self._pending = b"" if lines[-1].endswith(b"\n") else lines.pop()
                yield from (self._prefix + line for line in lines if self._is_shown(line))

    def rest(self) -> bytes:
        """Return the last line if it has no end."""
        pending, self._pending = self._pending, b""
        return self._prefix + pending + b"\n" if pending and self._is_shown(pending) else b""

    def _is_shown(self, line: bytes) -> bool:
        return self._pattern is None or self._pattern.search(line) is not None


def _start_of_last(file: BinaryIO, lines: int) -> int:
    """Return where so many last lines begin. A last line without an end counts too."""
    end = position = file.seek(0, os.SEEK_END)
    size, tail = BLOCK_BYTES, b""
    while position > 0 and len(tail.splitlines()) <= lines + 1:  # the first may be half a line, or half of a `\r\n`
        position, size = max(0, end - size), size * 2
        file.seek(position)
        tail = file.read(end - position)
    return end - sum(map(len, tail.splitlines(keepends=True)[-lines:] if lines else ()))


def logs(folder: Path, layout: str, attempt: int, choice: LogChoice, world_size: int) -> list[WorkerLog]:
    """Return the files of an attempt that are there, by rank, stdout before stderr."""
    names = LAYOUTS[layout]
    ranks = sorted(filter(choice.names, _ranks(Path(names.attempt_dir(str(folder), attempt)))))
    return [
        WorkerLog(
            Path(names.rank_dir(str(folder), attempt, rank)) / LOGS[stream],
            choice.prefix(rank, world_size),
            choice.pattern,
        )
        for rank in ranks
        for stream in LOGS
        if stream in choice.streams
    ]


def _ranks(directory: Path) -> Iterator[int]:
    """Yield the ranks whose folders are in the folder of an attempt."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if found := _RANK.search(name):
                yield int(found[1])
