"""Commands on a run of another machine, whose driver a test pretends to be."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from raylaunch.cli import main
from raylaunch.cli.runs import follow_logs, known_runs, run_reader
from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.cli.runs.worker_logs import LogChoice
from raylaunch.cluster.control import cluster_registry, control_server
from raylaunch.cluster.control.control_client import ControlClient, ControlError
from raylaunch.cluster.control.control_messages import (
    Accepted,
    ControlRequest,
    GetState,
    ListLogs,
    LogsListed,
    LogsRead,
    ReadLogs,
    RunState,
    StopRun,
)
from raylaunch.cluster.control.control_server import ControlServer
from raylaunch.cluster.driver.run_registry import RegisteredRun
from raylaunch.core.history.run_status import RunStatus, StatusBuilder
from raylaunch.core.machine.state import Phase
from raylaunch.core.record import journal
from raylaunch.errors import ExitCode
from raylaunch.node.logs.log_files import LogBlock, LogSpan
from tests.cli.runs.made_runs import NOBODY, REPLAYS, dead, make_folder

ROWS = (REPLAYS / "two-kills-then-finished.jsonl").read_text().splitlines()
HEADER, ENTRIES = journal.read_header(ROWS[0]), [journal.read_entry(row) for row in ROWS[1:]]


def status(count: int) -> RunStatus:
    """Return the status after so many entries of the journal."""
    builder = StatusBuilder(HEADER.job)
    for entry in ENTRIES[:count]:
        builder.add(entry)
    return builder.status(began=HEADER.began)


class Driver:
    """Answers for a run of which so many entries have happened."""

    def __init__(self) -> None:
        self.count = 5
        self.code: int | None = None
        self.result_code = 0
        self.stops: list[StopRun] = []
        self.log = b"one\ntwo\nthr"

    def answer(self, request: ControlRequest) -> object:
        match request:
            case GetState():
                ended = self.code is not None
                state = RunState(status=status(self.count), log_layout="raylaunch", keeps_logs=True)
                state = replace(state, ended=ended, exit_code=self.code, why="stopped" if ended else "")
                if request.wait and self.count == len(ENTRIES):
                    self.code = self.result_code
                elif request.wait:  # somebody follows: go on
                    self.log += b"ee\n"
                    self.count = len(ENTRIES)
                return state
            case StopRun():
                self.stops.append(request)
                self.code = 143
                return Accepted()
            case ListLogs():
                return LogsListed(
                    spans=(LogSpan(rank=2, stream="stdout", start=0, end=len(self.log)),), missing=("node-9",)
                )
            case ReadLogs():
                (span,) = request.spans
                block = LogBlock(rank=2, stream="stdout", start=span.start, data=self.log[span.start : span.end])
                return LogsRead(blocks=(block,), rest=())


@pytest.fixture
def driver(registry) -> Iterator[Driver]:
    """It drives the run `far` on the machine `host-1`, whose folder is not here."""
    found = Driver()
    server = ControlServer("127.0.0.1", found.answer)
    server.start()
    registry.add(
        "/on/host-1/far", name="a", driver=NOBODY, control=server.secret_address, user="ann", cluster="10.0.0.1:6379"
    )
    found.close, found.address = server.close, server.secret_address
    yield found
    server.close()


def test_it_is_listed_and_shown(driver, capsys):
    """As a run of this machine is."""
    assert main.main(["ps", "--json"]) == ExitCode.OK
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["state"], run["workers"], run["host"], run["user"], run["problem"]) == (
        "running",
        4,
        "host-1",
        "ann",
        "",
    )
    assert main.main(["status", "far"]) == ExitCode.OK
    assert "running, 4 workers on 2 nodes" in capsys.readouterr().out


@pytest.mark.parametrize("now", [False, True])
def test_it_is_stopped(driver, capsys, now):
    """And what came of it is told."""
    assert main.main(["stop", "-y", "far", *(["--now"] if now else [])]) == ExitCode.OK
    (stop,) = driver.stops
    assert (stop.at_once, stop.save_seconds) == (now, 600.0)
    assert "@" in stop.by
    how = "they are killed" if now else "they get SIGTERM"
    assert capsys.readouterr().err == (
        f"raylaunch: the workers of a far are to end: {how} (process 1234 on host-1)\n"
        "raylaunch: a far: stopped with exit code 143: stopped\n"
    )


def test_a_person_may_take_long_to_confirm(driver, capsys, monkeypatch):
    """The driver drops connections on which nothing is asked."""
    monkeypatch.setattr(control_server, "SLOW_SECONDS", 1.0)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdin.readline", lambda: time.sleep(2.0) or "y\n")
    assert main.main(["stop", "far"]) == ExitCode.OK
    assert "a far: stopped with exit code 143" in capsys.readouterr().err
    assert driver.stops


def test_its_logs(driver, capfd):
    """Through its driver; nodes that did not answer are named."""
    assert main.main(["logs", "far", "-n", "1"]) == ExitCode.OK
    out, err = capfd.readouterr()
    assert out == "[2] thr\n"
    assert "node-9 did not answer" in err


def test_its_logs_are_followed(driver, capfd):
    """Until it ends, with its exit code."""
    assert main.main(["logs", "far", "-f"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("[2] one\n[2] two\n[2] three\n")
    assert "a far: succeeded" in err


def test_a_driver_that_is_gone(driver, capsys):
    """Its run is lost: nobody listens where it did."""
    driver.close()
    assert main.main(["status", "far"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert shown.startswith("a far: lost")
    assert "its driver cannot be asked: nobody listens at 127.0.0.1" in shown
    assert main.main(["stop", "far"]) == ExitCode.OK
    assert "has ended already: lost" in capsys.readouterr().err


def test_a_run_of_another_user_is_meant_only_if_it_is_named(registry, driver, monkeypatch, capsys):
    """`raylaunch stop` stops none that somebody else has started."""
    (own,) = known_runs.run_registry.runs(registry.folder)
    theirs = replace(own, id="theirs", name="b", began="2027", user="bob")
    monkeypatch.setattr(cluster_registry, "runs", lambda _: [theirs, replace(theirs, id="newer", name="a")])
    assert known_runs.find(None, registry.environ).entry.id == "far"
    assert known_runs.find("a", registry.environ).entry.id == "far"
    assert known_runs.find("b", registry.environ).entry.id == "theirs"
    for path in registry.folder.iterdir():
        path.unlink()
    assert main.main(["stop", "-y"]) == ExitCode.USAGE
    assert "there is no run of this user yet" in capsys.readouterr().err
    assert driver.stops == []


def test_a_run_is_followed_until_its_result_is_written(driver, capfd):
    """Its exit code is that of the result: the end of the agents may still make the run fail."""
    driver.result_code = 3
    assert main.main(["logs", "-f", "far"]) == ExitCode.UNAVAILABLE
    assert "a far: failed with exit code 3" in capfd.readouterr().err


def test_what_was_told_of_the_end_stands(registry, driver, tmp_path, monkeypatch, capfd):
    """The driver is killed before its journal has the end: the exit code is what it had told."""
    (own,) = known_runs.run_registry.runs(registry.folder)
    folder = make_folder(tmp_path / "runs" / "a" / "near", lines=5)
    registry.add(folder, name="a", driver=NOBODY, control=own.control, cluster=own.cluster)

    class Client(ControlClient):
        def ask(self, request: ControlRequest) -> Any:
            if driver.count == 0:
                msg = "10.0.0.9 port 7 cannot be reached: timed out"
                raise ControlError(msg)
            found = super().ask(request)
            driver.count = 0 if isinstance(found, RunState) and found.status.phase is Phase.DONE else driver.count
            return found

    monkeypatch.setattr(run_reader, "ControlClient", Client)
    monkeypatch.setattr(follow_logs, "_RESULT_SECONDS", 0.5)
    assert main.main(["logs", "-f", "near"]) == ExitCode.OK
    assert "a near: succeeded" in capfd.readouterr().err


def test_a_driver_that_cannot_be_reached_for_a_while(driver, monkeypatch, capfd):
    """Its run is followed on when it can be asked again."""
    can_be_reached = iter((True, False, False))

    class Client(ControlClient):
        def ask(self, request: ControlRequest) -> Any:
            if isinstance(request, GetState) and not next(can_be_reached, True):
                msg = "10.0.0.9 port 7 cannot be reached: timed out"
                raise ControlError(msg)
            return super().ask(request)

    monkeypatch.setattr(run_reader, "ControlClient", Client)
    monkeypatch.setattr(run_reader, "RETRY_SECONDS", 0.01)
    assert main.main(["logs", "-f", "far"]) == ExitCode.OK
    out, err = capfd.readouterr()
    assert out.startswith("[2] one\n[2] two\n[2] three\n")
    assert "a far: succeeded" in err


def test_a_detached_run_without_a_driver_is_not_followed_into_another_attempt(registry, driver, tmp_path):
    """The last driver may have written that one begins when nobody knew yet: the next driver decides that anew."""
    make_folder(tmp_path / "run")
    (entry,) = known_runs.run_registry.runs(registry.folder)
    reader = RunReader(replace(entry, folder=str(tmp_path / "run")), lambda: entry)
    reader.refresh()
    assert (reader.is_asked, reader.awaits_logs) == (True, False)
    driver.close()
    reader.wait(0.0)
    assert (reader.is_asked, reader.is_gone, reader.awaits_logs) == (False, False, True)
    assert reader.no_driver == ""
    entry = replace(entry, no_driver="node-1 does not answer")
    reader.wait(0.0)
    assert reader.no_driver == "no driver is in command: node-1 does not answer"
    (tmp_path / "run" / "result.json").write_text('{"exit_code": 0}')
    assert not reader.awaits_logs
    reader.wait(0.0)
    assert reader.no_driver == ""
    reader.close()


def test_the_last_attempt_of_a_detached_run_is_seen_though_its_driver_is_gone(registry, driver, tmp_path):
    """The driver is gone with its agents before it could be asked again, and the result comes a moment later."""
    folder = make_folder(tmp_path / "run")
    (entry,) = known_runs.run_registry.runs(registry.folder)
    reader = RunReader(replace(entry, folder=str(folder), token="t"), lambda: entry)
    choice = LogChoice(streams=("stdout",), ranks=None, lines=0, is_prefixed=False)
    lines: list[bytes] = []
    follower = follow_logs.LogFollower(reader, choice, lines.extend, lambda _: None)
    for attempt in range(1, status(len(ENTRIES)).attempt + 1):
        log = folder / f"attempt-{attempt}" / "rank-0" / "stdout.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"of {attempt}\n")
    driver.log = b""
    assert not follower.step().is_over
    driver.close()
    reader.wait(0.0)
    shown = follower.step()
    assert (shown.is_over, b"".join(lines)) == (True, b"of 1\n")
    (folder / "result.json").write_text('{"exit_code": 0}')
    assert follower.end(shown) == 0
    assert b"".join(lines) == b"of 1\nof 2\nof 3\n"


@pytest.mark.parametrize(("has_begun", "asked"), [(False, 2), (True, 1)])
def test_a_driver_that_dies_before_it_has_answered(registry, driver, monkeypatch, has_begun, asked):
    """The next one is asked, unless it does already what the last one was asked for: else that would be done twice."""
    (entry,) = known_runs.run_registry.runs(registry.folder)
    reader = RunReader(replace(entry, folder=""), lambda: entry)
    driver.count = next(count for count in range(len(ENTRIES)) if status(count).phase is Phase.RUNNING)
    reader.refresh()
    known = reader.status()
    requests: list[ControlRequest] = []

    def ask(client: ControlClient, request: ControlRequest) -> Any:
        if not isinstance(request, GetState):
            requests.append(request)
        if len(requests) == 1 and reader.takeovers == 0:
            server = ControlServer("127.0.0.1", driver.answer)  # the next driver
            server.start()
            servers.append(server)
            nonlocal entry
            entry = replace(entry, control=server.secret_address)
            driver.close()
            if has_begun:
                driver.count = next(n for n in range(len(ENTRIES)) if status(n).attempt > known.attempt)
            msg = "the driver has closed the connection"
            raise ControlError(msg, is_gone=True)
        return original(client, request)

    servers: list[ControlServer] = []
    original = ControlClient.ask
    monkeypatch.setattr(ControlClient, "ask", ask)
    answer = reader.ask(StopRun())
    assert isinstance(answer, Accepted)
    assert (len(requests), len(driver.stops), reader.takeovers) == (asked, asked - 1, 1)
    assert answer.attempt == (known.attempt if has_begun else 0)
    reader.close()
    servers[0].close()


def test_a_driver_whose_machine_has_vanished(registry, driver, monkeypatch, capsys):
    """Nothing answers there. Its run is lost when its entry in the cluster has not been renewed for long."""

    def unreachable(_: object) -> None:
        msg = "10.0.0.9 port 7 cannot be reached: timed out"
        raise ControlError(msg)

    monkeypatch.setattr("raylaunch.cli.runs.run_reader.ControlClient", unreachable)
    (own,) = known_runs.run_registry.runs(registry.folder)
    forgotten: list[Any] = []
    monkeypatch.setattr(cluster_registry, "forget", forgotten.append)
    for age, state in ((60, "unknown"), (cluster_registry.STALE_SECONDS + 60, "lost")):
        entry = replace(own, renewed=time.time() - age)
        monkeypatch.setattr(cluster_registry, "runs", lambda _, entry=entry: [entry])
        assert main.main(["ps", "-a", "--json"]) == ExitCode.OK
        out, err = capsys.readouterr()
        assert ([run["state"] for run in json.loads(out)["runs"]], err) == ([state], "")
    assert forgotten == [{own.control}]


def test_runs_of_the_cluster_are_listed_once(registry, driver, monkeypatch, capsys):
    """Those that this user's registry has too. Those that are lost are removed from the cluster's."""
    (own,) = known_runs.run_registry.runs(registry.folder)
    other = replace(own, id="other", began="2027", user="bob")
    gone = replace(other, id="gone", control=replace(own.control, port=1), renewed=time.time())
    forgotten: list[Any] = []
    monkeypatch.setattr(cluster_registry, "runs", lambda _: [own, other, gone])
    monkeypatch.setattr(cluster_registry, "forget", forgotten.append)
    assert main.main(["ps", "--json"]) == ExitCode.OK
    out, err = capsys.readouterr()
    assert [run["id"] for run in json.loads(out)["runs"]] == ["other", "far"]
    assert err == "raylaunch: a gone of bob is lost: its driver is gone; it is listed no more\n"
    assert forgotten == [{gone.control}]
    assert main.main(["ps", "-a", "-n", "0"]) == ExitCode.OK
    assert "bob@host-1:/on/host-1/far" in capsys.readouterr().out


def test_a_driver_that_was_killed_on_this_machine(registry, driver, monkeypatch, capsys):
    """`ps` removes its entry from the cluster's registry. Nobody is asked, and a command that reads removes nothing."""
    (own,) = known_runs.run_registry.runs(registry.folder)
    killed = replace(own, id="killed", driver=dead(), renewed=time.time())
    forgotten: list[Any] = []
    monkeypatch.setattr(cluster_registry, "runs", lambda _: [own, killed])
    monkeypatch.setattr(cluster_registry, "forget", forgotten.append)
    (reader,) = (run for run in known_runs.all_runs(registry.environ) if run.entry.id == "killed")
    reader.refresh()
    with pytest.raises(ControlError, match="does not listen"):
        reader.ask(GetState())
    assert (reader.is_gone, reader.is_asked, reader.has_driver, forgotten) == (True, False, False, [])
    assert main.main(["ps", "-a", "--json"]) == ExitCode.OK
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["state"] for run in runs if run["id"] == "killed"] == ["lost"]
    assert forgotten == [{killed.control}]


def test_a_run_that_answers_after_it_was_not_known_is_known_again(tmp_path, monkeypatch):
    """Between two drivers, the head may know nothing of a run for a moment. Two such moments are no minute."""
    clock, is_there = [0.0], [True]

    class Client:
        def ask(self, request: ControlRequest) -> RunState:
            del request
            if not is_there[0]:
                raise ControlError("nobody listens", is_gone=True)
            return RunState(status=status(5), log_layout="raylaunch", keeps_logs=True)

        def close(self) -> None:
            pass

    monkeypatch.setattr(run_reader.time, "monotonic", lambda: clock[0])
    entry = RegisteredRun(id="x", name="x", folder=str(tmp_path))
    reader = RunReader(entry, find=lambda: None, client=Client())
    for seconds, there in ((0, True), (10, False), (20, True), (100, False)):
        clock[0], is_there[0] = float(seconds), there
        reader.refresh()
        assert not reader.is_gone, seconds
    clock[0] = 140.0
    reader.refresh()
    assert reader.is_gone
