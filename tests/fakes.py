"""A fleet without Ray for tests of the driver: tests report in place of its nodes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from msgspec import msgpack

from raylaunch.capabilities.peers import agent as peers
from raylaunch.cluster.agent.agent import AgentReport
from raylaunch.cluster.capability import AgentPort, DriverPort
from raylaunch.cluster.fleet_api import AgentLost, HostDraining, ReportReceived, SlotGranted
from raylaunch.core.failures.stacks import Stack
from raylaunch.core.machine.measured import RestartTimings
from raylaunch.core.machine.workers_status import WorkerExit, WorkersStatus
from raylaunch.core.monitoring.heartbeat import Heartbeat
from raylaunch.core.newtypes import NodeTime
from raylaunch.core.placement.environment import Assignment
from raylaunch.node.logs.tail import LogOutput
from raylaunch.node.protocol import node_status
from raylaunch.node.protocol.node_goal import (
    CapabilitySection,
    CommitCheckpoint,
    DumpStacks,
    LaunchWorkers,
    OpenStore,
    Order,
    ProposeCheckpoint,
    SignalWorkers,
    StopWorkers,
)
from raylaunch.node.protocol.node_status import AgentReady, NodeStatus, StacksDumped, StepProposed

READY = node_status.Ready(start_method="forkserver", why=(), torch=True, pid=1)
TIMINGS = RestartTimings(ordered=NodeTime(0.0), ended=NodeTime(0.0), forked=NodeTime(0.0))


def worker_exit(attempt: int, rank: int, local_rank: int = 0, **known: Any) -> WorkerExit:
    """Return the exit of a killed worker; `known` replaces fields."""
    unknown = dict.fromkeys(("host", "error_file", "spoilt", "evidence", "stdout", "stderr", "tail"), "")
    facts = {"pid": 1, "at": 0.0, "exit_code": -9, "stopped": False, "error": None, **unknown, **known}
    return WorkerExit(attempt=attempt, rank=rank, local_rank=local_rank, **facts)


def agent_port(**known: Any) -> AgentPort:
    """Return what a capability's part in an agent gets; `known`: the fields that the part uses."""
    return AgentPort(**dict.fromkeys(AgentPort.__dataclass_fields__) | {"address": ""} | known)


def driver_port(**known: Any) -> DriverPort:
    """Return what a capability's part in the driver gets; `known`: the fields that the part uses."""
    return DriverPort(**dict.fromkeys(DriverPort.__dataclass_fields__) | known)


class FakeFleet:
    """Carries out each order at once. `on_launched` maps an attempt to what happens when it runs on all its nodes.

    Each node that is up sends a report every `heartbeat_seconds`, unless it was silenced; 0: none does.
    """

    def __init__(self, nodes: int, nproc: int = 2, *, heartbeat_seconds: float = 0.0) -> None:
        self.names = [f"node-{index + 1}" for index in range(nodes)]
        self.heartbeat_seconds = heartbeat_seconds
        self.silenced: set[str] = set()
        #: By node: its host, if that is not its own.
        self.hosts: dict[str, str] = {}
        #: By node: the nodes that it cannot connect to.
        self.unreachable: dict[str, tuple[str, ...]] = {}
        #: The stacks that each node reports when it is asked for them.
        self.stacks: dict[str, tuple[Stack, ...]] = {}
        #: By node: the step that its workers have reached at the next proposal; else the step before the proposed one.
        self.reached: dict[str, int] = {}
        self._reporting: set[str] = set()
        self.statuses: dict[str, NodeStatus] = {}
        self._closed = threading.Event()
        self.nproc = nproc
        self.sent: list[tuple[Any, ...]] = []
        self.tell: Callable[[Any], None] = lambda _: None
        self.on_launched: dict[int, Callable[[], None]] = {}
        #: By type of order: what happens when one is sent, instead of `obey`.
        self.overrides: dict[type[Any], Callable[[str, Any], Any]] = {}
        self.ready = READY
        self.interface_env: dict[str, str] = {}
        self.given_up: set[str] = set()
        self._parts: dict[str, Assignment] = {}
        self._up: set[str] = set()

    def start(self, tell) -> None:
        self.tell = tell
        for node in self.names:
            self.join(node)
        if self.heartbeat_seconds:
            threading.Thread(target=self._send_heartbeats, daemon=True).start()

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(self.heartbeat_seconds):
            for node in sorted(self._reporting):
                self.report(node)

    # What a test makes happen.

    def grant(self, node: str) -> None:
        self.tell(SlotGranted(node=node, host=f"id-{node}", address="10.0.0.1"))

    def join(self, node: str) -> None:
        up = AgentReady(
            host=self.hosts.get(node, f"id-{node}"),
            address="10.0.0.1",
            nproc=self.nproc,
            ready=self.ready,
            interface_env=self.interface_env,
        )
        self._reporting.add(node)
        self.report(node, up)

    def report(
        self,
        node: str,
        *events: Any,
        output: list[LogOutput] | None = None,
        heartbeat: Heartbeat | None = None,
        now: float = 0.0,
    ) -> None:
        if node in self.silenced:
            return
        stacks = [event for event in events if isinstance(event, StacksDumped)]
        before = status = self.statuses.get(node, NodeStatus())
        for event in events:
            if not isinstance(event, StacksDumped):
                status = status.after(event)
        self.statuses[node] = status
        report = AgentReport(
            sent_at=NodeTime(now),
            status=status if status != before else None,
            stacks=stacks,
            output=output or [],
            heartbeat=heartbeat,
        )
        self.tell(ReportReceived(node=node, report=report, at=time.monotonic()))

    def silence(self, node: str) -> None:
        self.silenced.add(node)

    def drain(self, node: str, seconds: float = 30.0) -> None:
        self.tell(HostDraining(host=f"id-{node}", deadline=time.monotonic() + seconds, why="it is being drained"))

    def fail(self, rank: int, *, at: float = 0.0, now: float = 0.0) -> None:
        part = next(part for part in self._parts.values() if rank in part.ranks)
        failure = worker_exit(part.attempt, rank, rank - part.base_rank, at=at)
        self.report(part.node, self.failed(part.node, failure), now=now)

    def workers(self, node: str, attempt: int, **changes: Any) -> WorkersStatus:
        """Return what is true of a node's workers when this, too, is true of those of an attempt."""
        before = self.statuses.get(node, NodeStatus()).workers
        return replace(before if before.attempt == attempt else WorkersStatus(attempt=attempt), **changes)

    def failed(self, node: str, failure: WorkerExit) -> WorkersStatus:
        """Return what is true of a node's workers when one more of them has failed."""
        before = self.workers(node, failure.attempt)
        return replace(before, failures=(*before.failures, failure))

    def finish(self) -> None:
        for node, part in self._parts.items():
            self.report(node, self.workers(node, part.attempt, succeeded=True))

    def lose(self, node: str) -> None:
        self._parts.pop(node, None)
        self._reporting.discard(node)
        self.tell(AgentLost(node=node, why="its agent died"))

    # What the driver calls.

    def send(self, node: str, order: Order) -> None:
        """Carry out the order, or do what the test has put into `overrides` for orders of this type."""
        instead = self.overrides.get(type(order))
        if instead is not None:
            instead(node, order)
        else:
            self.obey(node, order)

    def obey(self, node: str, order: Order) -> None:
        self.record(node, order)
        match order:
            case LaunchWorkers():
                self._launch(node, order.assignment)
            case StopWorkers():
                self.report(node, self.workers(node, order.attempt, stopped=()))
            case ProposeCheckpoint(attempt=attempt, step=step):
                reached = self.reached.pop(node, step - 1)
                self.report(node, StepProposed(node=node, attempt=attempt, step=step, reached=reached))
            case CommitCheckpoint(attempt=attempt, step=step):
                self.report(node, self.workers(node, attempt, has_saved=True, saved=step))
            case DumpStacks(attempt=attempt):
                self.report(node, StacksDumped(node=node, attempt=attempt, stacks=self.stacks.get(node, ())))
            case CapabilitySection():
                body = msgpack.encode(self.checked(node, msgpack.decode(order.body, type=peers.PeerGoal)))
                self.report(node, CapabilitySection(capability=order.capability, body=body))
            case OpenStore(attempt=attempt):
                self.report(node, node_status.StoreOpened(attempt=attempt, port=5000 + attempt))

    def checked(self, node: str, goal: peers.PeerGoal) -> peers.PeerStatus:
        """Return how far a node is with a check of peers."""
        lost = [peer.node for peer in goal.peers or () if peer.node in self.unreachable.get(node, ())]
        unreachable = None if goal.peers is None else tuple((peer, "timed out") for peer in lost)
        return peers.PeerStatus(check=goal.check, port=1, token="0", unreachable=unreachable)

    def record(self, node: str, order: Order) -> None:
        """Append the order to `sent`: its name, the node, and what tests compare."""
        match order:
            case LaunchWorkers(assignment=part, rendezvous=rendezvous):
                self.sent.append(("launch", node, part.attempt, rendezvous.master_port))
            case StopWorkers():
                self.sent.append(("stop", node, order.attempt, order.grace, order.signal))
            case SignalWorkers():
                self.sent.append(("signal", node, order.attempt, order.signal))
            case ProposeCheckpoint():
                self.sent.append(("propose", node, order.attempt, order.step))
            case CommitCheckpoint():
                self.sent.append(("commit", node, order.attempt, order.step))
            case DumpStacks():
                self.sent.append(("stacks", node, order.attempt))
            case CapabilitySection() if (goal := msgpack.decode(order.body, type=peers.PeerGoal)).peers is None:
                self.sent.append(("listen", node))
            case CapabilitySection():
                self.sent.append(("connect", node, *(peer.node for peer in goal.peers)))
            case OpenStore():
                self.sent.append(("store", node, order.attempt))

    def _launch(self, node: str, part: Assignment) -> None:
        self._parts[node] = part
        self._up.add(node)
        self.report(node, self.workers(node, part.attempt, pids=(), timings=TIMINGS))
        if len(self._up) == part.nnodes:
            self._up.clear()
            self.on_launched.get(part.attempt, self.finish)()

    def cordon(self, host: str) -> None:
        self.sent.append(("cordon", host))

    def uncordon(self, host: str) -> None:
        self.sent.append(("uncordon", host))

    def scale(self, nodes: int) -> None:
        self.sent.append(("scale", nodes))

    def joined(self, node: str, host: str) -> bool:
        self.sent.append(("joined", node, host))
        return node not in self.given_up

    def release(self, node: str, *, frees_memory: bool = False) -> None:
        self.sent.append(("release", node))

    def replace(self, gone: AgentLost) -> None:
        self.sent.append(("replace", gone.node))

    def read_result(self, node: str, rank: int, offset: int) -> Future[bytes]:
        raise NotImplementedError

    def ask(self, capability: str, node: str) -> Future[bytes]:
        raise LookupError(node)

    def make_idle(self) -> None:
        pass

    def close(self) -> None:
        self._closed.set()
        self.sent.append(("close",))


class RunRecorder:
    """A journal and an observer that keep everything in memory."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self.lines: list[str] = []
        self.output: list[LogOutput] = []
        self.stacks: dict[int, str] = {}

    def append(self, entry: Any) -> None:
        self.entries.append(entry)

    def write_stacks(self, attempt: int, text: str) -> str:
        self.stacks[attempt] = text
        return f"attempt-{attempt}/stacks.txt"

    def on_entry(self, entry: Any, machine: Any) -> None:
        pass

    def on_progress(self, sample: Any) -> None:
        pass

    def on_output(self, output: Any) -> None:
        self.output.extend(output)

    def on_message(self, text: str) -> None:
        self.lines.append(text)
