"""What a process and all that it started have spent, as the kernel counts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from raylaunch.core.stacks import Effort
from raylaunch.node import processes
from raylaunch.node.effort import child_stopped, effort
from tests.node.harness import until

pytestmark = pytest.mark.timeout(100)

CHILD = "subprocess.run([sys.executable, '-c', {0!r}])"
SPIN = "while True: pass"
COPY = "source, sink = open('/dev/zero', 'rb'), open('/dev/null', 'wb')\nwhile True: sink.write(source.read(10**6))"


@contextmanager
def running(program: str) -> Iterator[int]:
    """Of a process that ends with its children."""
    text = f"import os, signal, subprocess, sys, time\n{program}"
    process = subprocess.Popen([sys.executable, "-c", text], start_new_session=True)
    try:
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def comes(pid: int, wanted: Callable[[Effort], bool]) -> bool:
    """Whether it spends that in some time."""
    before = effort(pid)
    until(lambda: wanted(effort(pid) - before), "nothing was spent")
    return True


def test_its_own_work():
    """Nobody else's."""
    with running(SPIN) as pid:
        assert comes(pid, lambda spent: spent.cpu > 0.2)
        assert effort(pid).cpu_of_others == 0


def test_the_work_of_what_it_started():
    """However far down, and of what has ended by now."""
    with running(CHILD.format("import subprocess, sys\n" + CHILD.format(SPIN))) as pid:
        assert comes(pid, lambda spent: spent.cpu_of_others > 0.2)
    with running("subprocess.run([sys.executable, '-c', 'sum(range(10**7))'])\ntime.sleep(1000)") as pid:
        until(lambda: not processes.children(pid) and effort(pid).cpu_of_others > 0.05, "it does not end")


def test_what_is_copied():
    """Hardly any CPU of its own need come of it."""
    with running(CHILD.format(COPY)) as pid:
        assert comes(pid, lambda spent: spent.bytes > 10**8)


def test_a_process_that_waits_for_one_thing_after_another():
    """Each time it is woken."""
    with running("while True: time.sleep(0.001)") as pid:
        assert comes(pid, lambda spent: spent.wakes > 100)


def test_a_process_that_it_started_is_stopped():
    """By a signal; the process itself is another matter."""
    with running(CHILD.format("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)")) as pid:
        until(lambda: child_stopped(pid), "it is not seen")
        (child,) = processes.children(pid)
        assert not child_stopped(child)


def test_a_process_that_is_gone():
    """It has spent nothing."""
    assert effort(2**22 + 1) == Effort()
