"""`raylaunch logs`, of runs that have ended and of one that goes on."""

from __future__ import annotations

import json
import os
import struct
from datetime import timedelta

import pytest

from raylaunch.cli import main
from raylaunch.cli.runs import known_runs
from raylaunch.cli.runs.follow_logs import LogFollower
from raylaunch.cli.runs.worker_logs import LogChoice
from raylaunch.core.machine.state import Phase
from raylaunch.core.record import journal
from raylaunch.errors import ExitCode
from tests.cli.runs.made_runs import BEGAN, NOBODY, REPLAYS, dead, make_folder


def write_logs(folder, attempts, ranks=4):
    for attempt in attempts:
        for rank in range(ranks):
            where = folder / f"attempt-{attempt}" / f"rank-{rank}"
            where.mkdir(parents=True)
            (where / "stdout.log").write_text("".join(f"{attempt}.{rank} line {line}\n" for line in range(3)))
            (where / "stderr.log").write_text(f"{attempt}.{rank} wrong\n")


@pytest.fixture
def ended(registry, tmp_path):
    """A run with three attempts of four ranks, of which rank 3 has failed."""
    folder = make_folder(tmp_path / "runs" / "a" / "ended", "budget-spent", result=True)
    write_logs(folder, (1, 2, 3))
    registry.add(folder)
    return registry


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("-n 1 --rank 0,2-3 --stdout", "[0] 3.0 line 2\n[2] 3.2 line 2\n[3] 3.3 line 2\n"),
        ("--rank 1", "3.1 line 0\n3.1 line 1\n3.1 line 2\n3.1 wrong\n"),
        ("-p --stderr --rank 0-1", "[0] 2.0 wrong\n[1] 2.1 wrong\n"),
        ("--attempt 1 --stderr --rank 0-1 --no-prefix", "1.0 wrong\n1.1 wrong\n"),
        ("--grep [12]$ -n 1 --rank 0", "3.0 line 2\n"),
        ("--grep [12]$ -n all --rank 0", "3.0 line 1\n3.0 line 2\n"),
        ("--failed --stderr", "3.3 wrong\n"),
        ("--rank 9", ""),
    ],
)
def test_lines_of_a_run(ended, capfd, arguments, expected):
    """Of the last attempt or another one, of some ranks and streams, and so many."""
    assert main.main(["logs", "ended", *arguments.split()]) == ExitCode.OK
    out, err = capfd.readouterr()
    assert out == expected
    assert ("no such files" in err) == (arguments == "--rank 9")
    assert ("rank 3 on node-2 raised ValueError" in err) == ("--failed" in arguments)


def note_times(folder, attempt, rank, *entries):
    """Note up to which byte of stdout all had been written at which second of 2026."""
    packed = b"".join(struct.pack("<Qd", size, BEGAN.timestamp() + at) for size, at in entries)
    path = folder / f"attempt-{attempt}" / f"rank-{rank}" / "stdout.times"
    path.write_bytes(packed)
    os.utime(path.with_suffix(".log"), (BEGAN.timestamp() + entries[-1][1],) * 2)


def test_times_of_lines(ended, tmp_path, capfd):
    """In UTC, after the rank; `-` where they are not known. With `--json` each line is an object."""
    folder = tmp_path / "runs" / "a" / "ended"
    (folder / "attempt-3" / "rank-1" / "stdout.log").write_bytes(b"caf\xe9\r\nlast")
    note_times(folder, 3, 0, (11, 1.0), (22, 61.25), (33, 3600.0))
    note_times(folder, 3, 1, (6, 1.5), (10, 2.0))
    os.utime(folder / "attempt-3" / "rank-0" / "stderr.log", (0, 0))

    def shown(*arguments: str) -> list[str]:
        assert main.main(["logs", "ended", "--rank", "0-1", *arguments]) == ExitCode.OK
        return capfd.readouterr().out.splitlines()

    assert shown("-t", "--stdout")[:3] == [
        "[0] 2026-01-01T00:00:01.000Z 3.0 line 0",
        "[0] 2026-01-01T00:01:01.250Z 3.0 line 1",
        "[0] 2026-01-01T01:00:00.000Z 3.0 line 2",
    ]
    assert shown("-t", "--stderr")[0] == "[0] - 3.0 wrong"
    assert shown("-t", "--stdout", "--since", "2026-01-01T00:00:02Z", "--grep", "[01ts]$", "--no-prefix") == [
        "2026-01-01T00:01:01.250Z 3.0 line 1",
        "2026-01-01T00:00:02.000Z last",
    ]
    assert shown("--stdout", "--since", "10m") == []
    one, two = map(json.loads, shown("--json", "--stdout", "--since", "2026-01-01T00:00:01.5+00:00", "-n", "2")[2:])
    facts = {"attempt": 3, "rank": 1, "stream": "stdout"}
    assert one == {**facts, "time": "2026-01-01T00:00:01.500Z", "line": "caf\ufffd"}
    assert two == {**facts, "time": "2026-01-01T00:00:02.000Z", "line": "last"}
    unknown = [json.loads(line)["time"] for line in shown("--json", "--stderr")]
    assert unknown[0] is None


def test_all_logs_are_copied(ended, tmp_path, capfd):
    """Of all attempts, in folders like those of the run."""
    target = tmp_path / "new" / "copy"
    assert main.main(["logs", "ended", "--sync-down", str(target), "--rank", "1-2"]) == ExitCode.OK
    assert capfd.readouterr().err == f"raylaunch: copied 12 log files of a ended to {target}\n"
    assert (target / "attempt-3" / "rank-1" / "stdout.log").read_text() == "3.1 line 0\n3.1 line 1\n3.1 line 2\n"
    assert not (target / "attempt-3" / "rank-3").exists()
    (tmp_path / "file").touch()
    assert main.main(["logs", "ended", "--sync-down", str(tmp_path / "file")]) == ExitCode.USAGE
    assert "cannot copy the logs" in capfd.readouterr().err
    assert main.main(["logs", "ended", "--sync-down", "x", "-f"]) == ExitCode.USAGE


def test_copies_are_as_private_as_the_logs(ended, tmp_path, monkeypatch):
    """Whatever the umask; they take the place of files that are there."""
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "copy"
    old = target / "attempt-3" / "rank-1" / "stdout.log"
    old.parent.mkdir(parents=True)
    old.write_text("an earlier copy, which is longer than the file\n" * 100)
    old.chmod(0o666)
    umask = os.umask(0)
    try:
        assert main.main(["logs", "ended", "--sync-down", "copy"]) == ExitCode.OK
    finally:
        os.umask(umask)
    assert old.read_text() == "3.1 line 0\n3.1 line 1\n3.1 line 2\n"
    assert {oct(path.stat().st_mode & 0o777) for path in target.rglob("*.log")} == {"0o600"}
    made = [path for path in target.rglob("*-*") if path.is_dir() and path not in old.parents]
    assert {oct(path.stat().st_mode & 0o777) for path in made} == {"0o700"}
    assert list(target.rglob(".*")) == []


@pytest.mark.parametrize("which", ["attempt-3", "attempt-3/rank-1", "attempt-3/rank-1/stdout.log"])
def test_a_copy_goes_through_no_link(ended, tmp_path, which, capfd):
    """Another user may have put one into the folder: a link in place of a folder is refused, one of a file replaced."""
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "mine").write_text("precious")
    link = tmp_path / "copy" / which
    link.parent.mkdir(parents=True)
    is_file = which.endswith(".log")
    link.symlink_to(victim / "mine" if is_file else victim)
    code = main.main(["logs", "ended", "--sync-down", str(tmp_path / "copy"), "--rank", "1"])
    assert code == (ExitCode.OK if is_file else ExitCode.USAGE)
    assert is_file or "cannot copy the logs" in capfd.readouterr().err
    assert [*victim.rglob("*")] == [victim / "mine"]
    assert (victim / "mine").read_text() == "precious"
    assert not (is_file and link.is_symlink())


def test_a_copy_goes_to_the_folder_that_a_link_names(ended, tmp_path):
    """The user has named the link."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert main.main(["logs", "ended", "--sync-down", str(tmp_path / "link")]) == ExitCode.OK
    assert (tmp_path / "real" / "attempt-3" / "rank-1" / "stdout.log").is_file()


def test_nobody_has_failed(registry, tmp_path, capfd):
    """It is said."""
    registry.add(make_folder(tmp_path / "runs" / "a" / "b", "interrupted-twice"))
    assert main.main(["logs", "--failed"]) == ExitCode.OK
    assert capfd.readouterr().err == "raylaunch: no worker of a b has failed\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--rank x", "`x` is not a list of ranks"),
        ("-n x", "`--tail` must be a number or `all`"),
        ("--grep (", "`(` is no regular expression"),
        ("--attempt 4", "there is no attempt 4"),
        ("--attempt 0", "there is no attempt 0"),
        ("-f -p", "exclude each other"),
        ("--failed --rank 3", "exclude each other"),
        ("--since x", "`x` is no time"),
        ("--since 10", "`10` is no time"),
        ("--sync-down x -t", "copies the files of all attempts whole"),
    ],
)
def test_wrong_arguments(ended, capfd, arguments, said):
    """The exit code is 2."""
    assert main.main(["logs", *arguments.split()]) == ExitCode.USAGE
    assert said in capfd.readouterr().err


def test_a_run_without_logs(registry, tmp_path, capfd):
    """Without a folder, without a journal, and before its first attempt."""
    registry.add("")
    assert main.main(["logs"]) == ExitCode.USAGE
    assert "the run keeps no files" in capfd.readouterr().err
    registry.add(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    assert main.main(["logs"]) == ExitCode.USAGE
    assert "nothing was written yet" in capfd.readouterr().err
    registry.add(make_folder(tmp_path / "waits", lines=2), driver=NOBODY)
    for flags in ([], ["-p"]):
        assert main.main(["logs", *flags]) == ExitCode.USAGE
        assert "the run has no logs of workers" in capfd.readouterr().err


def test_a_run_is_followed_over_its_restarts(registry, tmp_path, capfd, monkeypatch):
    """Each file from where it was; further attempts from their beginning; at the end its exit code."""
    lines = (REPLAYS / "budget-spent.jsonl").read_text().splitlines(keepends=True)
    folder = make_folder(tmp_path / "runs" / "a" / "b", "budget-spent", lines=5)
    registry.add(folder, driver=NOBODY)
    write_logs(folder, (1,), 1)

    def first() -> None:
        (folder / "attempt-1" / "rank-0" / "stdout.log").open("a").write("more")

    def second() -> None:
        write_logs(folder, (2,), 2)
        (folder / "events.jsonl").open("a").write("".join(lines[5:10]))

    def last() -> None:
        (folder / "attempt-2" / "rank-0" / "stdout.log").open("a").write("the last\n")
        (folder / "events.jsonl").open("a").write("".join(lines[10:]))

    steps = iter((first, second, last))
    monkeypatch.setattr("time.sleep", lambda _: next(steps)())
    assert main.main(["logs", "-f", "-n", "1", "--stdout"]) == 1
    out, err = capfd.readouterr()
    both = "".join(f"[{rank}] 2.{rank} line {line}\n" for rank in (0, 1) for line in range(3))
    assert out == f"[0] 1.0 line 2\n[0] more\n{both}[0] the last\n"
    assert err.splitlines()[:2] == ["raylaunch: attempt 2 begins", "raylaunch: attempt 3 begins"]
    assert "a b: failed with exit code 1: rank 3 on node-2 raised ValueError" in err


@pytest.mark.parametrize(("since", "attempts"), [(0.0, (1, 2, 3)), (1e6, (3,))])
def test_a_run_is_followed_from_a_time_on(ended, tmp_path, capfd, since, attempts):
    """From the attempt on in which the time falls."""
    for path in tmp_path.rglob("stdout.log"):
        os.utime(path, (BEGAN.timestamp() + 2e6,) * 2)
    when = (BEGAN + timedelta(seconds=since)).isoformat()
    assert main.main(["logs", "-f", "--since", when, "--rank", "0", "--stdout"]) == 1
    assert [line for line in capfd.readouterr().out.splitlines() if line.endswith("2")] == [
        f"{attempt}.0 line 2" for attempt in attempts
    ]


def test_a_run_that_is_lost_while_it_is_followed(registry, tmp_path, capfd, monkeypatch):
    """The exit code is 4; after Ctrl-C it is 130, and the run goes on."""
    run = registry.add(make_folder(tmp_path / "runs" / "a" / "b", lines=5), driver=dead())
    assert main.main(["logs", "-f"]) == ExitCode.INTERNAL
    assert f"{run.name} {run.id}: lost: its driver is gone" in capfd.readouterr().err
    registry.add(make_folder(tmp_path / "runs" / "a" / "c", lines=5), driver=NOBODY)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    assert main.main(["logs", "-f"]) == ExitCode.INTERRUPTED
    assert capfd.readouterr().err == "raylaunch: a c goes on; `raylaunch stop c` stops it\n"


def test_what_workers_write_while_the_next_attempt_starts(registry, tmp_path):
    """It is shown: they are ended a moment after the next attempt was decided."""
    lines = (REPLAYS / "two-kills-then-finished.jsonl").read_text().splitlines(keepends=True)
    _, entries = journal.read(lines)
    begins = next(n for n, entry in enumerate(entries) for one in entry.actions if getattr(one, "attempt", 0) == 2)
    folder = make_folder(tmp_path / "runs" / "a" / "b", lines=begins + 1)
    log = folder / "attempt-1" / "rank-0" / "stdout.log"
    log.parent.mkdir(parents=True)
    log.write_text("first\n")
    registry.add(folder)
    seen: list[bytes] = []
    choice = LogChoice(streams=("stdout",), ranks=None, lines=9, is_prefixed=False)
    follower = LogFollower(known_runs.find("b", registry.environ), choice, seen.extend, lambda _: None)
    follower.step()
    (folder / "events.jsonl").write_text("".join(lines[: begins + 2]))
    assert follower.step().state == Phase.STARTING
    with log.open("a") as file:
        file.write("last\n")
    (folder / "events.jsonl").write_text("".join(lines))
    (folder / "result.json").write_text('{"exit_code": 0}')
    follower.end(follower.step())
    assert b"".join(seen) == b"first\nlast\n"
