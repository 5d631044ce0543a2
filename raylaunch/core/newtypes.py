"""Types that mypy tells apart and the interpreter does not: times of clocks, ids of nodes and hosts, signals.

And what Python 3.11 has in its standard library, but 3.10 has not: `StrEnum` and `assert_never`.
"""

from __future__ import annotations

from enum import Enum
from typing import NewType, NoReturn

RunTime = NewType("RunTime", float)
"""Seconds since the run began, on the driver's clock. All times in events, actions and failures of the core."""

NodeTime = NewType("NodeTime", float)
"""Seconds on one node's CLOCK_MONOTONIC. Means nothing on another node until the driver has converted it."""

NodeId = NewType("NodeId", str)
"""The id of a node of a run, such as `node-3`: one agent and its workers. No two nodes of a run have the same.

An agent that is idle between two runs has one too, such as `idle-3`.
"""
NO_NODE = NodeId("")
"""Stands for a node that has no id yet, or for none."""

HostId = NewType("HostId", str)
"""The id of a host: Ray's id of the node, the same for all agents that run there. No host name and no address."""
NO_HOST = HostId("")
"""Stands for a host that is not known."""

SignalName = NewType("SignalName", str)
"""The name of a signal that `signal.Signals` has, such as `SIGTERM`. Numbers differ between machines; names do not."""
SIGTERM = SignalName("SIGTERM")


class StrEnum(str, Enum):
    """An enumeration whose members are strings, as `enum.StrEnum` of Python 3.11 is."""

    __str__ = str.__str__


def assert_never(value: NoReturn) -> NoReturn:
    """Let mypy check that this is never reached, as `typing.assert_never` of Python 3.11 does."""
    raise AssertionError(value)
