"""The order of stdout and stderr: a worker notes it, whatever it writes with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raylaunch.worker.heartbeats.shared_page import PAGE_VARIABLE, SharedPage
from raylaunch.worker.runtime.output_order import OutputOrder

SCRIPT = """
import os, sys
from raylaunch.worker.runtime import output_order
before = [(s.encoding, s.errors, s.name, s.mode, s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)]
output_order.install()
after = [(s.encoding, s.errors, s.name, s.mode, s.line_buffering, s.write_through) for s in (sys.stdout, sys.stderr)]
assert before == after, (before, after)
assert sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__
"""


@pytest.fixture
def page():
    made, fd = SharedPage.create()
    made.reset(1, 2)
    yield made, f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


def _run(folder: Path, lines: str, page: str) -> tuple[bytes, bytes]:
    """Run a script with its output in two files, and return what they have."""
    out, err = folder / "out", folder / "err"
    with out.open("ab") as stdout, err.open("ab") as stderr:
        environ = os.environ | {PAGE_VARIABLE: page}
        command = [sys.executable, "-u", "-c", SCRIPT + lines]
        done = subprocess.run(command, stdout=stdout, stderr=stderr, env=environ, check=False)
    assert done.returncode == 0, err.read_text()
    return out.read_bytes(), err.read_bytes()


def test_each_turn_to_the_other_file_is_noted(page, tmp_path):
    """Of `print`, of `write`, of bytes, and of a forked child; not of another write to the same file."""
    made, path = page
    lines = """
print("a")
print("b")
print("c", file=sys.stderr)
sys.stdout.buffer.write(b"d")
if not os.fork():
    print("e", file=sys.stderr)
    os._exit(0)
os.wait()
sys.stderr.write("f")
"""
    assert _run(tmp_path, lines, f"{path}:1") == (b"a\nb\nd", b"c\ne\nf")
    order = OutputOrder(made, 1, 1)
    order.read()
    assert [*order.points] == [(0, 0), (4, 0), (4, 2), (5, 2), (5, 4)]
    order.read()
    assert len(order.points) == 5


def test_points_that_are_not_used_do_not_fill_the_memory(page):
    """Of a worker that writes faster than its files are read, the last ones are kept."""
    made, _ = page
    order, notes = OutputOrder(made, 1, 0), made.notes(0)
    most = len(notes) // 2
    for _ in range(3):
        for number in range(notes[0], notes[0] + most):
            at = 1 + 2 * (number % most)
            notes[at], notes[at + 1] = number, number
        notes[0] += most
        order.read()
    assert (len(order.points), order.points[-1]) == (most, (3 * most - 1, 3 * most - 1))


@pytest.mark.parametrize("path", ["", "/nowhere:0", ":x"])
def test_a_process_without_a_page(path, tmp_path):
    """It writes as ever."""
    assert _run(tmp_path, "print('a'); print('b', file=sys.stderr); os.close(1)", path) == (b"a\n", b"b\n")


def test_a_closed_stream(page, tmp_path):
    """The other one goes on."""
    assert _run(tmp_path, "print('a'); os.close(1); print('b', file=sys.stderr)", f"{page[1]}:0") == (b"a\n", b"b\n")


def test_streams_that_are_replaced_stay(page, tmp_path):
    """A script, or what was preloaded for it, has its own."""
    lines = """
import io
sys.stdout = mine = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "wb", closefd=False)))
output_order.install()
assert sys.stdout is mine
print("a", flush=True)
"""
    assert _run(tmp_path, lines, f"{page[1]}:0") == (b"a\n", b"")
