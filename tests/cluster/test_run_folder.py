"""The run folder belongs to its user alone, and nothing secret is in it."""

from __future__ import annotations

import itertools
import json
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from raylaunch.cli import dialect
from raylaunch.cluster.run_folder import RunFolder
from raylaunch.core import journal, redaction
from raylaunch.core import result as results
from raylaunch.core.events import NodeJoined, Tick, WorkersExited, WorkersStarted
from raylaunch.core.failure import Failure, WorkerError
from raylaunch.core.job import Entrypoint, Job, NodeRule
from raylaunch.core.journal import Entry
from raylaunch.core.layout import NodeFacts
from raylaunch.core.plan import make_plan

BEGAN = "2026-01-01T00:00:00+00:00"
SECRETS = ("hunter2-of-the-job", "hunter3-of-a-node", "hunter4-of-the-submitter", "hunter5")
NODE = NodeFacts(node_id="ab", address="10.0.0.7", cpus=4.0, gpus=0.0, free_cpus=4.0, free_gpus=0.0)


@pytest.fixture(autouse=True)
def usual_umask(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What most systems have, under which files are for everybody to read."""
    monkeypatch.setenv("OUR_TOKEN", SECRETS[2])
    before = os.umask(0o022)
    yield
    os.umask(before)


def job(tmp_path: Path, **settings: object) -> Job:
    args = [f"--url=https://x/{SECRETS[2]}", f"--api-key={SECRETS[3]}"]
    of = Job(
        entrypoint=Entrypoint(script="train.py", args=args),
        log_dir=str(tmp_path / "runs"),
        nodes={"10.0.0.7": NodeRule(env={"DB_PASSWORD": SECRETS[1]})},
        env={"API_KEY": SECRETS[0], "A": "1"},
    )
    return replace(of, **settings)


def written(of: Job) -> RunFolder:
    """The folder of a run in which a worker repeats all that it knows."""
    said = " ".join(SECRETS[:3])
    failure = Failure(
        attempt=1,
        node="node-1",
        rank=0,
        local_rank=0,
        pid=1,
        at=2.0,
        exit_code=1,
        error=WorkerError(type="HTTPError", message=f"401: {said}", traceback=f"HTTPError: 401: {said}"),
        tail=said,
    )
    folder = RunFolder.create(of, "1", print)
    folder.open(of, dialect.dump(redaction.shown(of, os.environ)), make_plan(of, [NODE], local=False), BEGAN, 0.0)
    for entry in journal.replay(
        of,
        [
            NodeJoined(at=0.0, node="node-1", address="10.0.0.7", nproc=1),
            WorkersStarted(at=1.0, attempt=1, node="node-1", pids=(1,)),
            WorkersExited(at=2.0, attempt=1, node="node-1", failures=(failure,)),
        ],
    ):
        folder.append(entry)
    folder.write_stacks(1, "rank 0 sleeps\n")
    folder.close(results.result(folder.entries, run_dir=folder.where, began=BEGAN))
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("layout", ["raylaunch", "torchrun"])
def test_nobody_else_may_look(tmp_path, layout):
    """Folders 0700, files 0600, whatever the umask allows."""
    folder = written(job(tmp_path, log_layout=layout)).path
    assert mode(folder) == 0o700
    below = sorted(folder.rglob("*"))
    assert {path.name for path in below} > {"job.yaml", "plan.json", "events.jsonl", "result.json", "stacks.txt"}
    assert [path for path in below if mode(path) != (0o700 if path.is_dir() else 0o600)] == []


def test_a_folder_that_was_there_keeps_its_mode(tmp_path):
    """Several people may have their runs below it."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o775)
    assert mode(written(job(tmp_path)).path) == 0o700
    assert mode(tmp_path / "runs") == 0o775


def test_no_secret_is_written(tmp_path):
    """In no file, though the job has them and a worker repeated them; `***` stands there."""
    folder = written(job(tmp_path)).path
    for file in (path for path in folder.rglob("*") if path.is_file()):
        assert [secret for secret in SECRETS if secret in file.read_text()] == [], file.name
    assert "API_KEY: '***'" in (folder / "job.yaml").read_text()
    assert "--url=https://x/***" in (folder / "job.yaml").read_text()
    (attempt,) = json.loads((folder / "result.json").read_text())["attempts"]
    assert attempt["failures"][0]["error"]["message"] == "401: *** *** ***"


def test_what_is_in_memory_is_whole(tmp_path):
    """The report on the terminal quotes the worker, which may say what it wants."""
    (failure,) = written(job(tmp_path)).entries[-1].event.failures
    assert SECRETS[0] in failure.error.message


def test_events_without_secrets_lead_to_the_same_decisions(tmp_path):
    """They can be read and played again."""
    folder = written(job(tmp_path)).path
    of, entries = journal.read((folder / "events.jsonl").read_text().splitlines())
    assert of.env == {"API_KEY": "***", "A": "1"}
    assert of.nodes["10.0.0.7"].env == {"DB_PASSWORD": "***"}
    assert journal.replay(of, [entry.event for entry in entries if entry.event is not None]) == entries


def test_stacks_are_written_where_the_attempt_is(tmp_path):
    """Whether its folder is there already or on another machine."""
    folder = RunFolder.create(job(tmp_path), "1", print)
    (folder.path / "attempt-1").mkdir()
    for attempt in (1, 2):
        assert folder.write_stacks(attempt, "stacks") == str(folder.path / f"attempt-{attempt}" / "stacks.txt")
        assert (folder.path / f"attempt-{attempt}" / "stacks.txt").read_text() == "stacks"
    assert sorted(path.name for path in (folder.path / "attempt-2").iterdir()) == ["stacks.txt"]


def test_stacks_that_cannot_be_written_end_nothing(tmp_path):
    """It is said, and the run goes on."""
    said: list[str] = []
    folder = RunFolder.create(job(tmp_path), "1", said.append)
    (folder.path / "attempt-1").write_text("")
    folder.write_stacks(1, "stacks")
    assert said == [f"cannot write {folder.path}/attempt-1/stacks.txt: Not a directory; the run goes on without it"]


def test_no_stacks_where_nothing_is_kept(tmp_path):
    """`log_dir: /dev/null`."""
    folder = RunFolder.create(job(tmp_path, log_dir="/dev/null"), "1", print)
    assert folder.write_stacks(1, "stacks") == ""


def test_a_disk_that_stands_still_holds_nobody_up(tmp_path):
    """Steps are written when it goes on: all, in order, before the folder is closed."""
    of = job(tmp_path)
    folder = RunFolder.create(of, "1", print)
    os.mkfifo(folder.path / "disk")
    (folder.path / "events.jsonl").symlink_to("disk")
    disk = os.open(folder.path / "disk", os.O_RDWR)  # and nobody reads
    folder.open(of, "", make_plan(of, [NODE], local=False), BEGAN, 0.0)
    entries = [Entry(event=Tick(at=float(number)), actions=()) for number in range(3000)]
    for entry in entries:
        folder.append(entry)  # far more than a pipe holds
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(itertools.islice(os.fdopen(disk), 3001)))
    reader.start()
    folder.close(results.result([], run_dir=folder.where, began=BEGAN))
    reader.join()
    assert journal.read(lines)[1] == entries


def test_a_disk_that_is_full_is_told_of_once(tmp_path):
    """The run goes on, and what is in memory is whole."""
    of = job(tmp_path)
    said: list[str] = []
    folder = RunFolder.create(of, "1", said.append)
    (folder.path / "events.jsonl").symlink_to("/dev/full")
    folder.open(of, "", make_plan(of, [NODE], local=False), BEGAN, 0.0)
    for number in range(10):
        folder.append(Entry(event=Tick(at=float(number)), actions=()))
    folder.close(results.result([], run_dir=folder.where, began=BEGAN))
    assert said == [f"cannot write {folder.path}/events.jsonl: No space left on device; the run goes on without it"]
    assert len(folder.entries) == 10
