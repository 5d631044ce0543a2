"""Drains the nodes whose cloud will take their machines away."""

from __future__ import annotations

import time
from collections.abc import Iterable

from msgspec import msgpack

from raylaunch.capabilities.notices.agent import NoticeStatus
from raylaunch.cluster.capability import NEVER, DriverPart, DriverPort
from raylaunch.core.machine.events_and_actions import NodeDraining
from raylaunch.core.newtypes import NodeId, RunTime

_LEAST_SECONDS = 10.0
"""Assumed if the machine should be gone by our clock: a checkpoint in vain costs no more than none."""


class NoticeDrains(DriverPart):
    """The notices of a run."""

    def __init__(self, port: DriverPort) -> None:
        self._port = port
        #: Nodes whose machine will be taken away, and when, by time.monotonic(). They may not have joined yet.
        self._noticed: dict[NodeId, float] = {}
        self._drained: set[NodeId] = set()
        self._has_problem = False

    def told(self, node: NodeId, section: bytes) -> None:
        """Take what a node's metadata server says."""
        status = msgpack.decode(section, type=NoticeStatus)
        if status.left is not None:
            self._noticed[node] = time.monotonic() + status.left
        elif status.problem and not self._has_problem:
            self._has_problem = True
            cloud = self._port.machine.job.preemption_notices
            self._port.say(f"{node} cannot be asked for notices (`preemption_notices: {cloud}`): {status.problem}")

    @property
    def next_check(self) -> float:
        """At once, if a node that the machine knows has a notice."""
        return 0.0 if self._due() else NEVER

    def due_events(self, now: RunTime) -> Iterable[NodeDraining]:
        """Return the drains. The host is not used again."""
        cloud = self._port.machine.job.preemption_notices
        for node in self._due():
            left = max(_LEAST_SECONDS, self._noticed[node] - time.monotonic())
            self._drained.add(node)
            why = f"the cloud takes its machine away in {left:.0f} s"
            yield NodeDraining(at=now, node=node, deadline=RunTime(now + left), why=why, by=cloud)

    def _due(self) -> list[NodeId]:
        return [node for node in self._noticed if node in self._port.machine.nodes and node not in self._drained]
