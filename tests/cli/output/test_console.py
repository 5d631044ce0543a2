"""The console: output in order, no waiting for the terminal, and a count of what was dropped."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raylaunch.cli.output import async_writer, console
from raylaunch.cli.output.async_writer import AsyncWriter
from raylaunch.cli.output.console import Console
from raylaunch.core.failures.failure import Failure, WorkerError
from raylaunch.core.failures.stacks import StackGroup
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import (
    Cordon,
    DriverReplaced,
    Launch,
    NodeDraining,
    NodeGranted,
    NodeJoined,
    NodeLost,
    Progressed,
    RequestCheckpoint,
    ResizeRequested,
    RestartRequested,
    Scale,
    Stop,
    StopRequested,
    Uncordon,
    WorkersExited,
    WorkersHung,
    WorkersStarted,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.newtypes import HostId
from raylaunch.core.placement.plan import NodeFacts, make_plan
from raylaunch.core.record.journal import JournalEntry
from raylaunch.node.logs.tail import LogOutput

ROOT = Path(__file__).parents[3]
TOO_SMALL = "the nodes of the cluster have no room for this, even if nothing else ran"
FACTS = NodeFacts(node_id=HostId("ab"), address="10.0.0.7", cpus=4.0, gpus=0.0, free_cpus=0.0, free_gpus=0.0)


@pytest.mark.parametrize(
    ("workers", "settings", "said"),
    [
        (4, {}, ["waiting up to 300 s for free resources"]),
        (4, {"placement_timeout": float("inf")}, ["waiting for free resources"]),
        (16, {"placement_timeout": 60.0}, [TOO_SMALL, "waiting up to 60 s for other nodes to join"]),
    ],
)
def test_what_a_run_waits_for_at_its_start(capfd, workers, settings, said):
    """Free resources, where the nodes are large enough; else only another node helps."""
    job = Job(entrypoint=Entrypoint(script="train.py"), nproc_per_node=workers, **settings)
    shown = Console()
    shown.on_plan(job, make_plan(job, [FACTS], local=False), "")
    shown.close()
    lines = [line.removeprefix("raylaunch: ") for line in capfd.readouterr().err.splitlines()]
    assert lines[2 : 2 + len(said)] == said
    assert lines[2 + len(said)] == "  room for: 0 of 1 nodes"


class Screen(io.RawIOBase):
    """A terminal that accepts output, or blocks while `moves` is not set."""

    def __init__(self) -> None:
        self.text = b""
        self.moves = threading.Event()
        self.moves.set()
        self.busy = threading.Event()
        self.buffer = self

    def write(self, data: bytes) -> int:
        self.busy.set()
        self.moves.wait(200)
        self.text += bytes(data)
        return len(data)


@pytest.fixture
def screens() -> Iterator[tuple[Screen, Screen]]:
    found = (Screen(), Screen())
    yield found
    for screen in found:
        screen.moves.set()


def test_everything_arrives_in_order(screens):
    """Messages and the job's output keep their order on each stream."""
    out, err = screens
    writer = AsyncWriter(out, err)
    for number in range(100):
        writer.put("stdout", b"%d " % number)
        writer.put("stderr", b"%d-" % number)
        writer.say(b"%d;" % number)
    writer.close()
    assert out.text == b"".join(b"%d " % number for number in range(100))
    assert err.text == b"".join(b"%d-%d;" % (number, number) for number in range(100))


def test_dropped_output_is_counted_in_its_place(screens, monkeypatch):
    """`put` never waits; messages of raylaunch are never dropped."""
    monkeypatch.setattr(async_writer, "MAX_QUEUED", 100)
    out, err = screens
    out.moves.clear()
    writer = AsyncWriter(out, err)
    writer.put("stdout", b"a" * 60)
    for _ in range(10):
        writer.put("stdout", b"b" * 60)
    writer.put("stdout", b"c")  # would fit, but stands behind what is left out
    writer.say(b"ours\n")
    out.moves.set()
    _wait(lambda: b"ours" in err.text)
    writer.put("stdout", b"d")
    writer.close()
    assert out.text == b"a" * 60 + b"d"
    assert err.text == b"ours\nraylaunch: 601 bytes of output are not shown; the log files contain all of it\n"


def test_output_dropped_at_the_end_is_counted(screens, monkeypatch):
    """Without log files, none are mentioned."""
    monkeypatch.setattr(async_writer, "MAX_QUEUED", 100)
    out, err = screens
    out.moves.clear()
    writer = AsyncWriter(out, err)
    writer.has_log_files = False
    writer.put("stdout", b"a" * 100)
    writer.put("stdout", b"b")
    out.moves.set()
    writer.close()
    assert err.text == b"raylaunch: 1 bytes of output are not shown\n"


def test_a_slow_terminal_is_waited_for(screens, monkeypatch):
    """`close` waits as long as something is written, though it takes longer in all."""
    monkeypatch.setattr(async_writer, "CHUNK", 10)
    out, err = screens
    may_write, begun, joined = threading.Semaphore(0), [], []

    def write(data):
        begun.append(data)
        assert may_write.acquire(timeout=200)
        out.text += bytes(data)
        return len(data)

    class Thread(threading.Thread):
        def join(self, timeout=None):
            """Wait as long as one chunk takes: until the next one begins."""
            joined.append(timeout)
            before = len(begun)
            may_write.release()
            _wait(lambda: len(begun) > before or not self.is_alive())

    monkeypatch.setattr(async_writer.threading, "Thread", Thread)
    out.write = write
    writer = AsyncWriter(out, err)
    writer.put("stdout", b"x" * 150)
    _wait(lambda: begun)
    writer.close()
    assert joined == [async_writer.STALL_SECONDS] * 15
    assert out.text == b"x" * 150
    assert err.text == b""


def test_a_blocked_terminal_is_given_up(screens, monkeypatch):
    """The report still reaches stderr, with the count of what is missing on stdout."""
    monkeypatch.setattr(async_writer, "STALL_SECONDS", 0.1)
    out, err = screens
    out.moves.clear()
    writer = AsyncWriter(out, err)
    writer.put("stdout", b"a" * 10)
    out.busy.wait(200)
    writer.put("stdout", b"b" * 10)
    writer.put("stderr", b"oops\n")
    writer.say(b"the report\n")
    writer.close()
    assert err.text == (
        b"oops\nthe report\nraylaunch: 20 bytes of output are not shown; the log files contain all of it\n"
    )


PIPE = """
import sys
from raylaunch.cli.output import async_writer
async_writer.STALL_SECONDS = float(sys.argv[1])
writer = async_writer.AsyncWriter(sys.stdout, sys.stderr)
for _ in range(100):
    writer.put("stdout", b"line\\n" * 2000)
writer.say(b"the report\\n")
writer.close()
sys.exit(7)
"""


def _program(text: str, *arguments: str, **streams) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(text), *arguments], cwd=ROOT, **streams)


def test_a_pipe_that_nobody_reads():
    """The process ends with its own exit code and its messages on stderr, without an error of Python's."""
    process = _program(PIPE, "0.2", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    report, count = process.stderr.read().decode().splitlines()
    assert report == "the report"
    missing = re.fullmatch(r"raylaunch: (\d+) bytes of output are not shown; the log files contain all of it", count)
    assert 900_000 < int(missing[1]) <= 1_000_000
    assert process.wait(200) == 7
    process.stdout.close()
    process.stderr.close()


def test_a_pipe_that_is_closed():
    """After `| head -1` the rest of stdout is dropped without a message."""
    process = _program(PIPE, "200", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"the report\n"
    assert process.wait(200) == 7
    process.stderr.close()


def test_a_full_disk_under_stdout():
    """It is said once why the output is not there, and where it is."""
    with open("/dev/full", "wb") as full:
        process = _program(PIPE, "200", stdout=full, stderr=subprocess.PIPE)
    said = process.stderr.read().decode().splitlines()
    assert sorted(said) == [
        "raylaunch: stdout cannot be written: No space left on device; the log files contain all of it",
        "the report",
    ]
    assert process.wait(200) == 7
    process.stderr.close()


def test_a_pipe_that_others_made_nonblocking():
    """Another process that shares the terminal may do that."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    process = _program(PIPE, "200", stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    with open(ours, "rb") as file:
        assert file.read() == b"line\n" * 200_000
    assert process.wait(200) == 7


def test_streams_of_all_kinds(monkeypatch):
    """A notebook's stdout takes text; a closed stdout is None."""
    text = io.StringIO()
    writer = AsyncWriter(text, None)
    writer.put("stdout", b"caf\xc3\xa9 \xff\n")
    writer.say(b"nobody hears\n")
    writer.close()
    assert text.getvalue() == "café \ufffd\n"


@pytest.mark.parametrize(
    ("environ", "terminal", "coloured"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_when_there_is_colour(monkeypatch, environ, terminal, coloured):
    """The usual variables decide, else whether stderr is a terminal."""
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: terminal))
    assert console.is_coloured(environ) is coloured


def test_a_line_of_raylaunch(capsys, monkeypatch):
    """Without colour the line is plain; with colour the name is dim."""
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Console()
    plain.on_message("careful")
    plain.close()
    assert capsys.readouterr() == ("", "raylaunch: careful\n")
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = Console()
    coloured.on_message("careful")
    coloured.say("plain")
    coloured.close()
    assert capsys.readouterr().err == (
        "\x1b[2mraylaunch:\x1b[0m \x1b[33mcareful\x1b[0m\n\x1b[2mraylaunch:\x1b[0m plain\n"
    )


@pytest.mark.parametrize(
    ("encoding", "line"),
    [("utf-8", r"caf\xe9 café \x1b[2J\n\r".encode()), ("ascii", rb"caf\xe9 caf\xe9 \x1b[2J\n\r")],
)
def test_text_that_the_terminal_cannot_show(monkeypatch, encoding, line):
    """Bytes that are not UTF-8, control characters, and what the locale lacks are escaped; it is one line."""
    stderr = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stderr", stderr)
    found = Console()
    found.on_message("caf\udce9 café \x1b[2J\n\r")
    found.close()
    assert stderr.buffer.getvalue() == b"raylaunch: " + line + b"\n"


def test_a_long_line_is_capped(capsys):
    """Such as the text of an error in a module that could not be imported ahead."""
    shown = Console()
    shown.on_message("long " * 20_000)
    shown.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert 3900 < len(line) < 4200


def _lost(capsys, rank: int | None) -> str:
    """Return the line for the loss of node-2 (ranks 2 and 3) after output of `rank` was shown."""
    machine = Machine(Job(entrypoint=Entrypoint(script="train.py"), nnodes="1:2", nproc_per_node=2))
    shown = Console()
    for node in ("node-1", "node-2"):
        event = NodeJoined(at=0.0, node=node, address="10.0.0.1", nproc=2)
        actions = machine.handle(event)
        shown.on_entry(JournalEntry(event=event, actions=tuple(actions)), machine)
    assert any(isinstance(action, Launch) for action in actions)
    if rank is not None:
        shown.on_output([LogOutput(rank=rank, stream="stdout", data=b"line\n")])
    shown.on_entry(JournalEntry(event=NodeLost(at=1.0, node="node-2", why="its agent died"), actions=()), machine)
    shown.close()
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_lost_node_of_which_nothing_was_shown(capsys, rank):
    """If none of its output was shown, none is missing."""
    assert _lost(capsys, rank) == "raylaunch: node-2 was lost: its agent died"


@pytest.mark.parametrize("rank", [2, 3])
def test_a_lost_node_of_which_something_was_shown(capsys, rank):
    """If some of its output was shown, the last lines may be missing."""
    assert _lost(capsys, rank) == (
        "raylaunch: node-2 was lost: its agent died; the last lines of its workers may be missing here"
    )


# What changes in a run, line by line.


def _lines(capsys, *steps: tuple[Any, ...]) -> list[str]:
    """Return the lines for these events and actions of a machine that runs attempt 1 on node-1 and node-2."""
    job = Job(entrypoint=Entrypoint(script="train.py"), nnodes=2, nproc_per_node=2, max_restarts=3)
    machine, shown = Machine(job), Console()
    for at, node in enumerate(("node-1", "node-2"), 1):
        joined = NodeJoined(at=0.0, node=node, address=f"10.0.0.{at}", nproc=2)
        shown.on_entry(JournalEntry(event=joined, actions=tuple(machine.handle(joined))), machine)
    for event, *actions in steps:
        shown.on_entry(JournalEntry(event=event, actions=tuple(actions)), machine)
    shown.close()
    first, second, *lines = (line.removeprefix("raylaunch: ") for line in capsys.readouterr().err.splitlines())
    assert "node-1 (10.0.0.1) is ready" in first
    assert "node-2 (10.0.0.2) is ready" in second
    return lines


def _progressed(at: float, attempt: int = 1, **known) -> Progressed:
    body = {"marks": 1, "low": 0, "high": 0, "marked": at}
    return Progressed(at=at, attempt=attempt, **(body | known))


def test_granted_and_draining_nodes(capsys):
    """Granted and draining nodes get a line; a deadline that is far away is not shown."""
    granted = NodeGranted(at=1.0, node="node-3", address="10.0.0.3")
    soon = NodeDraining(at=10.0, node="node-2", deadline=40.0, why="preempted")
    some_time = NodeDraining(at=10.0, node="node-2", deadline=1e12, why="idle")
    past = NodeDraining(at=10.0, node="node-2", deadline=0.0, why="preempted")
    assert _lines(capsys, (granted,), (soon,), (some_time,), (past,)) == [
        "10.0.0.3: resources are reserved, the agent is starting",
        "node-2 is being drained and ends in 30 s: preempted",
        "node-2 is being drained: idle",
        "node-2 is being drained and ends in 0 s: preempted",
    ]


def test_what_people_requested(capsys):
    """It is the reason of what follows; if nothing follows at once, it gets a line of its own."""
    by = "ada@login-1"
    restart = RestartRequested(at=1.0, by=by, save_seconds=60.0)
    resize = ResizeRequested(at=2.0, by=by, min_nodes=2, max_nodes=4)
    end = StopRequested(at=3.0, signal="SIGTERM", by=by, save_seconds=60.0)
    why = f"{by} requested a restart"
    save = RequestCheckpoint(attempt=1, nodes=("node-1",), why=why)
    scale = Scale(nodes=4, why=f"{by} requested 2 to 4 nodes")
    assert _lines(capsys, (restart, save), (restart,), (resize, scale), (end,)) == [
        why,
        f"{by} requested 2 to 4 nodes",
        f"{by} requested the stop",
    ]


def test_what_a_second_signal_does(capsys):
    """It is said with the first one."""
    stop = Stop(attempt=1, nodes=("node-1",), grace=30.0, why="SIGINT received")
    assert _lines(capsys, (StopRequested(at=3.0, signal="SIGINT"), stop)) == [
        "stopping the workers, within 30 s: SIGINT received; another one kills them"
    ]


def test_a_reason_is_printed_once_per_attempt(capsys):
    """The reason is printed once, even if it leads to several actions; the next attempt prints it again."""
    why = "node-2 was lost: its agent died"
    lost = NodeLost(at=5.0, node="node-2", why="its agent died")
    stop = Stop(attempt=1, nodes=("node-1",), grace=30.0, why=why)
    launch = Launch(attempt=2, roster=("node-1",), why=why)
    assert _lines(capsys, (lost, stop), (None, launch), (None, stop), (None, launch)) == [
        why,
        f"stopping the workers, within 30 s: {why}",
    ]


def test_the_failure_that_ends_the_run(capsys):
    """The line says only who failed, since the report follows; before a restart it says what happened."""
    machine, shown = Machine(Job(entrypoint=Entrypoint(script="train.py"), nproc_per_node=2)), Console()
    error = WorkerError(type="ValueError", message="loss is NaN", traceback="")
    where = {"attempt": 1, "node": "node-1", "rank": 1, "local_rank": 1, "pid": 2}
    failed = Failure(**where, at=2.0, exit_code=1, error=error)
    for event in (
        NodeJoined(at=0.0, node="node-1", address="10.0.0.1", nproc=2),
        WorkersStarted(at=1.0, attempt=1, node="node-1", pids=(1, 2)),
        WorkersExited(at=2.0, attempt=1, node="node-1", failures=(failed,)),
    ):
        shown.on_entry(JournalEntry(event=event, actions=tuple(machine.handle(event))), machine)
    shown.close()
    assert capsys.readouterr().err.splitlines()[-1] == (
        "raylaunch: stopping the workers, within 30 s: rank 1 on node-1 failed"
    )


def test_nodes_granted_before_the_first_attempt(capsys):
    """Before the first attempt, only ready nodes get a line."""
    console, machine = Console(), Machine(Job(entrypoint=Entrypoint(script="train.py")))
    granted = NodeGranted(at=1.0, node="node-1", address="10.0.0.1")
    console.on_entry(JournalEntry(event=granted, actions=()), machine)
    console.close()
    assert capsys.readouterr().err == ""


def test_cordoned_hosts(capsys):
    """The reason is printed once, alone or with the next launch; the return of a host is printed, too."""
    why = "node-3 is left out for 60 s after 3 failures"
    shun = Cordon(host="f3", why=why)
    launch = Launch(attempt=2, roster=("node-1",), why=f"rank 4 on node-3 failed; restart 1 of 3; {why}")
    back = Uncordon(host="f3", why="10.0.0.3 may be used again: its time is over")
    assert _lines(capsys, (None, shun), (None, shun, launch), (None, back)) == [
        why,
        f"rank 4 on node-3 failed; restart 1 of 3; {why}",
        back.why,
    ]


WAITING = StackGroup(
    ranks=(0, 2, 3),
    frames=("/v/site-packages/torch/distributed/distributed_c10d.py:3 in all_reduce", "/job/train.py:41 in main"),
)


def test_a_hang(capsys):
    """The groups of workers are printed, the odd one first, and then the decision."""
    fetch = StackGroup(ranks=(1,), frames=("/job/train.py:33 in fetch",))
    event = WorkersHung(at=9.0, attempt=1, failures=(), groups=(fetch, WAITING))
    launch = Launch(attempt=2, roster=("node-1",), why="rank 1 on node-1 hung; restart 1 of 3")
    assert _lines(capsys, (event, launch)) == [
        "a worker hangs; this is what all workers are doing:",
        "  1 rank at train.py:33 in fetch: 1",
        "  3 ranks wait in all_reduce (train.py:41): 0, 2-3",
        "rank 1 on node-1 hung; restart 1 of 3",
    ]
    assert _lines(capsys, (event,)) == []  # nothing follows from it: it came too late


def test_a_hang_of_many_kinds(capsys):
    """Of many groups only some are printed."""
    groups = tuple(StackGroup(ranks=(rank,), frames=(f"/job/train.py:{rank} in f",)) for rank in range(20))
    stop = Stop(attempt=1, nodes=("node-1",), grace=0.0, why="hung")
    lines = _lines(capsys, (WorkersHung(at=9.0, attempt=1, failures=(), groups=groups), stop))
    assert len(lines) == 10
    assert lines[-1] == "  ... 12 more groups"


def test_the_cost_of_a_restart_is_printed_once(capsys):
    """It is printed after the first steps of the next attempt; the first attempt's steps are not."""
    steps = (
        _progressed(2.0),
        _progressed(40.0, marks=44, low=43, high=43, marked=39.0),
        _progressed(41.0, 2, marks=1, low=41, high=41, marked=39.9),
        _progressed(42.0, 2, marks=2, low=42, high=42),
    )
    assert _lines(capsys, *((step,) for step in steps)) == ["training resumed at step 41 after 0.90 s, 3 steps lost"]


def test_a_restart_of_steps_without_numbers(capsys):
    """Without step numbers, only the pause is printed."""
    unknown = {"low": None, "high": None}
    steps = (_progressed(2.0, **unknown), _progressed(3.0, 2, marked=2.5, **unknown), _progressed(9.0, 2, **unknown))
    assert _lines(capsys, *((step,) for step in steps)) == ["training resumed after 0.50 s"]


def test_a_takeover(capsys):
    """How long nobody was in command, by phase."""
    taken = DriverReplaced(
        at=6.0, driver=2, process_seconds=0.9, state_seconds=0.1, prepare_seconds=0.02, agents_seconds=0.2
    )
    (line,) = _lines(capsys, (taken,))
    assert line.startswith("driver 2 is in command after 1.2 s: 0.90 s until its process ran, 0.10 s for the state, ")


def test_progress_is_printed_once_a_minute(capsys):
    """The step is printed once a minute, with the slowest rank if it is behind."""
    steps = (
        _progressed(2.0),
        *(_progressed(2.0 + second, low=second, high=second, rate=12.34) for second in range(1, 125)),
        _progressed(190.0, low=1190, high=1200, slowest=3, rate=0.5),
        _progressed(250.0, low=1200, high=1200, rate=0.0),
    )
    assert _lines(capsys, *((step,) for step in steps)) == [
        "step 59, 12.3 steps/s",
        "step 118, 12.3 steps/s",
        "step 1200, 2.0 s per step, slowest rank 3 at step 1190",
        "step 1200, no progress",
    ]


def test_progress_of_steps_without_numbers(capsys):
    """SGD and a loop of heartbeats tell no step numbers: the steps of the attempt are counted."""
    unknown = {"low": None, "high": None}
    steps = (
        _progressed(2.0, **unknown),
        _progressed(62.0, marks=1_234_567, rate=200.0, **unknown),
        _progressed(90.0, marks=1_300_000, rate=200.0, **unknown),
        _progressed(130.0, marks=1_300_000, rate=0.0, saved=7, **unknown),
        _progressed(140.0, 2, marked=139.0, **unknown),
        _progressed(200.0, 2, marks=30, rate=0.5, **unknown),
    )
    assert _lines(capsys, *((step,) for step in steps)) == [
        "1234567 steps in this attempt, 200.0 steps/s",
        "1300000 steps in this attempt, no progress",
        "training resumed after 9.0 s",
        "30 steps in this attempt, 2.0 s per step",
    ]


def _wait(condition: Callable[[], object]) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    pytest.fail("waited in vain")
