"""Threads that decode the same class for the first time, at the same time."""

from __future__ import annotations

import subprocess
import sys

import pytest

DECODES = """
import sys, threading
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.record.journal import header, read_header

text = header(Job(entrypoint=Entrypoint(script="train.py")), "2026-11-26T04:30:00+00:00", 0.0)
together = threading.Barrier(8)
sys.setswitchinterval(1e-6)

def read():
    together.wait()
    read_header(text)

threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("time", range(3))
def test_threads_decode_at_the_same_time(time):
    """A process in which msgspec looks at the class only then crashes."""
    done = subprocess.run([sys.executable, "-c", DECODES], check=False, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
