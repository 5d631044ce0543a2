"""Reading a run folder, and writing the report into it at the end of a run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from raylaunch.cli.html_report import run_report
from raylaunch.cli.html_report.outcome_text import RunEnd
from raylaunch.core.job.job import Job
from raylaunch.core.record.result import RunResult
from raylaunch.errors import ConfigError
from tests.cli.html_report.reports import facts, failed_run, html, replay_folder, write_journal


def ended(folder, exit_code: int = 0) -> RunResult:
    return RunResult(
        exit_code=exit_code, why="it is over", seconds=1.0, restarts=0, attempts=(), cause=None, run_dir=str(folder)
    )


def written(folder, job: Job | None = None) -> list[str]:
    """Return what is said at the end of a run in this folder."""
    said: list[str] = []
    run_report.write_at_the_end(job or Job(), ended(folder), {}, said.append, "0.1.0")
    return said


def test_it_is_written_at_the_end(tmp_path):
    """Only its owner may read it, like the other files of the folder."""
    folder = replay_folder(tmp_path / "run", "two-kills-then-finished")
    assert written(folder) == [f"report: {folder}/report.html"]
    assert sorted(os.listdir(folder)) == ["events.jsonl", "report.html"]
    assert (folder / "report.html").stat().st_mode & 0o777 == 0o600
    assert "It is over." in (folder / "report.html").read_text()


def test_a_run_that_wants_none(tmp_path):
    """Or that keeps nothing."""
    assert written(replay_folder(tmp_path, "two-kills-then-finished"), Job(report=False)) == []
    assert written("") == []
    assert os.listdir(tmp_path) == ["events.jsonl"]


def test_what_goes_wrong_is_only_said(tmp_path, monkeypatch):
    """No journal, no folder, a bug, a long journal, a file system that does not answer."""
    assert written(tmp_path / "gone")[0].startswith(f"cannot write {tmp_path}/gone/report.html: No such file")
    folder = replay_folder(tmp_path / "run", "two-kills-then-finished")
    (folder / "report.html").mkdir()
    assert written(folder)[0] == f"cannot write {folder}/report.html: Is a directory"
    assert sorted(os.listdir(folder)) == ["events.jsonl", "report.html"]
    (folder / "report.html").rmdir()
    events = (folder / "events.jsonl").read_bytes()
    (folder / "events.jsonl").write_bytes(b"")  # as a full disk leaves it
    (line,) = written(folder)
    assert line.startswith(f"no report was written: {folder}/events.jsonl is no journal of a run: ")
    assert "\n" not in line
    (folder / "events.jsonl").write_bytes(events)
    monkeypatch.setattr(run_report, "MOST_AT_THE_END", 100)
    assert written(folder) == [f"no report was written, since the run was long: `raylaunch report {folder}` writes it"]
    monkeypatch.setattr(run_report, "MOST_AT_THE_END", 1e9)
    monkeypatch.setattr(run_report, "collect", lambda *_: 1 / 0)
    assert "ZeroDivisionError: division by zero" in written(folder)[0]
    monkeypatch.setattr(run_report, "STALL_SECONDS", 0.0)
    answers = threading.Event()
    monkeypatch.setattr(run_report, "collect", lambda *_: answers.wait(200))
    assert written(folder) == ["no report was written within 0 s: `raylaunch report` writes it"]
    answers.set()


def test_damaged_lines_are_left_out(tmp_path):
    """Of a disk that was full, or of another version. The page says how many."""
    folder = write_journal(tmp_path, failed_run())
    lines = (folder / "events.jsonl").read_bytes().splitlines(keepends=True)
    lines[3] = b'{"event": {"is": "Unknown"}, "actions": []}\n'
    lines.insert(5, b"\x00\xff\n")
    (folder / "events.jsonl").write_bytes(b"".join(lines) + b"[" * 100_000 + b'\n{"event": ')
    found = facts(folder)
    assert (found.unreadable, found.history.attempts[0].steps) == (4, 41)
    assert "4 lines of it cannot be read and are left out" in html(folder)


@pytest.mark.parametrize("text", [None, b"", b"{}\n", b"\xff\n", b'{"job": 1}\n', b"[" * 100_000])
def test_a_folder_without_a_journal(tmp_path, text):
    """The error says which file is missing or what is wrong with it."""
    if text is not None:
        (tmp_path / "events.jsonl").write_bytes(text)
    with pytest.raises(ConfigError, match=r"events\.jsonl"):
        facts(tmp_path)


def test_a_run_that_goes_on(tmp_path):
    """Its times go on too."""
    folder = write_journal(tmp_path, failed_run()[:-1])
    end = RunEnd(state="running", exit_code=None, why="", is_alive=True)
    assert run_report.collect(folder, "night", end, {}, 100.0).history.per_state["train"] == 96.0


def test_the_template_engine_is_imported_when_it_is_needed():
    """Not at the beginning of a run."""
    code = "import sys, raylaunch.cli.html_report.run_report, raylaunch.cli.api; print('jinja2' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
