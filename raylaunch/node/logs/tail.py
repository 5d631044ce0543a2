"""Follows the workers' log files and returns what is to be shown of them.

Workers write the files themselves and never wait for the reader.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass

from raylaunch.core.job.outputs import STREAMS, OutputView
from raylaunch.core.placement.environment import Assignment
from raylaunch.core.record.run_layout import FILTERED, LOGS, TIMES, RunLayout
from raylaunch.core.text import printable
from raylaunch.node.linux import scratch
from raylaunch.node.linux.inotify import Inotify
from raylaunch.node.logs.log_times import TimesWriter
from raylaunch.worker.heartbeats.shared_page import MAX_WORKERS, SharedPage
from raylaunch.worker.runtime import process_setup
from raylaunch.worker.runtime.output_order import OutputOrder
from raylaunch.worker.runtime.process_setup import without_waiting

CHUNK_BYTES = 256 * 1024
"""How much is read of one file before the next file has its turn."""
_MOST_READS = 256
"""How many pieces one call reads. Workers that write to both of their files in turn make thousands of small ones, and
an agent that read all of them at once would be silent for as long as a lost one."""
MAX_BACKLOG_BYTES = 128 * 1024 * 1024
"""If more than this is unread when an attempt ends, only the ends of its logs are shown, with a notice."""

PROMPT_SECONDS = 1.0
"""After how long without a write an incomplete line is shown: a prompt, or a row of dots."""
_DISCARD_BYTES = 1024 * 1024
"""How much is read of a file that is not kept before its disk space is freed."""
_MAX_LINE_BYTES = 1024 * 1024
"""A longer line is passed on in parts."""

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+\Z")
_LINE_START = re.compile(rb"(?<=\n)(?!\Z)|(?<=\r)(?!\n|\Z)")
"""The start of each line of a text except the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOutput:
    """Bytes of one rank to show: complete lines where possible."""

    rank: int
    stream: str
    """`stdout` or `stderr`."""
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """One log file, and what is done with its content."""

    attempt: int
    rank: int
    stream: str
    """`stdout` or `stderr`."""
    path: str
    prefix: bytes | None
    """What is put before each line; None: the file is not shown."""
    only_rank: bool = False
    """Whether no other rank is shown, so that an incomplete line may be shown too."""
    line_filter: LineFilter | None = None
    """Copies some of the lines to another file."""
    kept: bool = True
    """Whether the file is to stay. If not, the disk space of what was read is freed."""
    order: OutputOrder | None = None
    """The order in which it grows with the worker's other file; None: not known."""
    times: str = ""
    """The path of the file that gets the times at which this one grew; "": there is none."""

    @property
    def is_read(self) -> bool:
        """Whether the content is needed, and not only the times."""
        return self.prefix is not None or self.line_filter is not None or not self.kept


def log_sources(
    view: OutputView,
    assignment: Assignment,
    layout: RunLayout,
    run_dir: str,
    *,
    kept: bool,
    page: SharedPage | None = None,
) -> list[LogSource]:
    """Return the log files of a node's ranks in one attempt, and what is done with them."""
    found, hostname = [], socket.gethostname()
    for local_rank, rank in enumerate(assignment.ranks):
        order = None
        if page is not None and local_rank < MAX_WORKERS:
            order = OutputOrder(page, assignment.attempt, local_rank)
        for stream in STREAMS:
            prefix = view.header(stream, rank, local_rank, assignment.world_size, hostname)
            needles = view.needles(stream, local_rank) if kept else ()
            path = layout.attempt_dir(run_dir, assignment.attempt) / FILTERED[stream]
            tee_prefix = _encoded(view.tee_header(rank, local_rank, hostname))
            line_filter = LineFilter(tuple(map(_encoded, needles)), tee_prefix, str(path)) if needles else None
            folder = layout.rank_dir(run_dir, assignment.attempt, rank)
            found.append(
                LogSource(
                    attempt=assignment.attempt,
                    rank=rank,
                    stream=stream,
                    path=str(folder / LOGS[stream]),
                    prefix=None if prefix is None else _encoded(prefix),
                    only_rank=view.shows_one(assignment.world_size),
                    line_filter=line_filter,
                    kept=kept,
                    order=order,
                    times=str(folder / TIMES[stream]) if kept else "",
                )
            )
    return found


def _encoded(text: str) -> bytes:
    """Return the bytes that stood on the command line, even if they are not UTF-8."""
    return text.encode(errors="surrogateescape")


@dataclass(slots=True, eq=False)
class _FileTail:
    """How far one file was read."""

    source: LogSource
    lines: LinePrefixer
    #: None: nobody wants to know when it grew.
    times: TimesWriter | None
    fd: int = -1
    offset: int = 0
    #: Up to where the disk space was freed.
    discarded: int = 0
    #: The file's size when its attempt ended; None before. What grandchildren write later is not shown.
    end: int | None = None
    #: Up to where the file is read for its filter only.
    hidden_until: int = 0
    #: time.monotonic() of the last read that returned something.
    grew_at: float = 0.0
    #: The file's size when the notes of its worker were read.
    size: int = 0

    @property
    def waits(self) -> bool:
        """Whether more may be read once the worker's other file was."""
        return self.source.order is not None and bool(self.source.order.points)

    @property
    def bound(self) -> int | None:
        """Up to where it may be read before the worker's other file is read further; None: to its end."""
        order = self.source.order
        if order is None:
            return None
        return order.points[0][self.source.stream == "stderr"] if order.points else self.size


class LogTailer:
    """The log files of this node's workers, over all attempts.

    Not thread-safe. Wait for `inotify` after `watch` returned True, else for `poll_interval` or some time of your own,
    and then call `read`.
    """

    def __init__(self, *, chunk: int = CHUNK_BYTES, max_backlog: int = MAX_BACKLOG_BYTES) -> None:
        self._tails: list[_FileTail] = []
        self._chunk = chunk
        self._max_backlog = max_backlog
        self.inotify = Inotify()
        #: Whether the last `read` stopped at a limit, so that there may be more.
        self.has_more = False
        #: Whether a file had grown at the last `read`, also one that is not read.
        self.has_grown = False
        #: Notices of what is not shown, for the next `read`.
        self._notices: list[LogOutput] = []

    def add(self, sources: Iterable[LogSource]) -> None:
        """Follow these files too. They need not exist yet."""
        self._tails += [
            _FileTail(
                source,
                LinePrefixer(source.prefix, source.line_filter),
                TimesWriter(source.times) if source.times else None,
            )
            for source in sources
        ]

    def end_attempt(self, attempt: int) -> None:
        """Take the files of this attempt, and of those before, as complete. `read` until `has_backlog` is False."""
        ending = [tail for tail in self._tails if tail.source.attempt <= attempt and tail.end is None]
        for tail in ending:
            tail.end = _size(tail)
        unread = [tail for tail in ending if tail.source.prefix is not None and tail.end]
        if sum(tail.end - tail.offset for tail in unread if tail.end) > self._max_backlog:
            for tail in unread:
                self._skip_to_last(tail, self._max_backlog // len(unread))

    @property
    def has_backlog(self) -> bool:
        """Whether a file of an ended attempt was not read to its end."""
        return bool(self._notices) or any(tail.end is not None for tail in self._tails)

    def watch(self) -> bool:
        """Let `inotify` become readable at the next write to a file. False: not for all, so call `read` regularly."""
        return all(tail.fd >= 0 for tail in self._tails) and self.inotify.watch(tail.fd for tail in self._tails)

    @property
    def poll_interval(self) -> float | None:
        """Seconds after which to `read` even if nothing was written, because of an incomplete line; or None."""
        prompts = any(tail.source.only_rank and tail.lines.has_pending for tail in self._tails)
        return PROMPT_SECONDS if prompts else None

    def read(self, limit: int) -> list[LogOutput]:
        """Return what was written since the last call, about `limit` bytes at most. `has_more`: go on at once.

        An attempt is read only after the attempts before it.
        """
        found, self._notices = self._notices, []
        self.has_grown = self.has_more = False
        size = reads = 0
        for attempt in sorted({tail.source.attempt for tail in self._tails}):
            turn = [tail for tail in self._tails if tail.source.attempt == attempt]
            orders = _look(turn)
            while turn and size < limit and reads < _MOST_READS:
                sizes = {tail: self._read_next(tail, found) for tail in turn}
                size += sum(sizes.values())
                reads += len(turn)
                grown = {tail for tail in turn if sizes[tail]}
                busy = {id(tail.source.order) for tail in grown}
                for tail in turn:
                    if tail not in grown and not tail.waits and tail.end is not None:
                        found += self._finish(tail)
                turn = [tail for tail in turn if tail in grown or tail.waits]
                for order in orders:
                    if id(order) not in busy and order.points:
                        order.points.popleft()
            self.has_more = bool(turn)
        return found

    def _read_next(self, tail: _FileTail, found: list[LogOutput]) -> int:
        """Read the next bytes of a file, and return how many there were."""
        before = tail.offset
        data = _read_chunk(tail, self._chunk)
        if tail.offset != before:
            self.has_grown = True
            if tail.times is not None:
                tail.times.record(tail.fd)
        found += _output_of(tail, data)
        return len(data)

    def close(self) -> None:
        """Close all files that are followed."""
        for tail in self._tails:
            _close(tail)
        self._tails.clear()
        self.inotify.close()

    def _finish(self, tail: _FileTail) -> list[LogOutput]:
        found = _output(tail, tail.lines.finish())
        self._tails.remove(tail)
        self.inotify.unwatch(tail.fd)
        _close(tail)
        if not tail.source.kept:
            self._remove_if_last(os.path.dirname(tail.source.path))
        return found

    def _remove_if_last(self, folder: str) -> None:
        """Remove a worker's folder that is not kept, and with the last one the attempt's folder, once all is read."""
        if all(os.path.dirname(other.source.path) != folder for other in self._tails):
            scratch.remove(folder)
            with contextlib.suppress(OSError):  # other workers have folders there
                os.rmdir(os.path.dirname(folder))

    def _skip_to_last(self, tail: _FileTail, size: int) -> None:
        """Show only the last `size` bytes of a complete file, and a notice. The filter still gets everything."""
        start = max(tail.offset, (tail.end or 0) - size)
        skipped = start - tail.offset
        if not skipped:
            return
        if tail.source.line_filter is None:
            tail.offset = start
            self._notices += _output(tail, tail.lines.finish())
            tail.lines = LinePrefixer(tail.source.prefix)
        tail.hidden_until = start
        where = f"; all of it is in {printable(tail.source.path)}" if tail.source.kept else ""
        notice = f"raylaunch: {skipped} bytes of rank {tail.source.rank}'s {tail.source.stream} are not shown{where}\n"
        self._notices.append(
            LogOutput(rank=tail.source.rank, stream="stderr", data=notice.encode(errors="backslashreplace"))
        )


def _look(tails: list[_FileTail]) -> list[OutputOrder]:
    """Read the sizes of files, and then the notes: what is beyond the sizes may have notes that are not read yet."""
    for tail in tails:
        tail.size = _size(tail)
    orders = {id(tail.source.order): tail.source.order for tail in tails if tail.source.order is not None}
    for order in orders.values():
        order.read()
    return [*orders.values()]


def _size(tail: _FileTail) -> int:
    try:
        return (os.fstat(tail.fd) if tail.fd >= 0 else os.stat(tail.source.path)).st_size
    except OSError:
        return 0


def _read_chunk(tail: _FileTail, size: int) -> bytes:
    """Return the next bytes of a file, or `b""` where it has not grown or does not exist yet."""
    if tail.fd < 0:
        try:
            tail.fd = without_waiting(tail.source.path, os.O_RDWR if not tail.source.kept else os.O_RDONLY)
        except OSError:
            return b""
    limit = size if tail.end is None else min(size, tail.end - tail.offset)
    if tail.bound is not None:
        limit = min(limit, tail.bound - tail.offset)
    try:
        if not tail.source.is_read:
            tail.offset = os.fstat(tail.fd).st_size if tail.end is None else tail.end
            return b""
        data = os.pread(tail.fd, max(0, limit), tail.offset)
        if not data and tail.offset > os.fstat(tail.fd).st_size:
            tail.offset = tail.discarded = 0  # the script has truncated the file
            data = os.pread(tail.fd, size, 0)
    except OSError:
        return b""
    tail.offset += len(data)
    if not tail.source.kept and tail.offset - tail.discarded > _DISCARD_BYTES:
        scratch.discard_before(tail.fd, tail.offset)
        tail.discarded = tail.offset
    return data


def _output_of(tail: _FileTail, data: bytes) -> list[LogOutput]:
    if data:
        tail.grew_at = time.monotonic()
        return _output(tail, tail.lines.add(data), hidden=tail.offset <= tail.hidden_until)
    if tail.source.only_rank and time.monotonic() - tail.grew_at >= PROMPT_SECONDS:
        return _output(tail, tail.lines.flush())
    return []


def _output(tail: _FileTail, data: bytes, *, hidden: bool = False) -> list[LogOutput]:
    if not data or hidden:
        return []
    return [LogOutput(rank=tail.source.rank, stream=tail.source.stream, data=data)]


def _close(tail: _FileTail) -> None:
    if tail.fd >= 0:
        with contextlib.suppress(OSError):
            os.close(tail.fd)
    if tail.times is not None:
        tail.times.close()
    if tail.source.line_filter is not None:
        tail.source.line_filter.close()


class LineFilter:
    """Copies the lines that contain one of `needles` to a file, each with a prefix.

    Several processes may append to the same file. Where it cannot be opened or written to, no line is copied.
    """

    def __init__(self, needles: tuple[bytes, ...], prefix: bytes, path: str) -> None:
        self._needles = needles
        self._prefix = prefix
        with contextlib.suppress(OSError):  # where the disk is full, the terminal still shows the lines
            process_setup.make_private_dir(os.path.dirname(path), private_parents=1)
        try:
            self._fd = process_setup.without_waiting(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
        except OSError:
            self._fd = -1

    def copy_matching(self, text: bytes) -> None:
        """Append the matching lines of `text` with one write, so that lines of other processes never split them."""
        if not self._matches(text):
            return
        lines = filter(self._matches, _LINE.findall(text))
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._fd, b"".join(self._prefix + line.rstrip(b"\r\n") + b"\n" for line in lines))

    def _matches(self, text: bytes) -> bool:
        return any(needle in text for needle in self._needles)

    def close(self) -> None:
        """Close the output file of the filter."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LinePrefixer:
    r"""Prefixes the lines of one stream. `\r` ends a line as `\n` does, because progress bars use it so.

    A `prefix` of None passes nothing on; the filter still gets every line.
    """

    def __init__(
        self, prefix: bytes | None, line_filter: LineFilter | None = None, limit: int = _MAX_LINE_BYTES
    ) -> None:
        self._prefix = prefix
        self._filter = line_filter
        self._limit = limit
        #: Bytes since the last line end, not passed on yet.
        self._pending = b""
        #: Bytes of the current line that were passed on already, with its prefix; the filter needs the whole line.
        self._passed = b""
        #: Whether the last byte was `\r`: a `\n` that follows belongs to the same line end.
        self._after_cr = False

    def add(self, data: bytes) -> bytes:
        """Take new bytes; return the lines that are complete now, with their prefixes."""
        rest_of_line_end = b""
        if self._after_cr and data[:1] == b"\n":
            rest_of_line_end, data = data[:1], data[1:]
        self._after_cr = data.endswith(b"\r")
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end:
            text, self._pending = self._pending + data[:end], data[end:]
            output = self._prefixed(text)
        else:
            self._pending += data
            output = self.flush() if len(self._pending) > self._limit else b""
        return b"" if self._prefix is None else rest_of_line_end + output

    @property
    def has_pending(self) -> bool:
        """Whether there is an incomplete line that was not passed on."""
        return bool(self._pending)

    def flush(self) -> bytes:
        """Return the bytes of the incomplete line that were not passed on yet."""
        pending, self._pending = self._pending, b""
        if not pending or self._prefix is None:
            return b""
        output = pending if self._passed else self._prefix + pending
        self._passed = (self._passed + pending)[-self._limit :]
        return output

    def finish(self) -> bytes:
        """Return the incomplete last line. It gets a line end if lines have prefixes, so that the next starts anew."""
        if self._filter is not None and (self._passed or self._pending):
            self._filter.copy_matching(self._passed + self._pending)
        output = self.flush()
        return output + b"\n" if self._passed and self._prefix else output

    def _prefixed(self, text: bytes) -> bytes:
        """Prefix complete lines, of which the start of the first may have been passed on already."""
        passed, self._passed = self._passed, b""
        if self._filter is not None:
            self._filter.copy_matching(passed + text)
        if not self._prefix:
            return b"" if self._prefix is None else text
        return (b"" if passed else self._prefix) + _prefix_following_lines(self._prefix, text)


def _prefix_following_lines(prefix: bytes, text: bytes) -> bytes:
    """Put the prefix before each line except the first."""
    if b"\r" in text:
        return _LINE_START.sub(lambda _: prefix, text)
    return text[:-1].replace(b"\n", b"\n" + prefix) + text[-1:]
