"""`raylaunch logs`: what the workers of a run have written, from files in its run folder or through its driver.

Lines are not sorted by time: all lines of rank 0 come first, then all lines of rank 1. While a run is followed, lines
come as the files grow. The bytes of the workers are passed on as they are, as a run itself does.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path

from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.cluster.local.file_writer import own_folder, replacing
from raylaunch.core.record.run_layout import LOGS, RunLayout
from raylaunch.node.logs.log_files import LogBlock, LogQuery, LogSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChoice:
    """Which lines are shown, and how."""

    streams: Collection[str]
    """Of `stdout` and `stderr`."""
    ranks: tuple[range, ...] | None
    """None: all."""
    lines: int | None
    """How many of the last lines of each file; None: all."""
    pattern: re.Pattern[bytes] | None = None
    """Only lines in which it is found; None: all."""
    is_prefixed: bool = True
    """Whether each line begins with its rank, if the attempt has several and more than one of them is shown."""
    has_times: bool = False
    """Whether the time follows, at which it was written."""
    is_json: bool = False
    """Whether each line is a JSON object instead."""
    node: str = ""
    """Only files of this node; `""`: of all."""
    since: float | None = None
    """Only lines that were written at this time of day, in seconds since 1970, or later; None: all."""

    @property
    def needs_times(self) -> bool:
        """Whether lines are shown with the time at which they were written."""
        return self.has_times or self.is_json

    def query(self, attempt: int, lines: int | None = None) -> LogQuery:
        """Return what is asked of the files of an attempt: all of their bytes, or their last lines."""
        ranks = None if self.ranks is None else tuple((some.start, some.stop - 1) for some in self.ranks)
        return LogQuery(attempt=attempt, streams=tuple(self.streams), ranks=ranks, lines=lines)

    def prefix(self, rank: int, world_size: int) -> bytes:
        """Return what each line of a rank begins with: as in the output of a run."""
        is_alone = world_size == 1 or (self.ranks is not None and sum(map(len, self.ranks)) == 1)
        return b"" if is_alone or not self.is_prefixed else f"[{rank}] ".encode()


class WorkerLog:
    """One file: a stream of one rank in one attempt."""

    def __init__(self, choice: LogChoice, attempt: int, span: LogSpan, world_size: int) -> None:
        #: Where the next bytes that it takes are.
        self.offset = span.start
        self._choice = choice
        self._facts: dict[str, object] = {"attempt": attempt, "rank": span.rank, "stream": span.stream}
        self._prefix = choice.prefix(span.rank, world_size)
        #: The beginning of a line whose end has not been written.
        self._pending = b""
        #: Up to which byte all had been written at which time.
        self._times: deque[tuple[int, float]] = deque()

    def take(self, block: LogBlock) -> Iterator[bytes]:
        """Yield the lines that these next bytes complete."""
        self._times += block.times
        end = self.offset - len(self._pending)
        self.offset += len(block.data)
        lines = (self._pending + block.data).splitlines(keepends=True)
        self._pending = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        for line in lines:
            end += len(line)
            if self._is_shown(line):
                yield self._shown(line, end)

    def lines(self, blocks: Iterable[LogBlock], *, whole: bool) -> Iterator[bytes]:
        """Yield the lines of these next blocks. `whole`: also the last one without its end."""
        for block in blocks:
            yield from self.take(block)
        if whole and (rest := self.rest()):
            yield rest

    def rest(self) -> bytes:
        """Return the last line if it has no end."""
        pending, self._pending = self._pending, b""
        return self._shown(pending + b"\n", self.offset) if pending and self._is_shown(pending) else b""

    def _is_shown(self, line: bytes) -> bool:
        return self._choice.pattern is None or self._choice.pattern.search(line) is not None

    def _shown(self, line: bytes, end: int) -> bytes:
        """Return a line as it is shown. `end`: its position in the file."""
        if self._choice.is_json:
            text = line.decode(errors="replace").rstrip("\r\n")
            return json.dumps({**self._facts, "time": self._time(end) or None, "line": text}).encode() + b"\n"
        time = f"{self._time(end) or '-'} ".encode() if self._choice.has_times else b""
        return self._prefix + time + line

    def _time(self, end: int) -> str:
        """Return when the bytes before this position had been written, in ISO 8601; "" if that is not known."""
        while self._times and self._times[0][0] < end:
            self._times.popleft()
        with contextlib.suppress(IndexError, ValueError, OverflowError, OSError):  # no time that a clock has
            found = datetime.fromtimestamp(self._times[0][1], timezone.utc)
            return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return ""


class AttemptLogs:
    """The files of one attempt."""

    def __init__(self, reader: RunReader, choice: LogChoice, attempt: int, world_size: int) -> None:
        self._reader = reader
        self._choice = choice
        self._attempt = attempt
        self._world_size = world_size
        #: By rank and stream.
        self._logs: dict[tuple[int, str], WorkerLog] = {}
        #: The nodes that did not answer the last time.
        self.missing: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether no file was found yet."""
        return not self._logs

    def last(self, *, whole: bool) -> Iterator[bytes]:
        """Yield the chosen last lines of each file so far. Without a pattern, the others are not read.

        `whole`: also those without an end, since nothing more will be read.
        """
        lines = self._choice.lines
        query = self._choice.query(self._attempt, lines if self._choice.pattern is None else None)
        spans = self._listed(replace(query, since=self._choice.since))
        for span in spans:
            self._logs[span.rank, span.stream] = self._log(span)
        for key, blocks in groupby(self._blocks(spans), _key):
            yield from deque(self._logs[key].lines(blocks, whole=whole), maxlen=lines)

    def more(self) -> Iterator[bytes]:
        """Yield the whole lines that were written since."""
        grown = []
        for span in self._listed(self._choice.query(self._attempt)):
            log = self._logs.setdefault((span.rank, span.stream), self._log(span))
            if log.offset < span.end:
                grown.append(LogSpan(rank=span.rank, stream=span.stream, start=log.offset, end=span.end))
        for block in self._blocks(grown) if grown else ():
            yield from self._logs[_key(block)].take(block)

    def copy(self, folder: Path, layout: RunLayout) -> int:
        """Copy the chosen files whole to a folder, where they have the same names. Return how many. Raises OSError.

        As the run folder, the copies can be read by the user only.
        """
        spans = self._listed(self._choice.query(self._attempt))
        for key, blocks in groupby(self._reader.log_blocks(self._attempt, spans), _key):
            rank, stream = key
            inner = layout.rank_dir("", self._attempt, rank).parts
            with own_folder(folder, *inner) as opened, replacing(LOGS[stream], opened) as file:
                file.writelines(block.data for block in blocks)
        return sum(span.end > 0 for span in spans)

    def rest(self) -> Iterator[bytes]:
        """Yield last lines that have no end."""
        yield from (log.rest() for log in self._logs.values())

    def _listed(self, query: LogQuery) -> tuple[LogSpan, ...]:
        listed = self._reader.log_spans(query, self._choice.node)
        self.missing = listed.missing
        return listed.spans

    def _blocks(self, spans: Sequence[LogSpan]) -> Iterator[LogBlock]:
        return self._reader.log_blocks(self._attempt, spans, times=self._choice.needs_times)

    def _log(self, span: LogSpan) -> WorkerLog:
        return WorkerLog(self._choice, self._attempt, span, self._world_size)


def _key(block: LogBlock) -> tuple[int, str]:
    return block.rank, block.stream
