"""Following log files as they grow, to show them elsewhere. Workers write them directly and never wait for us."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from raylaunch.core.contract import FILTERED, LOGS, Layout
from raylaunch.core.ranks import Assignment
from raylaunch.core.streams import STREAMS, View
from raylaunch.node import spool
from raylaunch.node.growth import Growth
from raylaunch.node.lines import Filter, Lines

_CHUNK = 256 * 1024
_MOST_AT_THE_END = 128 * 1024 * 1024
"""Bytes: where the logs of an ended attempt are further ahead than this, only their ends are shown; that is said."""
_QUIET_SECONDS = 1.0
_FORGOTTEN_AT_ONCE = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Some bytes to show, whole lines where possible."""

    rank: int
    stream: str
    """`stdout` or `stderr`."""
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One log file, and what is to be done with it."""

    attempt: int
    rank: int
    stream: str
    path: str
    header: bytes | None
    """What is put before each line; None: it is not shown."""
    alone: bool = False
    """No other rank is shown, so that text without a line end may be, after a while: a prompt, a row of dots."""
    filter: Filter | None = None
    kept: bool = True
    """False: what was read is given back to the disk."""


def sources(view: View, part: Assignment, layout: Layout, run_dir: str, *, kept: bool) -> list[Source]:
    """The logs of a node's part of an attempt that somebody wants to read: the terminal, a filter, or the disk."""
    found = []
    for local_rank, rank in enumerate(part.ranks):
        for stream in STREAMS:
            header = view.header(stream, rank, local_rank, part.world_size)
            needles = view.needles(stream, local_rank) if kept else ()
            if header is None and not needles and kept:
                continue
            path = layout.attempt_dir(run_dir, part.attempt) / FILTERED[stream]
            prefix = _encoded(view.tee_header(rank, local_rank))
            copies = Filter(tuple(map(_encoded, needles)), prefix, str(path)) if needles else None
            found.append(
                Source(
                    attempt=part.attempt,
                    rank=rank,
                    stream=stream,
                    path=str(layout.rank_dir(run_dir, part.attempt, rank) / LOGS[stream]),
                    header=None if header is None else _encoded(header),
                    alone=view.shows_one(part.world_size),
                    filter=copies,
                    kept=kept,
                )
            )
    return found


def _encoded(text: str) -> bytes:
    """As it was on the command line, whatever bytes those were."""
    return text.encode(errors="surrogateescape")


@dataclass(slots=True)
class _Tail:
    source: Source
    lines: Lines
    fd: int = -1
    offset: int = 0
    forgotten: int = 0
    #: Where it ends, once its attempt has ended. What grandchildren write later is in the file alone.
    end: int | None = None
    #: Up to here it is read for the filter alone.
    muted: int = 0
    grew_at: float = 0.0


class Tails:
    """Log files of workers on this node, over all attempts. Each is opened once and closed at its attempt's end."""

    def __init__(self) -> None:
        self._tails: list[_Tail] = []
        self.growth = Growth()
        #: Bytes that were found by the last `read`, shown or not.
        self.found = 0
        #: What is to be shown beside what is read.
        self._notices: list[Output] = []

    def add(self, sources: Iterable[Source]) -> None:
        """Follow these too; the files may come later."""
        self._tails += [_Tail(source, Lines(source.header, source.filter)) for source in sources]

    def end(self, attempt: int) -> None:
        """Nothing more of this attempt and those before it is to come. `read` goes on until it has all of them."""
        ending = [tail for tail in self._tails if tail.source.attempt <= attempt and tail.end is None]
        for tail in ending:
            tail.end = _size(tail)
        ahead = [tail for tail in ending if tail.source.header is not None and tail.end]
        if sum(tail.end - tail.offset for tail in ahead if tail.end) > _MOST_AT_THE_END:
            for tail in ahead:
                self._skip(tail, _MOST_AT_THE_END // len(ahead))

    @property
    def behind(self) -> bool:
        """Whether something of an ended attempt is still to be read."""
        return bool(self._notices) or any(tail.end is not None for tail in self._tails)

    def watch(self) -> bool:
        """Have `growth` tell of what is written from here on. False: it cannot, of all; look at them now and then."""
        return all(tail.fd >= 0 for tail in self._tails) and self.growth.watch(tail.fd for tail in self._tails)

    @property
    def patience(self) -> float | None:
        """Seconds after which to look though nothing is written; None: there is no need."""
        prompts = any(tail.source.alone and tail.lines.holds for tail in self._tails)
        return _QUIET_SECONDS if prompts else None

    def read(self, most: int) -> list[Output]:
        """What was written since the last time, about `most` bytes at most; of an attempt only after those before."""
        found, self._notices = self._notices, []
        self.found = 0
        for attempt in sorted({tail.source.attempt for tail in self._tails}):
            turn = [tail for tail in self._tails if tail.source.attempt == attempt]
            while turn and most > 0:
                grown = []
                for tail in turn:
                    data = _grown(tail)
                    most -= len(data)
                    self.found += len(data)
                    found += _shown(tail, data)
                    if data:
                        grown.append(tail)
                    elif tail.end is not None:
                        found += self._close(tail)
                turn = grown
        return found

    def close(self) -> None:
        """Let go of all files."""
        for tail in self._tails:
            _close(tail)
        self._tails.clear()
        self.growth.close()

    def _close(self, tail: _Tail) -> list[Output]:
        found = _output(tail, tail.lines.finish())
        self._tails.remove(tail)
        _close(tail)
        return found

    def _skip(self, tail: _Tail, most: int) -> None:
        """Go on with the last part of a log that is far ahead."""
        start = max(tail.offset, (tail.end or 0) - most)
        skipped = start - tail.offset
        if not skipped:
            return
        if tail.source.filter is None:
            tail.offset = start
            self._notices += _output(tail, tail.lines.finish())
            tail.lines = Lines(tail.source.header)
        tail.muted = start
        where = f"; all of it is in {tail.source.path}" if tail.source.kept else ""
        notice = f"raylaunch: {skipped} bytes of rank {tail.source.rank}'s {tail.source.stream} are not shown{where}\n"
        self._notices.append(Output(rank=tail.source.rank, stream="stderr", data=notice.encode()))


def _size(tail: _Tail) -> int:
    try:
        return (os.fstat(tail.fd) if tail.fd >= 0 else os.stat(tail.source.path)).st_size
    except OSError:
        return 0


def _grown(tail: _Tail) -> bytes:
    """The next bytes; none where it has not grown."""
    if tail.fd < 0:
        try:
            tail.fd = os.open(tail.source.path, os.O_RDWR if not tail.source.kept else os.O_RDONLY)
        except OSError:
            return b""  # not there yet
    most = _CHUNK if tail.end is None else min(_CHUNK, tail.end - tail.offset)
    try:
        data = os.pread(tail.fd, max(0, most), tail.offset)
        if not data and tail.offset > os.fstat(tail.fd).st_size:
            tail.offset = tail.forgotten = 0  # the script has truncated it
            data = os.pread(tail.fd, _CHUNK, 0)
    except OSError:
        return b""
    tail.offset += len(data)
    if not tail.source.kept and tail.offset - tail.forgotten > _FORGOTTEN_AT_ONCE:
        spool.forget(tail.fd, tail.offset)
        tail.forgotten = tail.offset
    return data


def _shown(tail: _Tail, data: bytes) -> list[Output]:
    if data:
        tail.grew_at = time.monotonic()
        return _output(tail, tail.lines.add(data), before=tail.offset <= tail.muted)
    if tail.source.alone and time.monotonic() - tail.grew_at >= _QUIET_SECONDS:
        return _output(tail, tail.lines.so_far())
    return []


def _output(tail: _Tail, data: bytes, *, before: bool = False) -> list[Output]:
    if not data or before:
        return []
    return [Output(rank=tail.source.rank, stream=tail.source.stream, data=data)]


def _close(tail: _Tail) -> None:
    if tail.fd >= 0:
        with contextlib.suppress(OSError):
            os.close(tail.fd)
    if tail.source.filter is not None:
        tail.source.filter.close()
