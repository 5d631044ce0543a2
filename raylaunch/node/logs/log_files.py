"""The log files of the workers in a run folder, as `raylaunch logs` reads them: which there are, and parts of them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from raylaunch.core.record.run_layout import LAYOUTS, LOGS, TIMES
from raylaunch.node.logs.log_times import LogTimes
from raylaunch.worker.runtime.process_setup import without_waiting

BLOCK_BYTES = 64 * 1024
_RANK = re.compile(r"(\d{1,9})$")
_FEWEST_BYTES_OF_LINES = 8 * 1024
_MOST_TAIL_BYTES = 64 * 1024 * 1024
"""So much is read at most to find where the last lines of a file begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """Asks which log files of an attempt there are."""

    attempt: int
    streams: tuple[str, ...]
    """Of `stdout` and `stderr`."""
    ranks: tuple[tuple[int, int], ...] | None = None
    """First and last ranks; None: all."""
    lines: int | None = None
    """So many last lines of each file; None: all."""
    since: float | None = None
    """Only lines that were written at this time of day, in seconds since 1970, or later; None: all."""

    def names(self, rank: int) -> bool:
        """Whether it asks for this rank."""
        return self.ranks is None or any(first <= rank <= last for first, last in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSpan:
    """A part of one log file: bytes from `start` to before `end`."""

    rank: int
    stream: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRead:
    """Asks for parts of the log files of an attempt."""

    attempt: int
    spans: tuple[LogSpan, ...]
    """Of `BLOCK_BYTES` in all."""
    times: bool = False
    """Whether it also asks when they were written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBlock:
    """What a log file has from `start` on. Bytes are as the worker wrote them."""

    rank: int
    stream: str
    start: int
    data: bytes
    times: tuple[tuple[int, float], ...] = ()
    """Up to which byte of the file all had been written at which time of day, in seconds since 1970."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogAnswer:
    """What a node answers to a `LogQuery`, or to a `LogRead`."""

    spans: tuple[LogSpan, ...] = ()
    blocks: tuple[LogBlock, ...] = ()


def answer(folder: str, layout: str, asked: LogQuery | LogRead) -> LogAnswer:
    """Return what a run folder has."""
    if isinstance(asked, LogQuery):
        return LogAnswer(spans=tuple(spans(folder, layout, asked)))
    found = blocks(folder, layout, asked.attempt, asked.spans, times=asked.times)
    return LogAnswer(blocks=tuple(found))


def spans(folder: str, layout: str, query: LogQuery) -> list[LogSpan]:
    """Return the files that there are, by rank, stdout before stderr; each up to its present end."""
    names = LAYOUTS[layout]
    found = []
    for rank in sorted(filter(query.names, _ranks(Path(names.attempt_dir(folder, query.attempt))))):
        directory = Path(names.rank_dir(folder, query.attempt, rank))
        for stream in (stream for stream in LOGS if stream in query.streams):
            with contextlib.suppress(OSError):
                start, end = _ends(directory / LOGS[stream], query.lines)
                if query.since is not None:
                    start = min(end, max(start, _start_since(directory, stream, query.since)))
                found.append(LogSpan(rank=rank, stream=stream, start=start, end=end))
    return found


def blocks(
    folder: str, layout: str, attempt: int, wanted: Sequence[LogSpan], *, times: bool = False
) -> Iterator[LogBlock]:
    """Yield what the files have in these spans, in order. A file that is gone has nothing."""
    for span in wanted:
        directory = Path(LAYOUTS[layout].rank_dir(folder, attempt, span.rank))
        with contextlib.suppress(OSError), open(directory / LOGS[span.stream], "rb", opener=without_waiting) as file:
            position = file.seek(span.start)
            while data := file.read(min(BLOCK_BYTES, max(0, span.end - position))):
                end = position + len(data)
                found = _times(directory, span.stream, file, position, end) if times else ()
                yield LogBlock(rank=span.rank, stream=span.stream, start=position, data=data, times=found)
                position = end


def _times(directory: Path, stream: str, log: BinaryIO, start: int, end: int) -> tuple[tuple[int, float], ...]:
    with contextlib.closing(LogTimes(str(directory / TIMES[stream]), log.fileno())) as found:
        return tuple(found.between(start, end))


def _start_since(directory: Path, stream: str, since: float) -> int:
    """Return where the lines begin that were written since. Raises OSError."""
    with (
        open(directory / LOGS[stream], "rb", opener=without_waiting) as log,
        contextlib.closing(LogTimes(str(directory / TIMES[stream]), log.fileno())) as found,
    ):
        return found.start_since(since)


def _ends(path: Path, lines: int | None) -> tuple[int, int]:
    """Return where the last lines of a file begin, and where it ends now. Raises OSError."""
    if lines is None:
        return 0, path.stat().st_size
    with open(path, "rb", opener=without_waiting) as file:
        return _start_of_last(file, lines)


def _start_of_last(file: BinaryIO, lines: int) -> tuple[int, int]:
    """Return where the last `lines` lines begin, and the end. A last line without an end counts too."""
    end = position = file.seek(0, os.SEEK_END)
    size, tail = _FEWEST_BYTES_OF_LINES, b""
    # The first may be half a line, or half of a `\r\n`.
    while position > 0 and len(tail) < _MOST_TAIL_BYTES and len(tail.splitlines()) <= lines + 1:
        position, size = max(0, end - size), size * 2
        file.seek(position)
        tail = file.read(end - position)
    return end - sum(map(len, tail.splitlines(keepends=True)[-lines:] if lines else ())), end


def _ranks(directory: Path) -> Iterator[int]:
    """Yield the ranks whose folders are in the folder of an attempt."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if found := _RANK.search(name):
                yield int(found[1])
