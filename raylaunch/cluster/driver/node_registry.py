"""The registry of a run's nodes: which exist, where, what each has told last and when, and which are lost for good.

A node that is lost must not have workers that go on training. Three things prove that it has none: its link is down,
so its agent's process is gone; nothing was heard of it for as long as its lease may last; or Ray reports it dead. Ray's
report alone proves nothing if the link is still up: Ray also reports it when only the raylet died, or a connection.
Then the agent is told to end, and one of the other two proofs is awaited.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from raylaunch.cluster.agent.lease import report_interval
from raylaunch.cluster.agent.link import LinkDown, LinkServer
from raylaunch.cluster.fleet_api import AgentLost, HostDraining
from raylaunch.core.newtypes import NO_HOST, HostId, NodeId
from raylaunch.node.protocol.node_status import NodeStatus

_NEVER = float("inf")
_MOST_LOST = 10_000
"""Lost nodes that are remembered."""


@dataclass(slots=True)
class _Node:
    is_up: bool = False
    host: HostId = NO_HOST
    heard_at: float = -_NEVER
    reported: AgentLost | None = None
    """Ray's report that the node is gone, which is not proved yet."""
    outlives_report: float = 0.0
    """For how many seconds the node may be alive after Ray has reported its host dead; 0: that is a proof."""
    status: NodeStatus = field(default_factory=NodeStatus)
    """What it has told last."""


class NodeRegistry:
    """All nodes of a run, by name. A lost node's name is never used again.

    Only the driver's thread may call it, except for `heard` and `last_heard`. Times are time.monotonic(), in seconds.
    """

    def __init__(self, node_timeout: float, links: LinkServer | None) -> None:
        self._timeout = node_timeout
        #: Held while the nodes are changed, or read as a whole.
        self._lock = threading.Lock()
        self._links = links
        #: By host, what Ray has said last of its end.
        self.draining: dict[HostId, HostDraining] = {}
        #: The nodes that are not lost.
        self._nodes: dict[NodeId, _Node] = {}
        #: The names of the nodes that were lost last, as keys: of these something may still arrive.
        self._lost: dict[NodeId, None] = {}
        #: No node can be overdue before this time. It is never later than `node_timeout` from when it was set: after a
        #: takeover, a node need not be heard of for longer than that, but from its first report on it must.
        self._next_check = _NEVER
        self._no_check_before = 0.0

    def start(self, tell: Callable[[LinkDown], None]) -> None:
        """Start the links, if there are any. `tell` is called in a thread of theirs."""
        if self._links is not None:
            self._links.start(tell)

    def heard(self, node: NodeId, at: float) -> None:
        """Record that a report of the node arrived. Any thread may call this, so that a busy driver misses none."""
        with self._lock:
            if node not in self._lost:
                found = self._nodes.setdefault(node, _Node())
                found.heard_at, found.outlives_report = at, 0.0

    def last_heard(self, node: NodeId) -> float:
        """Return when the node was last heard of; minus infinity: never. Any thread may call this."""
        found = self._nodes.get(node)
        return -_NEVER if found is None else found.heard_at

    def status(self, node: NodeId) -> NodeStatus:
        """Return what a node has told last."""
        found = self._nodes.get(node)
        return NodeStatus() if found is None else found.status

    def told(self, node: NodeId, status: NodeStatus) -> None:
        """Record what a node has told."""
        with self._lock:
            self._nodes.setdefault(node, _Node()).status = status

    def came_up(self, node: NodeId, host: HostId, at: float) -> None:
        """Record that a node is up on a host (Ray's node id). From now on it must be heard of."""
        with self._lock:
            found = self._nodes.setdefault(node, _Node())
            found.is_up, found.host = True, host
            found.heard_at = max(found.heard_at, at)
        self._next_check = min(self._next_check, found.heard_at + self._timeout)

    def assume(self, node: NodeId, host: HostId, until: float, *, outlives_report: float = 0.0) -> None:
        """Take over a node of another driver, as one that is up. Until then it need not be heard of.

        `outlives_report`: the seconds for which the node may go on after Ray has reported its host dead.
        """
        with self._lock:
            self._nodes[node] = _Node(is_up=True, host=host, heard_at=until, outlives_report=outlives_report)
        self._next_check = min(self._next_check, until + self._timeout)

    def is_lost(self, node: NodeId) -> bool:
        """Return whether the node was given up. Whatever still arrives of it must be ignored."""
        return node in self._lost

    def on_host(self, host: HostId) -> list[NodeId]:
        """Return the nodes that are up on a host."""
        return [name for name, node in self._up() if node.host == host]

    def must_be_proved(self, gone: AgentLost) -> bool:
        """Take Ray's report that a node is gone. True: it may be alive: wait for a proof.

        If its link is up, its agent is told to end.
        """
        node = self._nodes.get(gone.node)
        if node is not None and node.outlives_report and gone.is_host_dead:
            node.heard_at = min(node.heard_at, time.monotonic() + node.outlives_report)
            node.outlives_report = 0.0
            self._next_check = min(self._next_check, node.heard_at + self._timeout)
            return True
        if node is None or not node.is_up or self._links is None or not self._links.is_up(gone.node):
            return False
        node.reported = gone
        self._links.shut_down(gone.node)
        return True

    def link_down(self, node: NodeId) -> AgentLost:
        """Return the loss of a node whose link is down, with Ray's reason if it reported one."""
        found = self._nodes.get(node)
        return (found and found.reported) or AgentLost(node=node, why="its agent died")

    @property
    def next_check(self) -> float:
        """When to call `silent`; infinity: no node is up."""
        return self._next_check

    def silent(self, now: float) -> list[AgentLost]:
        """Return the nodes that were silent for `node_timeout`.

        If this process itself stood still, the reports of all nodes may wait to be read, so none is returned until
        they had the time of one report.
        """
        if now < self._next_check:
            return []
        overdue_at = {name: node.heard_at + self._timeout for name, node in self._up()}
        nearest = min(now + self._timeout, *overdue_at.values()) if overdue_at else _NEVER
        self._next_check = max(self._no_check_before, nearest)
        if now - self._next_check > report_interval(self._timeout):
            self._next_check = self._no_check_before = now + report_interval(self._timeout)
        if now < self._next_check:
            return []
        self._next_check = now  # the caller gives these up; the next call finds who is next
        why = f"nothing was heard of it for {self._timeout:g} s"
        overdue = sorted(name for name, at in overdue_at.items() if now >= at)
        return [AgentLost(node=name, why=why, silent=True) for name in overdue]

    def give_up(self, node: NodeId, *, ends: bool = True) -> None:
        """Count a node as lost for good. `ends`: tell its agent to end, if it is alive after all."""
        with self._lock:
            self._lost[node] = None
            self._nodes.pop(node, None)
            if len(self._lost) > _MOST_LOST:
                del self._lost[next(iter(self._lost))]
        if ends:
            self.end(node)

    def end(self, node: NodeId) -> None:
        """Tell a node's agent to end, if its link is up. Any thread may call this."""
        if self._links is not None:
            self._links.shut_down(node)

    def hosts(self) -> dict[NodeId, HostId]:
        """Return the hosts of the nodes that are up."""
        return {name: node.host for name, node in self._up()}

    def _up(self) -> Iterator[tuple[NodeId, _Node]]:
        with self._lock:
            nodes = [*self._nodes.items()]
        return ((name, node) for name, node in nodes if node.is_up)
