"""The daemon's listener and commands of whatever kind: in the end, a command that keeps to the rules is served."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import tempfile
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from raylaunch.cli.daemon import daemon_messages
from raylaunch.cli.daemon.daemon_messages import ClientStream, DaemonState, RunEnded, RunRequest, SignalForwarded
from raylaunch.cli.daemon.listener import Listener
from raylaunch.core.job.job import Job
from raylaunch.node.protocol import wire
from tests import profiles

RUN = RunRequest(job=Job(), job_text="", title="", cwd="/", environ={}, umask=0o22, ignored=())
STATE = DaemonState(pid=1, title="", seconds=0.0, left=1.0)
wrong_runs = st.sampled_from(
    [
        RunRequest(**{name: getattr(RUN, name) for name in RunRequest.__slots__} | {name: wrong})
        for name in RunRequest.__slots__
        for wrong in (None, 1.5, [1])
    ]
)
messages = (
    st.sampled_from(
        [daemon_messages.ACQUIRE, daemon_messages.STATE, daemon_messages.BUSY, "", None, 7, RunEnded(code=1)]
    )
    | st.builds(ClientStream, number=st.sampled_from([0, 2, -1, None]))
    | st.builds(SignalForwarded, signal=st.sampled_from(["SIGKILL", "", None]))
    | wrong_runs
)
packets = messages.map(lambda message: b"i" + pickle.dumps(message)) | st.binary(min_size=1, max_size=60)
commands = st.lists(st.tuples(packets, st.integers(0, 2)), max_size=5)


@profiles.examples(60)
@given(st.lists(commands, max_size=4))
def test_commands_that_send_anything(strangers):
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = str(Path(folder, "socket"))
        server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        server.bind(path)
        server.listen()
        ours, first = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.close()
        listener = Listener(server, first, lambda: STATE)
        null = os.open(os.devnull, os.O_RDONLY)
        stack.callback(os.close, null)
        before = len(os.listdir("/proc/self/fd"))
        for sent in strangers:
            stranger = stack.enter_context(connect(path))
            with contextlib.suppress(OSError):
                for packet, fds in sent:
                    socket.send_fds(stranger, [packet], [null] * fds)
            stranger.close()
        command = stack.enter_context(connect(path))
        while ask(command, daemon_messages.ACQUIRE) != daemon_messages.FREE:
            pass
        wire.send(command, RUN)
        client = listener.wait(100)
        assert client is not None
        assert client.run == RUN
        listener.finish(0, lambda: None, stays=False)
        assert wire.receive(command)[0] == RunEnded(code=0)
        deadline = time.monotonic() + 100  # it may not have read the end of each connection yet
        while (left := len(os.listdir("/proc/self/fd"))) > before + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert left <= before + 2, "descriptors of strangers are left open"


def connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(100)
    connection.connect(path)
    return connection


def ask(connection: socket.socket, message: object) -> object:
    wire.send(connection, message)
    return wire.receive(connection)[0]


def test_a_command_that_reads_no_answers_keeps_nobody_waiting():
    """It is answered until its buffer is full."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = str(Path(folder, "socket"))
        server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        server.bind(path)
        server.listen()
        ours, first = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.callback(ours.close)
        Listener(server, first, lambda: STATE)
        deaf = stack.enter_context(connect(path))
        deaf.settimeout(1.0)
        with contextlib.suppress(OSError):
            for _ in range(2000):
                wire.send(deaf, daemon_messages.STATE)
        other = stack.enter_context(connect(path))
        assert ask(other, daemon_messages.STATE)["pid"] == STATE.pid
