"""The driver's interface to the agents of a run: the calls it makes (`Fleet`), and the news it gets (`Item`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from raylaunch.cluster.agent.agent import AgentReport
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.errors import ClusterError
from raylaunch.node.logs.log_files import LogAnswer, LogQuery, LogRead
from raylaunch.node.protocol.node_goal import NodeGoal, Order


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotGranted:
    """A slot was granted on a host (Ray's node id), and an agent starts: `AgentReady` or `AgentLost` follows."""

    node: NodeId
    host: HostId
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportReceived:
    """An agent's report arrived, at this time.monotonic() of the driver's process."""

    node: NodeId
    report: AgentReport
    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """An agent is lost. `silent`: the driver concluded that itself, since no report came for too long."""

    node: NodeId
    why: str
    error: BaseException | None = None
    is_host_dead: bool = False
    """Ray counts its host as dead, which it may also do with one that is cut off."""
    silent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDraining:
    """A host (Ray's node id) will be removed at `deadline`, in time.monotonic() seconds of the driver's process."""

    host: HostId
    deadline: float
    why: str
    ours: bool = False
    """The driver runs on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFailed:
    """The fleet cannot go on, and so the run ends."""

    error: ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAdopted:
    """After a takeover: an agent obeys this driver. `goal`: what it was told before, and is told since."""

    node: NodeId
    goal: NodeGoal
    report: AgentReport
    at: float
    """The time.monotonic() at which it has answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsAdopted:
    """After a takeover: each agent that was up obeys this driver, or is lost."""


Item = SlotGranted | ReportReceived | AgentLost | HostDraining | FleetFailed | AgentAdopted | AgentsAdopted
Tell = Callable[[Item], None]
"""Takes an item. It is called from several threads, and must not block."""


class Fleet(Protocol):
    """All agents of a run. No method waits for a host; what comes of a call is told by the `tell` given to `start`."""

    def start(self, tell: Tell) -> None:
        """Reserve slots for all bundles of the plan, and start agents there. Slots that are lost are reserved anew."""

    def send(self, node: NodeId, order: Order) -> None:
        """Send an order to a node's agent, without waiting. Does nothing where the node has no agent any more."""

    def joined(self, node: NodeId, host: HostId) -> bool:
        """Accept an agent that is ready on this host. False: it is not needed there, and was ended."""

    def release(self, node: NodeId, *, frees_memory: bool = False) -> None:
        """End a node's agent, and reserve another slot. `frees_memory`: see `Release`."""

    def replace(self, gone: AgentLost) -> None:
        """Reserve another slot for an agent that is lost. Raises ClusterError where a new one would be lost too."""

    def cordon(self, host: HostId) -> None:
        """Reserve nothing more on this host. An agent that is ready there stays, and another is started elsewhere."""

    def uncordon(self, host: HostId) -> None:
        """Allow reservations on the host again."""

    def scale(self, nodes: int) -> None:
        """Set the number of nodes: reserve more, or none where nodes are lost. Nodes that are ready are never ended."""

    def logs(self, node: NodeId, asked: LogQuery | LogRead) -> Future[LogAnswer]:
        """Ask a node's agent for log files. Any thread may call this. An error of the agent is the future's."""

    def read_result(self, node: NodeId, rank: int, offset: int) -> Future[bytes]:
        """Ask a node's agent for a part of what the function of a rank returned or raised: `Supervisor.read_result`."""

    def ask(self, capability: str, node: NodeId) -> Future[bytes]:
        """Ask a capability's part on a node. LookupError is the future's for a node without agent."""

    def make_idle(self) -> None:
        """The run is over: leave agents to the next one, where `keep_warm` is set."""

    def close(self) -> None:
        """End all agents that are not left to the next run, with their processes."""
