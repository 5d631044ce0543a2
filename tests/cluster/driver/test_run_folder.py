"""The run folder is private to its user, has no secrets in it, and errors of its disk never end a run."""

from __future__ import annotations

import itertools
import json
import os
import signal
import stat
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ray._private.runtime_env import packaging

from raylaunch.cli.config import job_file
from raylaunch.cluster.driver import run_folder
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.cluster.local import file_writer
from raylaunch.core.failures.failure import Failure, WorkerError
from raylaunch.core.job.job import Entrypoint, Job, NodeRule
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.machine.events_and_actions import NodeJoined, Tick, WorkersExited, WorkersStarted
from raylaunch.core.placement.plan import NodeFacts, make_plan
from raylaunch.core.record import journal
from raylaunch.core.record import result as results
from raylaunch.core.record.journal import JournalEntry
from raylaunch.errors import ConfigError

BEGAN = "2026-01-01T00:00:00+00:00"
SECRETS = ("hunter2-of-the-job", "hunter3-of-a-node", "hunter4-of-the-submitter", "hunter5")
NODE = NodeFacts(node_id="ab", address="10.0.0.7", cpus=4.0, gpus=0.0, free_cpus=4.0, free_gpus=0.0)


@pytest.fixture(autouse=True)
def usual_umask(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The usual umask, with which everybody may read new files."""
    monkeypatch.setenv("OUR_TOKEN", SECRETS[2])
    before = os.umask(0o022)
    yield
    os.umask(before)


def job_with_secrets(tmp_path: Path, **settings: object) -> Job:
    args = [f"--url=https://x/{SECRETS[2]}", f"--api-key={SECRETS[3]}"]
    of = Job(
        entrypoint=Entrypoint(script="train.py", args=args),
        log_dir=str(tmp_path / "runs"),
        nodes={"10.0.0.7": NodeRule(env={"DB_PASSWORD": SECRETS[1]})},
        env={"API_KEY": SECRETS[0], "A": "1"},
    )
    return replace(of, **settings)


def write_run_folder(of: Job) -> RunFolder:
    """Write the folder of a run in which a worker printed all secrets that it knows."""
    output = " ".join(SECRETS[:3])
    failure = Failure(
        attempt=1,
        node="node-1",
        rank=0,
        local_rank=0,
        pid=1,
        at=2.0,
        exit_code=1,
        error=WorkerError(type="HTTPError", message=f"401: {output}", traceback=f"HTTPError: 401: {output}"),
        tail=output,
    )
    folder = RunFolder.create(of, "1", print)
    folder.open(
        of, job_file.dump(Redactor.of(of, os.environ).shown(of)), make_plan(of, [NODE], local=False), BEGAN, 0.0
    )
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
    folder.close(folder.recorded.result.result(run_dir=folder.where, began=BEGAN))
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("layout", ["raylaunch", "torchrun"])
def test_only_the_user_may_read(tmp_path, layout):
    """Folders have mode 0700 and files 0600, whatever the umask allows."""
    folder = write_run_folder(job_with_secrets(tmp_path, log_layout=layout)).path
    assert mode(folder) == 0o700
    below = sorted(folder.rglob("*"))
    assert {path.name for path in below} > {"job.yaml", "plan.json", "events.jsonl", "result.json", "stacks.txt"}
    assert [path for path in below if mode(path) != (0o700 if path.is_dir() else 0o600)] == []


@pytest.mark.parametrize("layout", ["raylaunch", "torchrun"])
def test_git_and_ray_leave_out_a_new_log_dir(tmp_path, layout):
    """Ray would copy all old runs to the cluster with the working folder. A folder that was there is left as it is."""
    write_run_folder(job_with_secrets(tmp_path, log_layout=layout))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    found = subprocess.run(["git", "status", "--porcelain"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout == ""
    package = tmp_path / "package.zip"
    packaging.create_package(str(tmp_path), package, include_gitignore=True)
    assert [name for name in zipfile.ZipFile(package).namelist() if name.startswith("runs/")] in ([], ["runs/"])
    (tmp_path / "mine").mkdir()
    write_run_folder(job_with_secrets(tmp_path, log_layout=layout, log_dir=str(tmp_path / "mine")))
    assert not (tmp_path / "mine" / ".gitignore").exists()


def test_an_existing_log_dir_keeps_its_mode(tmp_path):
    """Several users may have their runs in it."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o775)
    assert mode(write_run_folder(job_with_secrets(tmp_path)).path) == 0o700
    assert mode(tmp_path / "runs") == 0o775


def test_no_secret_is_written(tmp_path):
    """Not even those that a worker printed; all files have `***` instead."""
    folder = write_run_folder(job_with_secrets(tmp_path)).path
    for file in (path for path in folder.rglob("*") if path.is_file()):
        assert [secret for secret in SECRETS if secret in file.read_text()] == [], file.name
    assert "API_KEY: '***'" in (folder / "job.yaml").read_text()
    assert "--url=https://x/***" in (folder / "job.yaml").read_text()
    (attempt,) = json.loads((folder / "result.json").read_text())["attempts"]
    assert attempt["failures"][0]["error"]["message"] == "401: *** *** ***"


def test_the_result_in_memory_is_not_redacted(tmp_path):
    """Whoever shows it replaces secrets."""
    (attempt,) = write_run_folder(job_with_secrets(tmp_path)).recorded.result.result().attempts
    assert SECRETS[0] in attempt.failures[0].error.message


def test_redacted_events_replay_to_the_same_decisions(tmp_path):
    """`events.jsonl` has `***` in place of secrets, and can be read and replayed."""
    folder = write_run_folder(job_with_secrets(tmp_path)).path
    of, entries = journal.read((folder / "events.jsonl").read_text().splitlines())
    assert of.env == {"API_KEY": "***", "A": "1"}
    assert of.nodes["10.0.0.7"].env == {"DB_PASSWORD": "***"}
    assert journal.replay(of, [entry.event for entry in entries if entry.event is not None]) == entries


def test_stacks_are_written_to_the_folder_of_the_attempt(tmp_path):
    """Whether or not that exists already on this machine."""
    folder = RunFolder.create(job_with_secrets(tmp_path), "1", print)
    (folder.path / "attempt-1").mkdir()
    for attempt in (1, 2):
        assert folder.write_stacks(attempt, "stacks") == str(folder.path / f"attempt-{attempt}" / "stacks.txt")
    folder.close(results.result([], run_dir=folder.where, began=BEGAN))
    for attempt in (1, 2):
        assert (folder.path / f"attempt-{attempt}" / "stacks.txt").read_text() == "stacks"
    assert sorted(path.name for path in (folder.path / "attempt-2").iterdir()) == ["stacks.txt"]


def test_stacks_that_cannot_be_written_do_not_end_the_run(tmp_path):
    """The user is told."""
    messages: list[str] = []
    folder = RunFolder.create(job_with_secrets(tmp_path), "1", messages.append)
    (folder.path / "attempt-1").write_text("")
    folder.write_stacks(1, "stacks")
    folder.close(results.result([], run_dir=folder.where, began=BEGAN))
    assert messages == [f"cannot write {folder.path}/attempt-1/stacks.txt: Not a directory; the run goes on without it"]


def test_no_stacks_are_written_without_a_log_dir(tmp_path):
    """With `log_dir: /dev/null`."""
    folder = RunFolder.create(job_with_secrets(tmp_path, log_dir="/dev/null"), "1", print)
    assert folder.write_stacks(1, "stacks") == ""


def test_a_disk_that_hangs_does_not_delay_the_run(tmp_path):
    """All entries are written in order once it works again, before the folder is closed."""
    of = job_with_secrets(tmp_path)
    folder = RunFolder.create(of, "1", print)
    os.mkfifo(folder.path / "events.jsonl")
    disk = os.open(folder.path / "events.jsonl", os.O_RDWR)  # and nothing reads from it
    folder.open(of, "", make_plan(of, [NODE], local=False), BEGAN, 0.0)
    entries = [JournalEntry(event=Tick(at=float(number)), actions=()) for number in range(3000)]
    for entry in entries:
        folder.append(entry)  # far more than a pipe holds
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(itertools.islice(os.fdopen(disk), 3001)))
    reader.start()
    folder.close(results.result([], run_dir=folder.where, began=BEGAN))
    reader.join()
    assert journal.read(lines)[1] == entries


def test_a_disk_that_hangs_for_long_does_not_fill_the_memory(tmp_path, monkeypatch):
    """The journal then ends with the entry that could still wait, and the result has all of them."""
    monkeypatch.setattr(run_folder, "MOST_WAITING", 100)
    of = job_with_secrets(tmp_path)
    messages: list[str] = []
    folder = RunFolder.create(of, "1", messages.append)
    blocked = folder.path / f".job.yaml.{os.getpid()}"
    os.mkfifo(blocked)  # the first file: its open waits for a reader
    folder.open(of, "", make_plan(of, [NODE], local=False), BEGAN, 0.0)
    for number in range(3000):
        folder.append(JournalEntry(event=Tick(at=float(number)), actions=()))
    why = "the file system does not answer; the run goes on without it"
    assert messages == [f"cannot write {folder.path}/events.jsonl: {why}"]
    reader = threading.Thread(target=blocked.read_text)
    reader.start()
    folder.close(folder.recorded.result.result(run_dir=folder.where, began=BEGAN))
    reader.join()
    _, written = journal.read((folder.path / "events.jsonl").read_text().splitlines())
    assert 90 < len(written) <= 100
    assert json.loads((folder.path / "result.json").read_text())["seconds"] == 2999.0


def test_a_disk_that_never_answers_does_not_keep_the_run(tmp_path, monkeypatch):
    """The end of the run waits for some seconds only, whatever is written to it, and says so."""
    monkeypatch.setattr(file_writer, "STALL_SECONDS", 0.05)
    of = job_with_secrets(tmp_path)
    messages: list[str] = []
    folder = RunFolder.create(of, "1", messages.append)
    os.mkfifo(folder.path / f".job.yaml.{os.getpid()}")  # the first file: its open waits for a reader
    folder.open(of, "", make_plan(of, [NODE], local=False), BEGAN, 0.0)
    folder.append(JournalEntry(event=Tick(at=1.0), actions=()))
    assert folder.write_stacks(1, "stacks") == str(folder.path / "attempt-1" / "stacks.txt")
    folder.close(results.result([], run_dir=folder.where, began=BEGAN))
    assert messages == [f"the file system of {folder.path} does not answer: what was written last is missing there"]


def test_latest_leads_to_the_newest_run(tmp_path):
    """It is replaced at once, and nothing is left of the way there."""
    first, second = (write_run_folder(job_with_secrets(tmp_path, name="night")) for _ in range(2))
    above = first.path.parent
    assert sorted(path.name for path in above.iterdir()) == sorted([first.path.name, second.path.name, "latest"])
    assert (above / "latest").readlink() == Path(second.path.name)
    assert (above / "latest" / "result.json").exists()


def test_latest_in_other_places(tmp_path, capfd):
    """torchrun has no such link; and where the name is taken, or links cannot be made, the run does not notice."""
    run = write_run_folder(job_with_secrets(tmp_path, log_layout="torchrun"))
    assert {path.name for path in run.path.parent.iterdir()} == {run.path.name, ".gitignore"}
    (tmp_path / "runs" / "night" / "latest" / "mine").mkdir(parents=True)
    run = write_run_folder(job_with_secrets(tmp_path, name="night"))
    assert sorted(path.name for path in run.path.parent.iterdir()) == sorted([run.path.name, "latest"])
    assert (run.path.parent / "latest" / "mine").is_dir()
    assert (run.path / "result.json").exists()
    assert capfd.readouterr() == ("", "")


def test_a_folder_whose_name_is_too_long(tmp_path):
    """Neither for one folder nor in all."""
    for log_dir in ("x" * 300, "x/" * 3000):
        with pytest.raises(ConfigError, match="File name too long"):
            RunFolder.create(job_with_secrets(tmp_path, log_dir=log_dir), "1", print)


def test_a_folder_that_cannot_be_made_in_time_does_not_keep_the_command(tmp_path, monkeypatch):
    """A signal interrupts the wait for the file system."""
    answered = threading.Event()
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: answered.wait())
    handler = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(InterruptedError))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptedError):
            RunFolder.create(job_with_secrets(tmp_path), "1", print)
    finally:
        signal.signal(signal.SIGALRM, handler)
        answered.set()


def test_links_are_not_followed(tmp_path):
    """What another user put there could lead to any file of this user."""
    of = job_with_secrets(tmp_path)
    messages: list[str] = []
    folder = RunFolder.create(of, "1", messages.append)
    (tmp_path / "mine").write_text("mine")
    (folder.path / "events.jsonl").symlink_to(tmp_path / "mine")
    (folder.path / f".job.yaml.{os.getpid()}").symlink_to(tmp_path / "mine")
    folder.open(of, "", make_plan(of, [NODE], local=False), BEGAN, 0.0)
    folder.close(results.result([], run_dir=folder.where, began=BEGAN))
    assert (tmp_path / "mine").read_text() == "mine"
    assert [message.partition(": ")[2] for message in messages] == [
        "Too many levels of symbolic links; the run goes on without it"
    ] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_a_stranger_put_into_a_shared_folder_is_not_used(tmp_path, kind):
    """They could replace it by a link at any time."""
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    for made in (shared, elsewhere):
        made.mkdir()
        made.chmod(0o1777)
    runs = shared / "runs"
    runs.mkdir() if kind == "folder" else runs.symlink_to(elsewhere)
    RunFolder.create(job_with_secrets(tmp_path, log_dir=str(runs)), "1", print)
    os.chown(runs, 12345, 12345, follow_symlinks=False)
    with pytest.raises(ConfigError, match=f"{runs} belongs to another user"):
        RunFolder.create(job_with_secrets(tmp_path, log_dir=str(runs)), "2", print)
    assert not list(tmp_path.rglob("2"))
    shared.chmod(0o755)  # now only the folder's owner can put something there
    RunFolder.create(job_with_secrets(tmp_path, log_dir=str(runs)), "2", print)


def test_a_full_disk_is_reported_once(tmp_path, monkeypatch):
    """The run continues, and the result has all entries."""
    really = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *more: really("/dev/full" if str(path).endswith("events.jsonl") else path, *more)
    )
    of = job_with_secrets(tmp_path)
    messages: list[str] = []
    folder = RunFolder.create(of, "1", messages.append)
    folder.open(of, "", make_plan(of, [NODE], local=False), BEGAN, 0.0)
    for number in range(10):
        folder.append(JournalEntry(event=Tick(at=float(number)), actions=()))
    folder.close(results.result([], run_dir=folder.where, began=BEGAN))
    assert messages == [f"cannot write {folder.path}/events.jsonl: No space left on device; the run goes on without it"]
    assert folder.recorded.result.result().seconds == 9.0


def test_text_that_is_not_utf8(tmp_path):
    """In arguments, names of hosts and exceptions: the files are JSON and YAML, and give the same texts back."""
    of = replace(
        job_with_secrets(tmp_path), name="caf\xe9", entrypoint=Entrypoint(script="train.py", args=["caf\udce9", "\x1b"])
    )
    folder = RunFolder.create(of, "1", pytest.fail)
    folder.open(of, job_file.dump(of), make_plan(of, [replace(NODE, address="h\udce9")], local=False), BEGAN, 0.0)
    entry = JournalEntry(event=NodeJoined(at=0.0, node="n\udce9", address="h\x9b", nproc=1), actions=())
    folder.append(entry)
    where = folder.write_stacks(1, "caf\udce9\x1b[2J\n")
    folder.close(results.result([entry], run_dir=folder.where, began=BEGAN))
    assert Path(where).read_bytes() == rb"caf\xe9\x1b[2J" + b"\n"
    lines = (folder.path / "events.jsonl").read_text(encoding="ascii").splitlines()
    assert journal.read(lines)[1] == [entry]
    assert json.loads((folder.path / "result.json").read_text())["addresses"] == {"n\udce9": "h\x9b"}
    assert "caf" in (folder.path / "job.yaml").read_text()


def test_an_entry_that_cannot_be_written_is_told_once(tmp_path):
    """It is a bug in raylaunch, and the run goes on."""
    of = job_with_secrets(tmp_path)
    messages: list[str] = []
    folder = RunFolder.create(of, "1", messages.append)
    folder.open(of, "", make_plan(of, [NODE], local=False), BEGAN, 0.0)
    for _ in range(3):
        folder.append(JournalEntry(event=NodeJoined(at=0.0, node=object(), address="", nproc=1), actions=()))
    folder.close(results.result([], run_dir=folder.where, began=BEGAN))
    (message,) = messages
    assert message.startswith(f"cannot write {folder.path}/events.jsonl: TypeError: ")
    assert (folder.path / "result.json").exists()


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_folder_can_have(tmp_path, name):
    """It is an error in the job, and not in raylaunch."""
    with pytest.raises(ConfigError, match="cannot make the run folder"):
        RunFolder.create(job_with_secrets(tmp_path, name=name), "1", print)


def test_a_working_folder_that_ray_has_replaced(tmp_path, monkeypatch):
    """The run folder is made in the folder that has the place of the old one."""
    (tmp_path / "files").mkdir()
    monkeypatch.chdir(tmp_path / "files")
    (tmp_path / "files").rmdir()
    (tmp_path / "files").mkdir()
    folder = RunFolder.create(Job(log_dir="runs"), "1", print)
    assert folder.path.parent.parent == tmp_path / "files" / "runs"
    assert folder.path.is_dir()
