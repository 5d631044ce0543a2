"""The messages between a command and a daemon. Their socket (SOCK_SEQPACKET) preserves message boundaries."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any

from raylaunch.core.job.job import Job
from raylaunch.core.newtypes import SignalName
from raylaunch.node.protocol import wire

ACQUIRE = "acquire"
"""Command: let me send a run. The answer is `FREE` or `BUSY`; after `FREE` the daemon serves this connection only."""
FREE = "free"
BUSY = "busy"
STARTED = "started"
"""Daemon: the run is starting; from now on it takes signals."""
STATE = "state"
"""Command: describe yourself. The answer is a `DaemonState` as a dict. All versions know this and `END`."""
END = "end"
"""Command: exit as soon as no run is active. The answer is a `DaemonState` as a dict."""


IdleAgent = tuple[str, int, int]
"""The address of its node, the number of its workers, and the memory of its fork server in bytes (0: unknown)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStream:
    """Command: the file descriptor sent with this is stdin, stdout or stderr (number 0, 1 or 2) of the run."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Command: run this job as my process would. The three `ClientStream`s are sent before it."""

    job: Job
    job_text: str
    """The job as YAML, for the run folder."""
    title: str
    """What `raylaunch ps` shows, without secrets."""
    cwd: str
    environ: dict[str, str] = field(repr=False)
    umask: int
    ignored: tuple[SignalName, ...]
    """The signals that the command's process ignores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalForwarded:
    """Command: I received this signal; handle it as the run would."""

    signal: SignalName


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """Daemon: the run has ended, and all of its output is written."""

    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonState:
    """The state of a daemon. It is sent as a dict, since command and daemon may be of different versions."""

    pid: int
    title: str
    """The title of the active run; "" if it is idle."""
    seconds: float
    """Seconds since the active run started, or since the last one ended."""
    left: float
    """Seconds until it exits, if it is idle."""
    address: str = ""
    """The Ray cluster that it is connected to."""
    agents: tuple[IdleAgent, ...] = ()


def send_run(connection: socket.socket, run: RunRequest) -> None:
    """Send a run together with this process's stdin, stdout and stderr. Raises OSError."""
    for number in range(3):
        wire.send(connection, ClientStream(number=number), fd=number)
    wire.send(connection, run)


def receive(connection: socket.socket) -> Any:
    """Return the next message; None if the connection is closed or its timeout is over."""
    try:
        message, fd = wire.receive(connection)
    except (EOFError, OSError):
        return None
    if fd is not None:
        os.close(fd)
    return message
