"""The terminal: in order, never in the way of the run, and honest about what it left out."""

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

import pytest

from raylaunch.cli import console, writer
from raylaunch.cli.console import Console
from raylaunch.cli.writer import OutputWriter
from raylaunch.core.actions import Action, AskCheckpoint, Launch, Readmit, Shun, Stop
from raylaunch.core.events import (
    Event,
    NodeDraining,
    NodeGranted,
    NodeJoined,
    NodeLost,
    Progressed,
    WorkersHung,
)
from raylaunch.core.job import Entrypoint, Job
from raylaunch.core.journal import Entry
from raylaunch.core.machine import Machine
from raylaunch.core.stacks import StackGroup
from raylaunch.node.logs import Output

ROOT = Path(__file__).parents[2]


class Screen(io.RawIOBase):
    """A terminal that takes what it is given, or stands still."""

    def __init__(self) -> None:
        self.text = b""
        self.moves = threading.Event()
        self.moves.set()
        self.busy = threading.Event()
        self.buffer = self

    def write(self, data: bytes) -> int:
        self.busy.set()
        self.moves.wait(20)
        self.text += bytes(data)
        return len(data)


@pytest.fixture
def screens() -> Iterator[tuple[Screen, Screen]]:
    found = (Screen(), Screen())
    yield found
    for screen in found:
        screen.moves.set()


def test_everything_arrives_in_order(screens):
    """Ours and the job's, on each stream."""
    out, err = screens
    paper = OutputWriter(out, err)
    for number in range(100):
        paper.put("stdout", b"%d " % number)
        paper.put("stderr", b"%d-" % number)
        paper.say(b"%d;" % number)
    paper.close()
    assert out.text == b"".join(b"%d " % number for number in range(100))
    assert err.text == b"".join(b"%d-%d;" % (number, number) for number in range(100))


def test_what_a_slow_terminal_leaves_out_is_said_in_its_place(screens, monkeypatch):
    """`put` never waits; words of ours are never left out."""
    monkeypatch.setattr(writer, "_MOST_WAITING", 100)
    out, err = screens
    out.moves.clear()
    paper = OutputWriter(out, err)
    paper.put("stdout", b"a" * 60)
    for _ in range(10):
        paper.put("stdout", b"b" * 60)
    paper.put("stdout", b"c")  # would fit, but stands behind what is left out
    paper.say(b"ours\n")
    out.moves.set()
    _wait(lambda: b"ours" in err.text)
    paper.put("stdout", b"d")
    paper.close()
    assert out.text == b"a" * 60 + b"d"
    assert err.text == b"ours\nraylaunch: 601 bytes of output are not shown; the log files have all of it\n"


def test_what_is_left_out_at_the_end_is_said_too(screens, monkeypatch):
    """And where nothing is kept, no log file is promised."""
    monkeypatch.setattr(writer, "_MOST_WAITING", 100)
    out, err = screens
    out.moves.clear()
    paper = OutputWriter(out, err)
    paper.kept = False
    paper.put("stdout", b"a" * 100)
    paper.put("stdout", b"b")
    out.moves.set()
    paper.close()
    assert err.text == b"raylaunch: 1 bytes of output are not shown\n"


def test_a_terminal_that_moves_is_waited_for(screens, monkeypatch):
    """However slowly it does."""
    monkeypatch.setattr(writer, "_STANDSTILL_SECONDS", 0.2)
    monkeypatch.setattr(writer, "_PIECE", 10)
    out, err = screens
    slow = threading.Event()

    def write(data):
        slow.wait(0.1)
        out.text += bytes(data)
        return len(data)

    out.write = write
    paper = OutputWriter(out, err)
    paper.put("stdout", b"x" * 100)
    paper.close()
    assert out.text == b"x" * 100
    assert err.text == b""


def test_a_terminal_that_stands_still_is_left(screens, monkeypatch):
    """The report reaches stderr all the same, with the count of what is missing on stdout."""
    monkeypatch.setattr(writer, "_STANDSTILL_SECONDS", 0.1)
    out, err = screens
    out.moves.clear()
    paper = OutputWriter(out, err)
    paper.put("stdout", b"a" * 10)
    out.busy.wait(10)
    paper.put("stdout", b"b" * 10)
    paper.put("stderr", b"oops\n")
    paper.say(b"the report\n")
    paper.close()
    assert err.text == (
        b"oops\nthe report\nraylaunch: 20 bytes of output are not shown; the log files have all of it\n"
    )


PIPE = """
import sys
from raylaunch.cli import writer
writer._STANDSTILL_SECONDS = 0.2
paper = writer.OutputWriter(sys.stdout, sys.stderr)
for _ in range(100):
    paper.put("stdout", b"line\\n" * 2000)
paper.say(b"the report\\n")
paper.close()
sys.exit(7)
"""


def _program(text: str, **streams) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(text)], cwd=ROOT, **streams)


def test_a_pipe_that_nobody_reads():
    """The process ends with its own exit code, its words on stderr, and without Python's complaints."""
    process = _program(PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    report, count = process.stderr.read().decode().splitlines()
    assert report == "the report"
    missing = re.fullmatch(r"raylaunch: (\d+) bytes of output are not shown; the log files have all of it", count)
    assert 900_000 < int(missing[1]) < 1_000_000
    assert process.wait(20) == 7
    process.stdout.close()
    process.stderr.close()


def test_a_pipe_that_is_closed():
    """`| head -1`: the rest of stdout goes nowhere, and that is nobody's business."""
    process = _program(PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b"the report\n"
    assert process.wait(20) == 7
    process.stderr.close()


def test_a_pipe_that_others_made_nonblocking():
    """Some who share a terminal do that."""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    process = _program(PIPE, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    with open(ours, "rb") as file:
        assert file.read() == b"line\n" * 200_000
    assert process.wait(20) == 7


def test_streams_of_all_kinds(monkeypatch):
    """A notebook's stdout takes texts; a closed one is nothing at all."""
    text = io.StringIO()
    paper = OutputWriter(text, None)
    paper.put("stdout", b"caf\xc3\xa9 \xff\n")
    paper.say(b"nobody hears\n")
    paper.close()
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
def test_when_there_is_colour(environ, terminal, coloured):
    """By the usual variables, else on a terminal only."""
    assert console.is_coloured(environ, is_terminal=terminal) is coloured


def test_a_line_of_ours(capsys, monkeypatch):
    """Plain without colour; else its name is dim."""
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Console()
    plain.said("careful")
    plain.close()
    assert capsys.readouterr() == ("", "raylaunch: careful\n")
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = Console()
    coloured.said("careful")
    coloured.say("plain")
    coloured.close()
    assert capsys.readouterr().err == (
        "\x1b[2mraylaunch:\x1b[0m \x1b[33mcareful\x1b[0m\n\x1b[2mraylaunch:\x1b[0m plain\n"
    )


def _lost(capsys, rank: int | None) -> str:
    """What is said of node-2, which ran ranks 2 and 3, when some output of that rank was shown."""
    machine = Machine(Job(entrypoint=Entrypoint(script="train.py"), nnodes="1:2", nproc_per_node=2))
    shown = Console()
    for node in ("node-1", "node-2"):
        event = NodeJoined(at=0.0, node=node, address="10.0.0.1", nproc=2)
        actions = machine.handle(event)
        shown.decided(Entry(event=event, actions=tuple(actions)), machine)
    assert any(isinstance(action, Launch) for action in actions)
    if rank is not None:
        shown.wrote([Output(rank=rank, stream="stdout", data=b"line\n")])
    shown.decided(Entry(event=NodeLost(at=1.0, node="node-2", why="its agent died"), actions=()), machine)
    shown.close()
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_lost_node_of_which_nothing_was_shown(capsys, rank):
    """Then nothing is missing."""
    assert _lost(capsys, rank) == "raylaunch: node-2 was lost: its agent died"


@pytest.mark.parametrize("rank", [2, 3])
def test_a_lost_node_of_which_something_was_shown(capsys, rank):
    """Its last output is in its files alone."""
    assert _lost(capsys, rank) == (
        "raylaunch: node-2 was lost: its agent died; the last lines of its workers may be missing here"
    )


# What changes in a run, line by line.


def _lines(capsys, *steps: tuple[Event | None, *tuple[Action, ...]]) -> list[str]:
    """What is said of these steps, of a machine that runs attempt 1 on node-1 and node-2."""
    job = Job(entrypoint=Entrypoint(script="train.py"), nnodes=2, nproc_per_node=2, max_restarts=3)
    machine = Machine(job)
    for at, node in enumerate(("node-1", "node-2"), 1):
        machine.handle(NodeJoined(at=0.0, node=node, address=f"10.0.0.{at}", nproc=2))
    shown = Console()
    shown._phase = machine.phase
    for event, *actions in steps:
        shown.decided(Entry(event=event, actions=tuple(actions)), machine)
    shown.close()
    return [line.removeprefix("raylaunch: ") for line in capsys.readouterr().err.splitlines()]


def _progressed(at: float, attempt: int = 1, **known) -> Progressed:
    body = {"marks": 1, "low": 0, "high": 0, "marked": at}
    return Progressed(at=at, attempt=attempt, **(body | known))


def test_nodes_that_come_and_go(capsys):
    """That a place was granted, that a node will go, and when; a deadline that is far away is none."""
    granted = NodeGranted(at=1.0, node="node-3", address="10.0.0.3")
    soon = NodeDraining(at=10.0, node="node-2", deadline=40.0, why="preempted")
    some_time = NodeDraining(at=10.0, node="node-2", deadline=1e12, why="idle")
    past = NodeDraining(at=10.0, node="node-2", deadline=0.0, why="preempted")
    assert _lines(capsys, (granted,), (soon,), (some_time,), (past,)) == [
        "10.0.0.3 is granted; its agent is starting",
        "node-2 is being drained, gone in 30 s: preempted",
        "node-2 is being drained: idle",
        "node-2 is being drained, gone in 0 s: preempted",
    ]


def test_a_planned_change(capsys):
    """The workers are asked before they are stopped."""
    ask = AskCheckpoint(attempt=1, nodes=("node-1",), why="nodes joined")
    assert _lines(capsys, (None, ask)) == ["asking the workers to save: nodes joined"]


def test_a_reason_is_said_once_for_each_attempt(capsys):
    """However many orders it leads to; the next attempt may end for the same one."""
    why = "node-2 was lost: its agent died"
    lost = NodeLost(at=5.0, node="node-2", why="its agent died")
    stop = Stop(attempt=1, nodes=("node-1",), grace=30.0, why=why)
    launch = Launch(attempt=2, roster=("node-1",), why=why)
    assert _lines(capsys, (lost, stop), (None, launch), (None, stop), (None, launch)) == [
        why,
        f"stopping, 30 s at most: {why}",
    ]


def test_places_that_are_granted_before_anything_runs(capsys):
    """That the nodes are ready is enough of a word."""
    console, machine = Console(), Machine(Job(entrypoint=Entrypoint(script="train.py")))
    granted = NodeGranted(at=1.0, node="node-1", address="10.0.0.1")
    console.decided(Entry(event=granted, actions=()), machine)
    console.close()
    assert capsys.readouterr().err == ""


def test_hosts_that_are_left_out(capsys):
    """Said once, by itself or with the next start; they come back by the address that a person knows."""
    why = "node-3 is left out for 60 s after 3 failures"
    joined = NodeJoined(at=1.0, node="node-3", address="10.0.0.3", nproc=2, host="f3")
    shun = Shun(host="f3", why=why)
    launch = Launch(attempt=2, roster=("node-1",), why=f"rank 4 on node-3 failed; restart 1 of 3; {why}")
    back, unknown = (Readmit(host=host, why="its time is over") for host in ("f3", "f9"))
    assert _lines(capsys, (joined, shun), (None, shun, launch), (None, back, unknown))[1:] == [
        why,
        f"rank 4 on node-3 failed; restart 1 of 3; {why}",
        "10.0.0.3 may be used again: its time is over",
        "f9 may be used again: its time is over",
    ]


WAITING = StackGroup(
    ranks=(0, 2, 3),
    frames=("/v/site-packages/torch/distributed/distributed_c10d.py:3 in all_reduce", "/job/train.py:41 in main"),
)


def test_a_hang(capsys):
    """What all workers do, the odd one first; the decision is another line."""
    fetch = StackGroup(ranks=(1,), frames=("/job/train.py:33 in fetch",))
    event = WorkersHung(at=9.0, attempt=1, failures=(), groups=(fetch, WAITING))
    launch = Launch(attempt=2, roster=("node-1",), why="rank 1 on node-1 hung; restart 1 of 3")
    assert _lines(capsys, (event, launch)) == [
        "a worker hangs; what all of them do:",
        "  1 rank at train.py:33 in fetch: 1",
        "  3 ranks wait in all_reduce (train.py:41): 0, 2-3",
        "rank 1 on node-1 hung; restart 1 of 3",
    ]
    assert _lines(capsys, (event,)) == []  # nothing follows from it: it came too late


def test_a_hang_of_many_kinds(capsys):
    """The file of stacks has the rest."""
    groups = tuple(StackGroup(ranks=(rank,), frames=(f"/job/train.py:{rank} in f",)) for rank in range(20))
    stop = Stop(attempt=1, nodes=("node-1",), grace=0.0, why="hung")
    lines = _lines(capsys, (WorkersHung(at=9.0, attempt=1, failures=(), groups=groups), stop))
    assert len(lines) == 10
    assert lines[-1] == "  ... 12 groups more"


def test_what_a_restart_cost_is_said_once(capsys):
    """After the first steps of the next world; the steps of the first are nothing to tell of."""
    steps = (
        _progressed(2.0),
        _progressed(40.0, marks=44, low=43, high=43, marked=39.0),
        _progressed(41.0, 2, marks=1, low=41, high=41, marked=39.9),
        _progressed(42.0, 2, marks=2, low=42, high=42),
    )
    assert _lines(capsys, *((step,) for step in steps)) == ["back at step 41, 3 steps lost, 0.9 s between worlds"]


def test_a_restart_of_steps_without_numbers(capsys):
    """Its pause is known all the same."""
    unknown = {"low": None, "high": None}
    steps = (_progressed(2.0, **unknown), _progressed(3.0, 2, marked=2.5, **unknown), _progressed(90.0, 2, **unknown))
    assert _lines(capsys, *((step,) for step in steps)) == ["back, 0.5 s between worlds"]


def test_where_the_run_stands_once_a_minute(capsys):
    """However often it is told of; with the slowest where that is behind."""
    steps = (
        _progressed(2.0),
        *(_progressed(2.0 + second, low=second, high=second, rate=12.34) for second in range(1, 125)),
        _progressed(190.0, low=1190, high=1200, slowest=3, rate=0.5),
        _progressed(250.0, low=1200, high=1200, rate=0.0),
    )
    assert _lines(capsys, *((step,) for step in steps)) == [
        "step 59, 12.3 steps/s",
        "step 118, 12.3 steps/s",
        "step 1200, 2.0 s a step, slowest rank 3 at step 1190",
        "step 1200, standing still",
    ]


def _wait(condition: Callable[[], object]) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    pytest.fail("waited in vain")
