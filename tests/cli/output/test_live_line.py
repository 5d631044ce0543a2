"""The live line: its text at all widths, and what it learns of the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raylaunch.cli.output.live_line import LiveLine, LiveStatus, line
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import Event, NodeJoined, Progressed, RestartRequested, WorkersStarted
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.state import Phase
from raylaunch.core.monitoring.progress_report import ProgressSample
from raylaunch.core.record.journal import JournalEntry

STEPS = Progressed(at=80.0, attempt=2, marks=900, low=1188, high=1200, marked=80.0, slowest=5, rate=12.4)
UNNUMBERED = Progressed(at=80.0, attempt=2, marks=900, low=None, high=None, marked=80.0, slowest=0, rate=0.25)
RUNNING = LiveStatus(
    phase=Phase.RUNNING,
    seconds=3785.0,
    ready=2,
    wanted="2",
    nodes=2,
    workers=16,
    alive=16,
    progress=STEPS,
    behind=13,
    restarts=1,
    goodput=0.964,
)
WIDEST = (
    "raylaunch: running | step 1200 | 12.4 steps/s | rank 5 is 13 steps behind | 16 workers on 2 nodes"
    " | 1 restart | goodput 96 % | 1 h 3 min"
)
WAITING = LiveStatus(ready=1, wanted="2 to 4", seconds=61.0)
SCRIPT = LiveStatus(phase=Phase.RUNNING, seconds=5.0, ready=1, wanted="1", nodes=1, workers=4, alive=3)
SGD = LiveStatus(
    phase=Phase.RUNNING, seconds=5.0, ready=1, wanted="1", nodes=1, workers=4, alive=4, progress=UNNUMBERED
)
SAVING = LiveStatus(phase=Phase.SAVING, seconds=90.0, nodes=2, workers=16, alive=16, progress=STEPS)


@pytest.mark.parametrize(
    ("status", "columns", "text"),
    [
        (
            RUNNING,
            200,
            WIDEST,
        ),
        (RUNNING, 80, "running | step 1200 | 12.4 steps/s | rank 5 is 13 steps behind | 1 restart"),
        (RUNNING, 60, "raylaunch: running | step 1200 | 12.4 steps/s | 1 restart"),
        (RUNNING, 40, "running | step 1200 | 12.4 steps/s"),
        (RUNNING, 20, "running | step 1200"),
        (WAITING, 80, "raylaunch: gathering: 1 of 2 to 4 nodes ready | 1 min 1 s"),
        (WAITING, 20, "gathering: 1 of 2 to"),
        (SCRIPT, 80, "raylaunch: running | 3 of 4 workers alive on 1 node | 5 s"),
        (SGD, 80, "raylaunch: running | 900 steps | 4.0 s per step | 4 workers on 1 node | 5 s"),
        (SAVING, 80, "raylaunch: saving | step 1200 | 16 workers on 2 nodes | 1 min 30 s"),
    ],
)
def test_the_text(status, columns, text):
    """Of a narrow terminal, the name and the least important parts go."""
    assert line(status, columns) == text


@pytest.mark.parametrize("status", [RUNNING, WAITING, SCRIPT, SGD, SAVING])
def test_all_widths(status):
    """It is never too wide, and always begins with the phase, which the name may precede."""
    for columns in range(20, 201):
        text = line(status, columns)
        assert len(text) <= columns
        assert text.isascii()
        assert text.removeprefix("raylaunch: ").startswith(status.phase)


def test_colours():
    """They are around the name and the phase, and none are there without colour."""
    for is_coloured, text in (
        (True, "\x1b[2mraylaunch: \x1b[0m\x1b[33mgathering\x1b[0m: 1 of 2 to 4 nodes ready | 1 min 1 s"),
        (False, "raylaunch: gathering: 1 of 2 to 4 nodes ready | 1 min 1 s"),
    ):
        live = LiveLine(is_coloured)
        assert live.text(80) == "", "nothing is known of the run"
        live.on_status(WAITING)
        assert live.text(80) == text
        assert live.text(20).endswith("gathering\x1b[0m: 1 of 2 to" if is_coloured else "gathering: 1 of 2 to")


def test_what_the_line_learns_of_a_run():
    """From the entries of the journal, and from samples of the progress; between them its time goes on."""
    machine = Machine(Job(entrypoint=Entrypoint(script="train.py"), nnodes="1:2", nproc_per_node=2, last_call=0.0))
    now = 100.0
    live = LiveLine(is_coloured=False, clock=lambda: now)

    def handle(event: Event) -> None:
        live.on_entry(JournalEntry(event=event, actions=tuple(machine.handle(event))), machine)

    live.on_entry(JournalEntry(event=None, actions=tuple(machine.start())), machine)
    assert live.text(80) == "raylaunch: gathering: 0 of 1 to 2 nodes ready | 0 s"
    for node in ("node-1", "node-2"):
        handle(NodeJoined(at=2.0, node=node, address="10.0.0.1", nproc=2))
    now += 1.5
    assert live.text(80) == "raylaunch: starting | 4 workers on 2 nodes | 3 s"
    for node in ("node-1", "node-2"):
        handle(WorkersStarted(at=4.0, attempt=1, node=node, pids=(1, 2)))
    live.on_progress(ProgressSample(at=5.0, alive=3, progress=None, behind=0))
    assert live.text(80) == "raylaunch: running | 3 of 4 workers alive on 2 nodes | goodput 20 % | 5 s"
    assert live.ending() == "start 4 s"
    first, last = replace(STEPS, attempt=1, at=6.0, marked=5.0, marks=1), replace(STEPS, attempt=1, at=8.0, marked=8.0)
    for event in (first, replace(last, marks=13)):
        handle(event)
        live.on_progress(ProgressSample(at=event.at, alive=4, progress=event, behind=12))
    live.on_progress(ProgressSample(at=10.0, alive=4, progress=None, behind=0))
    text = "raylaunch: running | step 1200 | 12.4 steps/s | 4 workers on 2 nodes | goodput 50 % | 10 s"
    assert live.text(100) == text
    assert live.ending() == "13 steps, 4.0 steps/s; train 3 s, start 5 s"
    still = replace(last, rate=0.0)
    live.on_progress(ProgressSample(at=20.0, alive=4, progress=still, behind=0))
    text = "raylaunch: running | step 1200 | no progress | 4 workers on 2 nodes | goodput 15 % | 20 s"
    assert live.text(100) == text, "goodput falls while nothing happens"
    handle(RestartRequested(at=21.0, by="ada@login-1", save_seconds=0.0))
    assert live.status.restarts == 1, "it is counted as at the end, whatever it was for"
