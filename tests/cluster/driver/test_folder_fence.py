"""A driver that was replaced, and is alive, writes nothing more into the run folder that anybody reads."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from raylaunch.cli.runs.run_reader import FolderReader
from raylaunch.cluster.driver.folder_fence import FolderFence, take_log
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.cluster.local.file_writer import opened
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.machine.events_and_actions import Finish, Tick
from raylaunch.core.placement.plan import make_plan
from raylaunch.core.record import journal
from raylaunch.core.record import result as results
from raylaunch.core.record.journal import JournalEntry
from raylaunch.core.record.run_layout import LAYOUTS
from tests.cluster.conftest import wait_until

BEGAN = "2026-01-01T00:00:00+00:00"


class LeftError(BaseException):
    """The process of the driver would have ended."""


@pytest.fixture
def left(monkeypatch) -> list[str]:
    """Have drivers of this process end by LeftError only; why they do."""
    found: list[str] = []

    def leave(_, why):
        found.append(why)
        raise LeftError

    monkeypatch.setattr(FolderFence, "leave", leave)
    return found


def a_job(tmp_path) -> Job:
    return Job(entrypoint=Entrypoint(script="train.py"), log_dir=str(tmp_path / "runs"))


def begin(tmp_path, entries: int) -> RunFolder:
    """Return the folder of the first driver of a run."""
    job = a_job(tmp_path)
    folder = RunFolder.create(job, "1", print, 1)
    folder.open(job, "", make_plan(job, (), local=False), BEGAN, 0.0)
    folder.append(JournalEntry(event=None, actions=()))
    ticks(folder, range(entries))
    return folder


def ticks(folder: RunFolder, times) -> None:
    for at in times:
        folder.append(JournalEntry(event=Tick(at=float(at)), actions=()))


def resumed(tmp_path, state, epoch: int) -> RunFolder:
    folder = RunFolder(Path(state.path), LAYOUTS["raylaunch"], Redactor(), pytest.fail, epoch)
    folder.resume(state, a_job(tmp_path))
    return folder


def times(path: Path) -> list[float]:
    """Return the times of the entries that are written so far."""
    try:
        _, entries = journal.read((path / "events.jsonl").read_text().splitlines())
    except (FileNotFoundError, ValueError):  # not even the first line
        return []
    return [entry.event.at for entry in entries if entry.event is not None]


def epoch_of(path: Path) -> int:
    return json.loads((path / "events.jsonl").read_text().splitlines()[0])["epoch"]


def finish(folder: RunFolder) -> None:
    folder.close(results.result([], run_dir=folder.where, began=BEGAN))


def test_the_journal_is_that_of_the_driver_in_command(tmp_path):
    """The first one has written what no state has, and goes on to write: who reads the journal sees each entry once."""
    first = begin(tmp_path, 100)
    state = first.recorded.state()
    kept = type(state)(path=state.path, began=BEGAN, status=state.status, count=state.count, last=[*state.last])
    ticks(first, range(1000, 1010))
    wait_until(lambda: len(times(first.path)) == 110, 60, "the lines")
    reader = FolderReader(first.where)
    reader.refresh()
    second = resumed(tmp_path, kept, 2)
    written = threading.Event()
    second._journal.writer.put(written.set)  # noqa: SLF001
    ticks(second, range(100, 105))
    assert not written.wait(0.3), "it writes, though nobody obeys it yet"
    assert (epoch_of(first.path), len(times(first.path))) == (1, 110)
    second.take_command()
    wait_until(lambda: times(first.path) == [*range(105)], 60, "the journal of the second driver")
    file = first._journal._file  # noqa: SLF001
    file.write("what the first driver writes\n")  # as its thread does before it looks again
    file.flush()
    reader.refresh()
    assert (reader.problem, reader.status().result.seconds) == ("", 104.0)
    finish(second)
    assert (epoch_of(first.path), times(first.path)) == (2, [*range(105)])


def test_a_driver_that_was_replaced_ends_without_a_result(tmp_path):
    """It says why in a file of its own, and `result.json` is that of the driver in command."""
    go, begun = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            folder = begin(tmp_path, 3)
            os.write(begun[1], folder.where.encode())
            os.read(go[0], 1)
            finish(folder)
        finally:
            os._exit(7)
    where = Path(os.read(begun[0], 1000).decode())
    wait_until(lambda: len(times(where)) == 3, 60, "its journal")
    FolderFence(where, 2).take_journal("{}", 4, [])[0].close()
    os.write(go[1], b".")
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert (where / "driver-1.log").read_text() == "raylaunch: driver 1 ends: driver 2 has taken over\n"
    assert not (where / "result.json").exists()
    assert [path.name for path in where.iterdir() if path.name.startswith(".events")] == []


def test_a_driver_of_an_earlier_epoch_takes_nothing(tmp_path, left):
    """It stood still when it was about to take over, and another one has."""
    where = begin(tmp_path, 3).path
    wait_until(lambda: len(times(where)) == 3, 60, "the journal")
    file, missing = FolderFence(where, 3).take_journal("{}", 9, ["last"])
    assert (missing, epoch_of(where)) == (5, 3)
    with pytest.raises(LeftError):
        FolderFence(where, 2).take_journal("{}", 4, [])
    assert left == ["driver 3 has taken over"]
    assert epoch_of(where) == 3
    assert [path.name for path in where.iterdir() if path.name.startswith(".events")] == []
    file.close()


def test_a_result_that_a_driver_has_written_which_was_cut_off(tmp_path):
    """It is removed, as the run goes on; but that of a run that has ended stays."""
    first = begin(tmp_path, 3)
    state = first.recorded.state()
    finish(first)
    second = resumed(tmp_path, state, 2)
    assert (first.path / "result.json").exists()
    second.take_command()
    wait_until(lambda: not (first.path / "result.json").exists(), 60, "the result to be gone")
    second.append(JournalEntry(event=Tick(at=9.0), actions=(Finish(exit_code=0, why="done"),)))
    state = second.recorded.state()
    finish(second)
    third = resumed(tmp_path, state, 3)
    third.take_command()
    wait_until(lambda: epoch_of(first.path) == 3, 60, "the third driver")
    assert (first.path / "result.json").exists()
    finish(third)


def test_a_log_is_made_anew(tmp_path):
    """With what it has. What an earlier driver appends is in no file any more."""
    path = tmp_path / "new" / "driver.log"
    os.close(take_log(path, 1))
    first = opened(path)
    os.write(first, b"one\n")
    second = take_log(path, 2)
    os.write(first, b"not this\n")
    os.write(second, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
    assert [each.name for each in path.parent.iterdir()] == ["driver.log"]
    os.close(first)
    os.close(second)


@pytest.mark.parametrize("text", [None, "", "{}", '{"epoch": "9"}', "[]", "\xff", '{"epoch": 2}'])
def test_a_journal_that_shows_no_later_driver(tmp_path, text):
    """Nobody has taken the folder over, as far as can be seen."""
    if text is not None:
        (tmp_path / "events.jsonl").write_text(text)
    assert FolderFence(tmp_path, 2).newer() == 0
