"""The live line in a real terminal: a program that prints through the console, and what a person does to it."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.cli.output import live_row
from tests.terminal import Terminal

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, sys, time
from raylaunch.cli.output.console import Console
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.machine import Machine
from raylaunch.core.placement.plan import NodeFacts, make_plan
from raylaunch.core.record.journal import JournalEntry
from raylaunch.node.logs.tail import LogOutput

node = NodeFacts(node_id="ab", address="10.0.0.7", cpus=4.0, gpus=0.0, free_cpus=4.0, free_gpus=0.0)
job = Job(entrypoint=Entrypoint(script="train.py"), progress=os.environ.get("PROGRESS", "auto"))
console = Console()
console.on_plan(job, make_plan(job, [node], local=False), "")
machine = Machine(job)
console.on_entry(JournalEntry(event=None, actions=tuple(machine.start())), machine)

def show(text):
    console.on_output([LogOutput(rank=0, stream="stdout", data=text.encode())])

show("pid %d\\n" % os.getpid())
for line in sys.stdin:
    if line == "end\\n":
        break
    show(eval(line))
console.close()
print("over", flush=True)
"""


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    """Those that a test has opened."""
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


@pytest.fixture(params=[80, 200])
def terminal(request, terminals) -> Terminal:
    """The program above in a terminal of so many columns, when its live line is there."""
    terminals.append(Terminal([sys.executable, "-c", PROGRAM], request.param, 24, {"PYTHONPATH": str(ROOT)}))
    terminals[0].until(lambda: _has_row(terminals[0]) and "pid " in terminals[0].text)
    return terminals[0]


def _has_row(terminal: Terminal) -> bool:
    """Whether the live line is below the cursor, and nowhere else."""
    below = [row for row in terminal.rows[terminal.screen.cursor.y + 1 :] if row]
    return len(below) == 1 and "gathering" in below[0] and terminal.text.count("gathering") == 1


def _is_clean(terminal: Terminal) -> bool:
    screen = terminal.screen
    return screen.margins is None and not screen.cursor.hidden and not any("gathering" in row for row in terminal.rows)


def test_output_of_all_kinds(terminal):
    """A long line, bars that move the cursor, and a hidden cursor that stays so at the end."""
    terminal.type("'x' * 200_000 + 'END\\n'\n")
    terminal.until(lambda: "xEND" in terminal.text, 120.0)
    assert "x" * 200_000 in terminal.text
    terminal.type("''.join('\\r%d%%|####' % i for i in range(101))\n")
    terminal.type("'\\nthe bar\\n\\x1b[A\\x1b[2Kthe other bar\\n\\x1b[?25l'\n")
    terminal.until(lambda: "100%|####" in terminal.text and "the other bar" in terminal.text)
    terminal.type("end\n")
    assert terminal.end() == 0
    assert "the bar\n" not in terminal.text
    assert terminal.rows[terminal.screen.cursor.y - 1] == "over"
    assert _is_clean(terminal)


def test_the_terminal_is_resized(terminal):
    """The line stays below the output and takes the new width."""
    terminal.resize(60, 10)
    terminal.until(lambda: _has_row(terminal))
    terminal.resize(120, 30)
    terminal.until(lambda: _has_row(terminal))
    terminal.type("'after\\n'\n")
    terminal.until(lambda: "after" in terminal.rows and _has_row(terminal))
    terminal.type("end\n")
    assert terminal.end() == 0
    assert _is_clean(terminal)


def test_the_driver_is_killed(terminals, tmp_path):
    """It leaves a row of text below the prompt, and no mode: what is typed and shown next is as ever."""
    terminal = Terminal(["/bin/bash", "--norc", "--noprofile", "-i"], 80, 24, {"PS1": "$ ", "PYTHONPATH": str(ROOT)})
    terminals.append(terminal)
    (tmp_path / "program.py").write_text(PROGRAM)
    terminal.type(f"{sys.executable} {tmp_path}/program.py\n")
    terminal.until(lambda: _has_row(terminal) and "pid " in terminal.text)
    found = re.search(r"pid (\d+)", terminal.text)
    assert found is not None
    os.kill(int(found[1]), signal.SIGKILL)
    terminal.until(lambda: "Killed" in terminal.text)
    terminal.type("seq 100 139; echo over\n")
    terminal.until(lambda: "\nover\n" in terminal.text)
    assert "".join(f"\n{number}" for number in range(118, 140)) in terminal.text
    assert _is_clean(terminal)
    terminal.type("exit\n")
    assert terminal.end() == 0


def test_the_driver_is_suspended(terminals, tmp_path):
    """Ctrl-Z removes the line before the shell prompts; in the background there is none; `fg` brings it back."""
    terminal = Terminal(["/bin/bash", "--norc", "--noprofile", "-i"], 80, 24, {"PS1": "$ ", "PYTHONPATH": str(ROOT)})
    terminals.append(terminal)
    (tmp_path / "program.py").write_text(PROGRAM)
    terminal.type(f"{sys.executable} {tmp_path}/program.py\n")
    terminal.until(lambda: _has_row(terminal) and "pid " in terminal.text)
    terminal.type("\x1a")
    terminal.until(lambda: "Stopped" in terminal.text)
    assert _is_clean(terminal)
    terminal.type("bg; echo now\n")
    terminal.until(lambda: "\nnow\n" in terminal.text)
    for _ in range(10):
        terminal.read(0.1)
    assert _is_clean(terminal)
    terminal.type("fg\n")
    terminal.until(lambda: _has_row(terminal))
    terminal.type("end\n")
    terminal.until(lambda: "\nover\n" in terminal.text)
    assert _is_clean(terminal)
    terminal.type("exit\n")
    assert terminal.end() == 0


@pytest.mark.parametrize(
    "more", [{"TERM": "dumb"}, {"CI": "true"}, {"PROGRESS": "line"}, {"PROGRESS": "off"}, {"TERM": ""}]
)
def test_terminals_without_a_line(terminals, more):
    """The output is all that such a terminal gets."""
    terminal = Terminal([sys.executable, "-c", PROGRAM], 80, 24, {"PYTHONPATH": str(ROOT), **more})
    terminals.append(terminal)
    terminal.until(lambda: "pid " in terminal.text)
    terminal.type("'one\\n'\n")
    terminal.until(lambda: "\none\n" in terminal.text)
    terminal.type("end\n")
    assert terminal.end() == 0
    assert b"\x1b7" not in terminal.raw
    assert b"gathering" not in terminal.raw


def test_a_stream_that_is_no_terminal(tmp_path):
    """A file, a closed stderr, and one that a notebook has replaced."""
    with open(tmp_path / "file", "w") as file:
        assert live_row.fit_terminal(file, {"TERM": "xterm"}) is None
    assert live_row.fit_terminal(None, {"TERM": "xterm"}) is None
    assert live_row.size_of(os.open(tmp_path / "file", os.O_RDONLY)) is None
