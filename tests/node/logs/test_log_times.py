"""When lines were written: noted as a log grows, and found again for a part of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.node.logs import log_files
from raylaunch.node.logs.log_files import LogQuery, LogRead, LogSpan
from raylaunch.node.logs.log_times import LogTimes, TimesWriter

LONG_AGO = 1_000_000_000


class Log:
    """A log whose growth is noted at times of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "attempt-1" / "rank-0"
        self.folder.mkdir(parents=True)
        self.path, self.times = self.folder / "stdout.log", self.folder / "stdout.times"
        self.path.touch()
        self.writer = TimesWriter(str(self.times))

    def note(self) -> None:
        with self.path.open("rb") as file:
            self.writer.record(file.fileno())

    def write(self, text: bytes, at: float, *, noted: bool = True) -> None:
        with self.path.open("ab") as file:
            file.write(text)
        os.utime(self.path, (LONG_AGO + at, LONG_AGO + at))
        if noted:
            self.note()

    def between(self, start: int, end: int) -> list[tuple[int, float]]:
        with self.path.open("rb") as file:
            found = LogTimes(str(self.times), file.fileno())
            entries = [(size, at - LONG_AGO) for size, at in found.between(start, end)]
            found.close()
        return entries

    def since(self, at: float) -> bytes:
        """Return what was written since, as the files of the run have it."""
        folder = str(self.folder.parents[1])
        query = LogQuery(attempt=1, streams=("stdout",), since=LONG_AGO + at)
        answer = log_files.answer(folder, "raylaunch", query)
        read = log_files.answer(folder, "raylaunch", LogRead(attempt=1, spans=answer.spans))
        return b"".join(block.data for block in read.blocks)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    found = Log(tmp_path)
    yield found
    found.writer.close()


def test_each_part_has_its_time(log: Log) -> None:
    """Of a part of the log, the entries that reach to its end. What was not noted has the time of the last write."""
    log.note()
    for at in (1.0, 2.5, 4.0):
        log.write(b"12345678\n", at)
        log.note()
    log.write(b"late\n", 7.0, noted=False)
    assert log.between(0, 27) == [(9, 1.0), (18, 2.5), (27, 4.0)]
    assert log.between(9, 10) == [(18, 2.5)]
    assert log.between(20, 32) == [(27, 4.0), (32, 7.0)]
    assert log.times.stat().st_size == 3 * 16
    assert log.times.stat().st_mode & 0o777 == 0o600


def test_lines_since(log: Log) -> None:
    """From the first line that was not written whole before; none after the last write."""
    log.write(b"one\ntwo\nthr", 1.0)
    log.write(b"ee\nfour\n", 2.0)
    log.write(b"five\n", 3.0, noted=False)
    assert log.since(0.0) == log.since(1.0) == b"one\ntwo\nthree\nfour\nfive\n"
    assert log.since(1.5) == log.since(2.0) == b"three\nfour\nfive\n"
    assert log.since(2.5) == log.since(3.0) == b"five\n"
    assert log.since(3.5) == b""


def test_the_last_lines_since(log: Log) -> None:
    """Both limits apply."""
    for number in range(5):
        log.write(b"%d\n" % number, number)
    folder, query = str(log.folder.parents[1]), LogQuery(attempt=1, streams=("stdout",), since=LONG_AGO + 1.5)
    for lines, start in ((2, 6), (4, 4)):
        (span,) = log_files.spans(folder, "raylaunch", LogQuery(**{**_fields(query), "lines": lines}))
        assert (span.start, span.end) == (start, 10)


def _fields(query: LogQuery) -> dict[str, object]:
    return {name: getattr(query, name) for name in LogQuery.__slots__}


def test_logs_without_times(log: Log) -> None:
    """As those of earlier versions. A log that has just begun has the time of its last write."""
    log.write(b"one\ntwo\n", 1.0, noted=False)
    assert log.between(0, 8) == []
    assert (log.since(0.5), log.since(2.0)) == (b"one\ntwo\n", b"")
    before = time.time()
    os.utime(log.path)
    ((size, at),) = log.between(0, 8)
    assert (size, before - 1 < at + LONG_AGO <= time.time()) == (8, True)  # file systems have coarser clocks


def test_times_of_blocks(log: Log) -> None:
    """Each block that is asked for with times has those of its bytes."""
    for number in range(6):
        log.write(b"%d\n" % number, number)
    spans = (LogSpan(rank=0, stream="stdout", start=2, end=8),)
    folder = str(log.folder.parents[1])
    (block,) = log_files.answer(folder, "raylaunch", LogRead(attempt=1, spans=spans, times=True)).blocks
    assert (block.data, [size for size, _ in block.times]) == (b"1\n2\n3\n", [4, 6, 8])
    (block,) = log_files.answer(folder, "raylaunch", LogRead(attempt=1, spans=spans)).blocks
    assert block.times == ()


def test_a_truncated_log(log: Log) -> None:
    """Its times begin anew."""
    log.write(b"long ago\n" * 10, 1.0)
    os.truncate(log.path, 0)
    log.note()
    log.write(b"anew\n", 5.0)
    assert log.between(0, 5) == [(5, 5.0)]


def test_damaged_times(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half an entry is never left on a full disk. Other bytes give wrong times, and no error."""
    log.write(b"one\n", 1.0)
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:5]))
    log.write(b"two\n", 2.0)
    monkeypatch.undo()
    log.write(b"three\n", 3.0)
    assert log.between(0, 14) == [(4, 1.0), (14, 3.0)]
    log.times.write_bytes(bytes(range(256)) + b"xyz")
    log.between(0, 14)
    log.since(2.0)


@pytest.mark.parametrize("kind", ["folder", "fifo", "link"])
def test_something_else_in_their_place(log: Log, tmp_path: Path, kind: str) -> None:
    """It is left as it is, nobody waits for it, and the lines are shown."""
    foreign = tmp_path / "foreign"
    foreign.write_text("foreign")
    {"folder": os.mkdir, "fifo": os.mkfifo, "link": lambda path: os.symlink(foreign, path)}[kind](log.times)
    log.write(b"one\ntwo\n", 1.0)
    assert log.since(0.5) == b"one\ntwo\n"
    spans = (LogSpan(rank=0, stream="stdout", start=0, end=8),)
    asked = LogRead(attempt=1, spans=spans, times=True)
    (block,) = log_files.answer(str(log.folder.parents[1]), "raylaunch", asked).blocks
    assert block.data == b"one\ntwo\n"
    assert foreign.read_text() == "foreign"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """The worker is not disturbed: its log has no times."""
    found = TimesWriter(str(tmp_path / "missing" / "stdout.times"))
    with (tmp_path / "log").open("wb") as file:
        found.record(file.fileno())
    found.close()
