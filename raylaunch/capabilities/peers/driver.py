"""Finds nodes that cannot reach each other, though the driver reaches all of them.

In a check, one node of each host listens for a while, and each of these nodes connects to the others. There is a check
when an attempt makes no steps, and when a worker fails like one that lost a peer. The machine decides what follows.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from msgspec import msgpack

from raylaunch.capabilities.peers.agent import PROBE_SECONDS, PeerAddress, PeerGoal, PeerStatus
from raylaunch.cluster.capability import NEVER, DriverPart, DriverPort
from raylaunch.cluster.stack_probe import StackProbe
from raylaunch.core.failures.failure import root_cause
from raylaunch.core.failures.stacks import grouped
from raylaunch.core.machine.events_and_actions import (
    Event,
    PeersUnreachable,
    UnreachablePeer,
    WorkersExited,
    WorkersHung,
)
from raylaunch.core.machine.state import Phase
from raylaunch.core.newtypes import NO_HOST, NodeId, RunTime
from raylaunch.core.placement.environment import Assignment, assign
from raylaunch.node.protocol.node_status import StacksDumped

FORM_SECONDS = 10.0
"""How long after its launch an attempt without a step is checked. Each further check comes after twice the time."""
_AFTER_FAILURE_SECONDS = 1.0
"""The pause before a check that nothing waits for. The next attempt starts meanwhile."""
_ANSWER_SECONDS = 2.0
"""How long nodes have to answer, beyond what the work itself takes. A missing answer proves nothing."""
_MOST_PEERS = 64
"""The most nodes that one node connects to in one check. If there are more, they are chosen at random."""
_PHASES = (Phase.STARTING, Phase.RUNNING)
"""Phases in which a failure may end the run."""


class _Stage(enum.Enum):
    LISTENING = enum.auto()
    PROBING = enum.auto()
    SAMPLING = enum.auto()
    """The stacks of all workers are collected, since there may be another reason why they have made no step."""


@dataclass(slots=True, kw_only=True)
class _Check:
    number: int
    attempt: int
    after_failure: bool
    missing: set[NodeId]
    deadline: float
    stage: _Stage = _Stage.LISTENING
    addresses: dict[NodeId, PeerAddress] = field(default_factory=dict)
    asked: set[NodeId] = field(default_factory=set)
    unreachable: dict[NodeId, tuple[tuple[NodeId, str], ...]] = field(default_factory=dict)
    found: tuple[UnreachablePeer, ...] = ()
    probe: StackProbe | None = None


class PeerCheck(DriverPart):
    """The checks of a run, one at a time. Times are seconds since the run began."""

    def __init__(self, port: DriverPort) -> None:
        self._port = port
        self._machine = port.machine
        self._number = 0
        self._check: _Check | None = None
        #: When the next check of an attempt that makes no step is due; likewise one after a failure.
        self._form_at = self._failed_at = NEVER
        self._launched_at = 0.0
        self._failed_attempt = 0
        #: Failures that would end the run, if the check does not explain them.
        self._held: list[WorkersExited | WorkersHung] = []
        #: The last attempt whose failures were held.
        self._held_attempt = 0

    # What happens in the run.

    def launched(self, now: RunTime) -> None:
        """Start the time limit for forming the group of an attempt that was launched."""
        self._launched_at = now
        self._form_at = now + FORM_SECONDS if self._peers() else NEVER

    def holds(self, event: Event, now: RunTime) -> bool:
        """Take an event before the machine does. True: it must not have it yet. `due_events` will yield it.

        These are failures for which the run may end, though they may come from the network.
        """
        if not isinstance(event, WorkersExited | WorkersHung) or event.attempt != self._machine.attempt:
            return False
        cause = root_cause(event.failures)
        is_released = self._held_attempt == event.attempt and not self._held
        if cause is None or not cause.is_collateral or is_released or not self._peers():
            return False
        may_end = self._machine.restarts >= self._machine.job.max_restarts and self._machine.phase in _PHASES
        if self._check is not None:
            self._check.after_failure, self._check.attempt = True, event.attempt
        else:
            self._failed_at = min(self._failed_at, now if may_end else now + _AFTER_FAILURE_SECONDS)
        self._failed_attempt = event.attempt
        if may_end:
            self._held.append(event)
            self._held_attempt = event.attempt
        return may_end

    # Answers.

    def told(self, node: NodeId, section: bytes) -> None:
        """Record where a node listens, or the nodes that it cannot reach."""
        status, check = msgpack.decode(section, type=PeerStatus), self._check
        self._number = max(self._number, status.check)  # it may be of an earlier driver's last check
        if check is None or status.check != check.number or node not in check.missing:
            return
        if check.stage is _Stage.LISTENING:
            check.missing.discard(node)
            if status.port:
                address = self._machine.nodes[node].address if node in self._machine.nodes else ""
                check.addresses[node] = PeerAddress(node=node, address=address, port=status.port, token=status.token)
        elif status.unreachable is not None:
            check.missing.discard(node)
            check.unreachable[node] = status.unreachable

    def stacks(self, answer: StacksDumped) -> None:
        """Take a node's stacks, if a check waits for them."""
        if self._check is not None and self._check.probe is not None:
            self._check.probe.answered(answer)

    # What is due.

    @property
    def next_check(self) -> float:
        """When `due_events` must be called next."""
        check = self._check
        if check is None:
            return min(NEVER if self._machine.world.has_progressed else self._form_at, self._failed_at)
        if check.probe is not None:
            return check.probe.next_check
        return check.deadline if check.missing else 0.0

    def due_events(self, now: RunTime) -> Iterator[Event]:
        """Yield what a check has found, and then the events that it has held."""
        if now < self.next_check:
            return
        check = self._check
        if check is None:
            self._start(now)
        elif check.stage is _Stage.LISTENING:
            self._probe(check, now)
        elif check.stage is _Stage.PROBING:
            yield from self._judge(check, now)
        else:
            yield from self._end(check, now)
        if self._check is None:
            yield from self._release(now)

    def _start(self, now: RunTime) -> None:
        after_failure = self._failed_at <= now
        if after_failure:
            self._failed_at = NEVER
        else:
            self._form_at = now + (now - self._launched_at)
        peers = self._peers()
        if not peers:
            return
        self._number += 1
        self._check = _Check(
            number=self._number,
            attempt=self._failed_attempt if after_failure else self._machine.attempt,
            after_failure=after_failure,
            missing=set(peers),
            deadline=now + _ANSWER_SECONDS,
        )
        for node in peers:
            self._port.show(node, msgpack.encode(PeerGoal(check=self._number)))

    def _peers(self) -> list[NodeId]:
        """Return one node of each host of the attempt; none if there is only one host."""
        nodes = self._machine.nodes
        by_host = {nodes[node].host: node for node in reversed(self._machine.roster) if node in nodes}
        by_host.pop(NO_HOST, None)
        return [*by_host.values()] if len(by_host) > 1 else []

    def _probe(self, check: _Check, now: RunTime) -> None:
        check.stage = _Stage.PROBING
        check.missing = set(check.addresses)
        check.deadline = now + PROBE_SECONDS + _ANSWER_SECONDS
        for node in check.addresses:
            others = [address for other, address in check.addresses.items() if other != node]
            peers = random.sample(others, _MOST_PEERS) if len(others) > _MOST_PEERS else others
            self._port.show(node, msgpack.encode(PeerGoal(check=check.number, peers=tuple(peers))))

    def _judge(self, check: _Check, now: RunTime) -> Iterator[Event]:
        """Decide which nodes cannot be reached. A node that has not answered does not count: other checks find it."""
        check.found = tuple(
            UnreachablePeer(node=node, peer=peer, why=why)
            for node, unreachable in sorted(check.unreachable.items())
            for peer, why in unreachable
            if peer in check.unreachable
        )
        if not check.found or check.after_failure:
            yield from self._end(check, now)
            return
        check.stage = _Stage.SAMPLING
        check.probe = StackProbe(self._parts(), self._port.send)
        check.probe.sample(now)

    def _parts(self) -> Sequence[Assignment]:
        nodes = self._machine.nodes
        return assign(self._machine.attempt, [nodes[node] for node in self._machine.roster if node in nodes])

    def _end(self, check: _Check, now: RunTime) -> Iterator[Event]:
        self._check = None
        if self._machine.world.has_progressed and not check.after_failure:
            return  # its workers reach each other
        if check.probe is not None and not check.after_failure:
            ranks = [rank for part in self._parts() for rank in part.ranks]
            if not all(group.waits_for_node for group in grouped(check.probe.stacks, ranks)):
                return
        if check.found:
            yield PeersUnreachable(at=now, attempt=check.attempt, peers=check.found)

    def _release(self, now: RunTime) -> Iterator[Event]:
        if self._failed_at == NEVER:
            held, self._held = self._held, []
            yield from (replace(event, at=now) for event in held)
