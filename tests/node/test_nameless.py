"""Keeping torch from the DNS leaves no trace in the process that workers are forked from."""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys

import pytest

from raylaunch.node import nameless

ASK_NO_MORE = """
import os, torch
from raylaunch.node import nameless
files = os.listdir("/proc/self/fd")
nameless.ask_for_no_names()
assert os.listdir("/proc/self/fd") == files
assert len(os.listdir("/proc/self/task")) == 1
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("as before")
with nameless._no_answers():
    nameless._ask()  # torch says that it gets no name each time that it asks
"""


def test_nothing_is_left_of_it_but_that_torch_asks_no_more():
    """No thread, no child, no file, and nothing on stderr."""
    command = [sys.executable, "-c", ASK_NO_MORE]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert ran.stdout == "as before\n", ran.stderr
    assert ran.stderr == ""


def test_a_question_that_is_not_sent_fails_at_once():
    """For want of an answer, which is what torch takes for a reason to ask no more. The next one is sent."""
    state = ctypes.CDLL(None)["__res_state"]
    state.restype = ctypes.POINTER(ctypes.c_int * 2)
    ctypes.CDLL(None)["__res_init"]()
    before = list(state().contents)
    with nameless._no_answers(), pytest.raises(socket.gaierror) as error:
        socket.getnameinfo(("203.0.113.7", 1), socket.NI_NAMEREQD)
    assert error.value.errno == socket.EAI_AGAIN
    assert list(state().contents) == before
