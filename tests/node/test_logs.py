"""Log files are followed as they grow, in whole lines, and a flood is cut with a notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from raylaunch.node import deaths, logs
from raylaunch.node.logs import Tails


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "attempt-1" / "rank-0"
    folder.mkdir(parents=True)
    return folder


def read(tails: Tails, *, to_the_end: bool = False) -> list[tuple[str, bytes]]:
    return [(output.stream, output.data) for output in tails.read(to_the_end=to_the_end)]


def test_a_missing_file_is_empty(tmp_path: Path) -> None:
    """A worker that has not begun has said nothing; its file may come later."""
    tails = Tails(str(tmp_path), 1, [0])
    assert read(tails) == []
    assert read(tails, to_the_end=True) == []
    (tmp_path / "attempt-1" / "rank-0").mkdir(parents=True)
    (tmp_path / "attempt-1" / "rank-0" / "stdout.log").write_bytes(b"late\n")
    assert read(tails) == [("stdout", b"late\n")]


def test_partial_lines_wait_for_their_end(folder: Path, tmp_path: Path) -> None:
    """Half a line is held back until the rest comes."""
    tails = Tails(str(tmp_path), 1, [0])
    with (folder / "stdout.log").open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert read(tails) == [("stdout", b"one\n")]
        assert read(tails) == []
        file.write(b"o\n")
        assert read(tails) == [("stdout", b"two\n")]


def test_at_the_end_the_last_line_needs_no_newline(folder: Path, tmp_path: Path) -> None:
    """The last words of a dying worker are shown, and only once."""
    (folder / "stderr.log").write_bytes(b"one\nhalf")
    tails = Tails(str(tmp_path), 1, [0])
    assert read(tails, to_the_end=True) == [("stderr", b"one\nhalf")]
    assert read(tails, to_the_end=True) == []


def test_both_streams_of_all_ranks_are_read(folder: Path, tmp_path: Path) -> None:
    """Each output names its rank and its stream."""
    other = tmp_path / "attempt-1" / "rank-3"
    other.mkdir()
    (folder / "stdout.log").write_bytes(b"out\n")
    (other / "stderr.log").write_bytes(b"err\n")
    found = Tails(str(tmp_path), 1, [0, 3]).read()
    assert [(output.rank, output.stream, output.data) for output in found] == [
        (0, "stdout", b"out\n"),
        (3, "stderr", b"err\n"),
    ]


def test_a_line_longer_than_a_chunk_is_passed_on_in_parts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line without end cannot stop the following for good."""
    monkeypatch.setattr(logs, "_CHUNK", 8)
    (folder / "stdout.log").write_bytes(b"x" * 20)
    tails = Tails(str(tmp_path), 1, [0])
    found = [read(tails) for _ in range(3)]
    assert found == [[("stdout", b"x" * 8)], [("stdout", b"x" * 8)], []]
    assert read(tails, to_the_end=True) == [("stdout", b"x" * 4)]


def test_one_look_takes_one_chunk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that floods its log delays the others by one chunk, no more."""
    monkeypatch.setattr(logs, "_CHUNK", 8)
    (folder / "stdout.log").write_bytes(b"line\n" * 4)
    tails = Tails(str(tmp_path), 1, [0])
    assert len(read(tails)) == 1
    assert b"".join(data for _, data in read(tails, to_the_end=True)) == (b"line\n" * 4)[8:]


def test_a_log_far_ahead_is_skipped_with_a_notice(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end only the last part of a flood is shown; how much is left out, and where it is, is said."""
    monkeypatch.setattr(logs, "_MOST_AT_THE_END", 10)
    (folder / "stdout.log").write_bytes(b"a" * 100 + b"b" * 10)
    (_, notice), *rest = read(Tails(str(tmp_path), 1, [0]), to_the_end=True)
    assert notice == f"[raylaunch: 100 bytes are not shown; all of it is in {folder}/stdout.log]\n".encode()
    assert rest == [("stdout", b"b" * 10)]


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    """Of a long stderr the report shows the last twenty lines; of a missing one, nothing; bad bytes are no obstacle."""
    file = tmp_path / "stderr.log"
    assert deaths.tail(file) == ""
    file.write_bytes(b"".join(b"%d\n" % number for number in range(100_000)) + b"\xff\n")
    lines = deaths.tail(file).splitlines()
    assert lines[0] == "99981"
    assert lines[-2:] == ["99999", "\ufffd"]
    assert len(lines) == 20
