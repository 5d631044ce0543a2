"""CPU, I/O and wake-ups of a process and its descendants, as /proc counts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from raylaunch.core.failures.stacks import ResourceUsage
from raylaunch.node.linux import processes
from raylaunch.node.linux.procfs import catches, has_stopped_child, resource_usage
from tests.node.harness import until

pytestmark = pytest.mark.timeout(100)

CHILD = "subprocess.run([sys.executable, '-c', {0!r}])"
SPIN = "while True: pass"
COPY = "source, sink = open('/dev/zero', 'rb'), open('/dev/null', 'wb')\nwhile True: sink.write(source.read(10**6))"


@contextmanager
def running(program: str) -> Iterator[int]:
    """Run a program, and kill it with its children at the end; gives its process id."""
    text = f"import os, signal, subprocess, sys, time\n{program}"
    process = subprocess.Popen([sys.executable, "-c", text], start_new_session=True)
    try:
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def uses(pid: int, wanted: Callable[[ResourceUsage], bool]) -> bool:
    """Wait until the process has used what is wanted, from now on."""
    before = resource_usage(pid)
    until(lambda: wanted(resource_usage(pid) - before), "nothing was used")
    return True


def test_cpu_of_the_process_itself():
    """It is not counted as CPU of others."""
    with running(SPIN) as pid:
        assert uses(pid, lambda used: used.cpu > 0.2)
        assert resource_usage(pid).cpu_of_others == 0


def test_cpu_of_descendants():
    """Of grandchildren too, and of children that have ended."""
    with running(CHILD.format("import subprocess, sys\n" + CHILD.format(SPIN))) as pid:
        assert uses(pid, lambda used: used.cpu_of_others > 0.2)
    with running("subprocess.run([sys.executable, '-c', 'sum(range(10**7))'])\ntime.sleep(1000)") as pid:
        until(
            lambda: not processes.children(pid) and resource_usage(pid).cpu_of_others > 0.05, "the child does not end"
        )


def test_bytes_that_a_child_copies():
    """Reads and writes count, whoever calls them."""
    with running(CHILD.format(COPY)) as pid:
        assert uses(pid, lambda used: used.bytes > 10**8)


def test_wake_ups_of_a_process_that_sleeps_again_and_again():
    """Each end of a sleep counts."""
    with running("while True: time.sleep(0.001)") as pid:
        assert uses(pid, lambda used: used.wakes > 100)


def test_a_stopped_child_is_found():
    """The stopped process itself has no stopped child."""
    with running(CHILD.format("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)")) as pid:
        until(lambda: has_stopped_child(pid), "the stopped child is not found")
        (child,) = processes.children(pid)
        assert not has_stopped_child(child)


def test_a_process_that_is_gone():
    """It has used nothing."""
    assert resource_usage(2**22 + 1) == ResourceUsage()


def test_a_process_with_a_strange_name():
    """A name may have any character, and may not be UTF-8."""
    name = "from ctypes import CDLL\nCDLL(None).prctl(15, b'\\xe9\\x0bSigCgt:\\x85 z)', 0, 0, 0)\n"
    with running(name + SPIN) as pid:
        assert uses(pid, lambda used: used.cpu > 0.05)
        assert catches(pid, signal.SIGINT)
