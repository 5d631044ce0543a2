"""The files of workers: their last lines, and what is written to them later."""

from __future__ import annotations

import re

import pytest

from raylaunch.cli.runs import worker_logs
from raylaunch.cli.runs.worker_logs import LogChoice, WorkerLog, logs


def choice(**settings: object) -> LogChoice:
    every = {"streams": ("stdout", "stderr"), "ranks": None, "lines": None, "pattern": None, "is_prefixed": True}
    return LogChoice(**{**every, **settings})


@pytest.mark.parametrize(("lines", "expected"), [(None, b"123"), (0, b""), (1, b"3"), (2, b"23"), (9, b"123")])
@pytest.mark.parametrize("block", [1, 7, 65536])
def test_last_lines(tmp_path, monkeypatch, lines, expected, block):
    """So many, also of a file that is read in several blocks. Its last line may lack its end."""
    monkeypatch.setattr(worker_logs, "BLOCK_BYTES", block)
    for end in (b"", b"\n"):
        (tmp_path / "log").write_bytes(b"line 1\nline 2\r\nline 3" + end)
        log = WorkerLog(tmp_path / "log", b"", None)
        found = b"".join((*log.last(lines), log.rest()))
        assert re.sub(rb"[^123]", b"", found) == expected
        assert (list(log.more()), log.rest()) == ([], b"")


def test_what_is_written_later(tmp_path):
    """Whole lines come as they are written, with any bytes in them; the rest comes at the end. Others are left out."""
    log = WorkerLog(tmp_path / "log", b"[3] ", re.compile(b"a"))
    assert (list(log.last(5)), list(log.more())) == ([], [])
    with (tmp_path / "log").open("wb", buffering=0) as file:
        for data, expected in ((b"a1\nb", [b"[3] a1\n"]), (b"a\rxx\n", [b"[3] ba\r"]), (b"\xffa", [])):
            file.write(data)
            assert list(log.more()) == expected
    assert (log.rest(), log.rest()) == (b"[3] \xffa\n", b"")


@pytest.mark.parametrize("layout", ["raylaunch", "torchrun"])
def test_files_of_an_attempt(tmp_path, layout):
    """By rank, as numbers; without prefix where one rank is shown."""
    for rank in (10, 2):
        where = f"attempt-2/rank-{rank}" if layout == "raylaunch" else f"attempt_1/{rank}"
        (tmp_path / where).mkdir(parents=True)
        (tmp_path / where / "stdout.log").write_text("x\n")
    (tmp_path / where).parent.joinpath("stacks.txt").touch()

    def shown(**settings: object) -> list[bytes]:
        return [line for log in logs(tmp_path, layout, 2, choice(**settings), 11) for line in log.more()]

    assert shown() == [b"[2] x\n", b"[10] x\n"]
    assert shown(ranks=(range(5, 11),)) == [b"[10] x\n"]
    assert shown(ranks=(range(2, 3),)) == [b"x\n"]
    assert shown(is_prefixed=False) == [b"x\n", b"x\n"]
    assert shown(streams=("stderr",)) == []
    assert logs(tmp_path, layout, 3, choice(), 11) == []
