"""Types that mypy tells apart and the interpreter does not: times of different clocks, and ids of hosts."""

from __future__ import annotations

from typing import NewType

RunTime = NewType("RunTime", float)
"""Seconds since the run began, on the driver's clock. All times in events, actions and failures of the core."""

NodeTime = NewType("NodeTime", float)
"""Seconds on one node's CLOCK_MONOTONIC. Means nothing on another node until the driver has converted it."""

HostId = NewType("HostId", str)
"""The id of a host: Ray's id of the node, the same for all agents that run there. No host name and no address."""
NO_HOST = HostId("")
"""Stands for a host that is not known."""
