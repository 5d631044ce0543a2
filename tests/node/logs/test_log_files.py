"""The log files of a run folder: which there are, their last lines, and parts of them."""

from __future__ import annotations

import re

import pytest

from raylaunch.node.logs import log_files
from raylaunch.node.logs.log_files import LogQuery, LogRead, LogSpan, answer

BOTH = ("stdout", "stderr")


def read(folder, asked: LogRead) -> bytes:
    return b"".join(block.data for block in answer(str(folder), "raylaunch", asked).blocks)


def write(folder, attempt: int, rank: int, **streams: bytes) -> None:
    where = folder / f"attempt-{attempt}" / f"rank-{rank}"
    where.mkdir(parents=True)
    for stream, data in streams.items():
        (where / f"{stream}.log").write_bytes(data)


@pytest.mark.parametrize(("lines", "expected"), [(None, b"123"), (0, b""), (1, b"3"), (2, b"23"), (9, b"123")])
@pytest.mark.parametrize("block", [1, 7, 65536])
def test_last_lines(tmp_path, monkeypatch, lines, expected, block):
    """So many, also of a file that is read in several blocks. Its last line may lack its end."""
    monkeypatch.setattr(log_files, "BLOCK_BYTES", block)
    for attempt, end in enumerate((b"", b"\n")):
        write(tmp_path, attempt, 0, stdout=b"line 1\nline 2\r\nline 3" + end)
        (span,) = log_files.spans(str(tmp_path), "raylaunch", LogQuery(attempt=attempt, streams=BOTH, lines=lines))
        found = read(tmp_path, LogRead(attempt=attempt, spans=(span,)))
        assert re.sub(rb"[^123]", b"", found) == expected


@pytest.mark.parametrize("block", [1, 2, 3, 100])
def test_several_files(tmp_path, monkeypatch, block):
    """In their order. A file that is gone, or shorter than it was, has nothing."""
    monkeypatch.setattr(log_files, "BLOCK_BYTES", block)
    write(tmp_path, 1, 0, stdout=b"abc", stderr=b"")
    write(tmp_path, 1, 2, stdout=b"defg", stderr=b"hi")
    spans = [*log_files.spans(str(tmp_path), "raylaunch", LogQuery(attempt=1, streams=BOTH))]
    assert [(span.rank, span.stream, span.end) for span in spans] == [
        *((0, "stdout", 3), (0, "stderr", 0), (2, "stdout", 4), (2, "stderr", 2)),
    ]
    gone, shorter = (LogSpan(rank=rank, stream="stdout", start=3, end=9) for rank in (1, 0))
    assert read(tmp_path, LogRead(attempt=1, spans=(gone, shorter, *spans))) == b"abcdefghi"


@pytest.mark.parametrize("layout", ["raylaunch", "torchrun"])
def test_files_of_an_attempt(tmp_path, layout):
    """By rank, as numbers."""
    for rank in (10, 2):
        where = f"attempt-2/rank-{rank}" if layout == "raylaunch" else f"attempt_1/{rank}"
        (tmp_path / where).mkdir(parents=True)
        (tmp_path / where / "stdout.log").write_text("x\n")
    (tmp_path / where).parent.joinpath("stacks.txt").touch()

    def ranks(**asked: object) -> list[int]:
        query = LogQuery(**{"attempt": 2, "streams": BOTH} | asked)
        return [span.rank for span in log_files.spans(str(tmp_path), layout, query)]

    assert ranks() == [2, 10]
    assert ranks(ranks=((5, 10),)) == [10]
    assert ranks(streams=("stderr",)) == []
    assert ranks(attempt=3) == []
