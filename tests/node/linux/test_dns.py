"""Stopping torch's reverse lookups leaves nothing else behind in the process that workers are forked from."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

import pytest

from raylaunch.node.linux import dns
from tests.warm_command import WarmCommand
from tests.warm_python import WarmPython

DISABLES = """
import os, torch
from raylaunch.node.linux import dns
files = os.listdir("/proc/self/fd")
dns.disable_reverse_lookups()
assert os.listdir("/proc/self/fd") == files
assert len(os.listdir("/proc/self/task")) == 1
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no child")
with dns.dns_queries_fail():
    dns.connect_tcpstore_client()  # torch would write to stderr if it looked up a name again
"""


def test_torch_looks_up_no_names_afterwards(warm_torch: WarmPython, tmp_path: Path) -> None:
    """No thread, no child process, no open file is left, and nothing is on stderr."""
    script = tmp_path / "disables.py"
    script.write_text(DISABLES)
    ran = WarmCommand(warm_torch, str(script), env=os.environ, cwd=tmp_path)
    assert ran.communicate(100) == ("no child\n", "")


def test_a_query_that_is_not_sent_fails_at_once():
    """The error is EAI_AGAIN, after which torch looks up no more names. Afterwards the resolver is as before."""
    state = ctypes.CDLL(None)["__res_state"]
    state.restype = ctypes.POINTER(ctypes.c_int * 2)
    ctypes.CDLL(None)["__res_init"]()
    before = list(state().contents)
    with dns.dns_queries_fail(), pytest.raises(socket.gaierror) as error:
        socket.getnameinfo(("203.0.113.7", 1), socket.NI_NAMEREQD)
    assert error.value.errno == socket.EAI_AGAIN
    assert list(state().contents) == before
