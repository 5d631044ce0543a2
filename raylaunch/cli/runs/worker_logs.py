"""`raylaunch logs`: what the workers of a run have written, from files in its run folder or through its driver.

The files have no times, so ranks are interleaved by file: first all lines of rank 0, then those of rank 1. Following a
run, lines come as the files grow. The bytes of the workers are passed on as they are, as a run itself does.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from raylaunch.cli.runs.run_reader import RunReader
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
    """So many last lines of each file; None: all."""
    pattern: re.Pattern[bytes] | None
    """Only lines in which it is found."""
    is_prefixed: bool
    """Whether each line begins with its rank, if the attempt has several and more than one of them is shown."""
    node: str = ""
    """Only files of this node; `""`: of all."""

    def query(self, attempt: int, lines: int | None = None) -> LogQuery:
        """Return what is asked of the files of an attempt."""
        ranks = None if self.ranks is None else tuple((some.start, some.stop - 1) for some in self.ranks)
        return LogQuery(attempt=attempt, streams=tuple(self.streams), ranks=ranks, lines=lines)

    def prefix(self, rank: int, world_size: int) -> bytes:
        """Return what each line of a rank begins with: as in the output of a run."""
        is_alone = world_size == 1 or (self.ranks is not None and sum(map(len, self.ranks)) == 1)
        return b"" if is_alone or not self.is_prefixed else f"[{rank}] ".encode()


class WorkerLog:
    """One file: a stream of one rank in one attempt."""

    def __init__(self, prefix: bytes, pattern: re.Pattern[bytes] | None, offset: int = 0) -> None:
        """`offset`: where the first bytes that it takes are."""
        self.offset = offset
        self._prefix = prefix
        self._pattern = pattern
        #: The beginning of a line whose end has not been written.
        self._pending = b""

    def take(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that these next bytes complete."""
        self.offset += len(data)
        lines = (self._pending + data).splitlines(keepends=True)
        self._pending = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        yield from (self._prefix + line for line in lines if self._is_shown(line))

    def lines(self, blocks: Iterable[LogBlock], *, whole: bool) -> Iterator[bytes]:
        """Yield the lines of these next blocks. `whole`: also the last one without its end."""
        for block in blocks:
            yield from self.take(block.data)
        if whole and (rest := self.rest()):
            yield rest

    def rest(self) -> bytes:
        """Return the last line if it has no end."""
        pending, self._pending = self._pending, b""
        return self._prefix + pending + b"\n" if pending and self._is_shown(pending) else b""

    def _is_shown(self, line: bytes) -> bool:
        return self._pattern is None or self._pattern.search(line) is not None


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
        spans = self._listed(lines if self._choice.pattern is None else None)
        for span in spans:
            self._logs[span.rank, span.stream] = self._log(span.rank, span.start)
        for key, blocks in groupby(self._reader.log_blocks(self._attempt, spans), _key):
            yield from deque(self._logs[key].lines(blocks, whole=whole), maxlen=lines)

    def more(self) -> Iterator[bytes]:
        """Yield the whole lines that were written since."""
        grown = []
        for span in self._listed():
            log = self._logs.setdefault((span.rank, span.stream), self._log(span.rank, 0))
            if log.offset < span.end:
                grown.append(LogSpan(rank=span.rank, stream=span.stream, start=log.offset, end=span.end))
        for block in self._reader.log_blocks(self._attempt, grown) if grown else ():
            yield from self._logs[_key(block)].take(block.data)

    def copy(self, folder: Path, layout: RunLayout) -> int:
        """Copy the chosen files whole to a folder, where they have the same names. Return how many. Raises OSError."""
        spans = self._listed()
        for key, blocks in groupby(self._reader.log_blocks(self._attempt, spans), _key):
            rank, stream = key
            path = Path(layout.rank_dir(str(folder), self._attempt, rank)) / LOGS[stream]
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.writelines(block.data for block in blocks)
        return sum(span.end > 0 for span in spans)

    def rest(self) -> Iterator[bytes]:
        """Yield last lines that have no end."""
        yield from (log.rest() for log in self._logs.values())

    def _listed(self, lines: int | None = None) -> tuple[LogSpan, ...]:
        listed = self._reader.log_spans(self._choice.query(self._attempt, lines), self._choice.node)
        self.missing = listed.missing
        return listed.spans

    def _log(self, rank: int, offset: int) -> WorkerLog:
        return WorkerLog(self._choice.prefix(rank, self._world_size), self._choice.pattern, offset)


def _key(block: LogBlock) -> tuple[int, str]:
    return block.rank, block.stream
