"""Reading a journal while it grows, and one that is damaged."""

from __future__ import annotations

import pytest

from raylaunch.cli.runs.run_reader import FolderReader
from raylaunch.core.machine.state import Phase
from tests.cli.runs.made_runs import REPLAYS, make_folder


def test_a_journal_that_grows(tmp_path):
    """Half a line is read when it is whole."""
    reader = FolderReader(str(tmp_path))
    reader.refresh()
    assert (reader.status(), reader.problem) == (None, "")
    text = (REPLAYS / "interrupted-twice.jsonl").read_text()
    lines = text.splitlines(keepends=True)
    with (tmp_path / "events.jsonl").open("w") as file:
        for part, phase in (
            (lines[0][:30], None),
            (lines[0][30:] + lines[1] + lines[2] + lines[3][:-1], Phase.GATHERING),
            ("\n", Phase.STARTING),
            ("".join(lines[4:])[:-1], Phase.DONE),
        ):
            file.write(part)
            file.flush()
            reader.refresh()
            status = reader.status()
            assert (status and status.phase, reader.problem) == (phase, "")
    reader.close()
    reader.close()


@pytest.mark.parametrize("damage", [b"\xff\xfe\n", b"{}\n", b"[" * 100_000 + b"\n", b"\n", b"\0\0\0\n"])
def test_a_journal_that_is_damaged(tmp_path, damage):
    """What comes before the damage counts, and the line is named."""
    path = make_folder(tmp_path / "run", lines=5) / "events.jsonl"
    path.write_bytes(path.read_bytes() + damage + b"more\n")
    reader = FolderReader(str(tmp_path / "run"))
    reader.refresh()
    reader.refresh()
    assert "line 6" in reader.problem
    assert reader.status().phase is not Phase.DONE
    path.write_bytes(damage)
    other = FolderReader(str(tmp_path / "run"))
    other.refresh()
    assert other.status() is None
    assert "line 1" in other.problem


def test_what_cannot_be_read(tmp_path):
    """A folder in place of the journal; and nothing is read of a run without a folder."""
    (tmp_path / "events.jsonl").mkdir()
    (tmp_path / "result.json").write_text("[3]")
    reader = FolderReader(str(tmp_path))
    reader.refresh()
    assert reader.problem == "events.jsonl cannot be read: Is a directory"
    assert reader.result() == {}
    nothing = FolderReader("")
    nothing.refresh()
    assert (nothing.status(), nothing.problem) == (None, "the run keeps no files")
