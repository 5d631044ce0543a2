"""What a command and a warm driver say to each other, over a socket that keeps messages whole."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Any

from raylaunch.core.job import Job
from raylaunch.node import wire

KNOCK = "knock"
"""Command: may I? `FREE` or `BUSY` follows; who was told `FREE` has the driver, until the connection ends."""
FREE = "free"
BUSY = "busy"
TAKEN = "taken"
"""Driver: from here on the run is mine, and signals may come."""
STATE = "state"
"""Command: how are you? A dict of `State` follows. This word and the next are understood by drivers of all versions."""
END = "end"
"""Command: end yourself, once no run is at work. A dict of `State` follows."""


RestingAgent = tuple[str, int, int]
"""The address of its node, the number of its workers, and the bytes that its fork server takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Command: the file that comes with this is the run's 0, 1 or 2."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Command: run this, as if it were in my place. The three streams came before it."""

    job: Job
    job_text: str
    title: str
    cwd: str
    environ: dict[str, str] = field(repr=False)
    umask: int
    ignored: tuple[str, ...]
    """Signals that the command found ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signalled:
    """Command: this signal came."""

    signal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """Driver: the run is over, and all of its output is written."""

    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a driver tells about itself. It travels as a dict: the two may be of different versions."""

    pid: int
    title: str
    """What it runs; `""` at rest."""
    seconds: float
    """Since the run began, or the last one ended."""
    left: float
    """At rest: seconds until it ends by itself."""
    address: str = ""
    """Of the Ray cluster that it is connected to."""
    agents: tuple[RestingAgent, ...] = ()


def hand_over(line: socket.socket, run: Run) -> None:
    """The run with this process's own streams. Raises OSError."""
    for number in range(3):
        wire.send(line, Stream(number=number), fd=number)
    wire.send(line, run)


def told(line: socket.socket) -> Any:
    """The next message; None: the other end is gone, or is silent for too long. A file with it is closed."""
    try:
        message, fd = wire.receive(line)
    except (EOFError, OSError):
        return None
    if fd is not None:
        os.close(fd)
    return message
