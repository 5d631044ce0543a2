"""Simulations of the nodes that a machine controls, in simulated time.

`Simulation` carries out the actions of a machine; `ClusterSimulation` also has hosts that fail, and a fleet that
replaces nodes. Nodes may be silent: they do not answer some orders. Forbidden actions fail an assertion as soon as the
machine orders them.
"""

from __future__ import annotations

import copy
import heapq
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from machine_helpers import (
    check_invariants,
    checkpointed,
    draining,
    failed,
    finished,
    forward_requested,
    handle_checked,
    hung,
    joined,
    lost,
    progressed,
    raised,
    replaced,
    restart_requested,
    started,
    stopped,
    tick,
)

from raylaunch.core.job.job import Job
from raylaunch.core.machine.events_and_actions import (
    Action,
    Cordon,
    Event,
    Finish,
    Launch,
    NodeDraining,
    NodeJoined,
    NodeLost,
    Release,
    RequestCheckpoint,
    SetTimer,
    Stop,
    Uncordon,
    WorkerEvent,
    WorkersCheckpointed,
    WorkersElastic,
    WorkersExited,
    WorkersHung,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.state import Gathering, Phase, Running, Saving, Starting
from raylaunch.core.machine.transitions import STOP_MARGIN

Scheduled = Event | Callable[[], None]

PEER_LOST = raised("RuntimeError", "Connection reset by peer")


@dataclass
class Simulation:
    """Nodes that carry out actions after a delay, except for the silent ones, and a timer that sends ticks."""

    machine: Machine
    silent: dict[str, str] = field(default_factory=dict)
    now: float = 0.0
    timer: float | None = None
    finish: Finish | None = None
    #: Nodes that joined, and were neither lost nor released.
    members: dict[str, NodeJoined] = field(default_factory=dict)
    drained: set[str] = field(default_factory=set)
    cordoned: set[str] = field(default_factory=set)
    #: When each node joined, and when the present attempt was launched.
    joined_at: dict[str, float] = field(default_factory=dict)
    launched_at: float = 0.0
    #: The attempt that each node runs, 0 for none. A dead node has no entry.
    running_attempt: dict[str, int] = field(default_factory=dict)
    #: Nodes whose workers were sent a signal and have grace left.
    in_grace: set[str] = field(default_factory=set)
    queue: list[tuple[float, int, Scheduled]] = field(default_factory=list)
    sequence: int = 0

    def schedule_event(self, event: Event) -> None:
        self.schedule(event.at, event)

    def schedule(self, when: float, item: Scheduled) -> None:
        """Deliver this event, or call this function, at a later time."""
        self.sequence += 1
        heapq.heappush(self.queue, (when, self.sequence, item))

    def run(self, *, at_most: int) -> None:
        """Run until the machine is done, or nothing is scheduled. Fail after `at_most` items."""
        self.carry_out(self.machine.start())
        for _ in range(at_most):
            found = self.next_item()
            if found is None or self.finish is not None:
                return
            self.now, item = max(self.now, found[0]), found[1]
            if callable(item):
                item()
            elif self.accept(item):
                self.deliver(replace(item, at=self.now))
        pytest.fail(f"the run has not ended after {at_most} items")

    def deliver(self, event: Event) -> None:
        """Hand an event to the machine, check its decision, and carry out the actions."""
        before = self.machine.restarts
        actions = handle_checked(self.machine, event) if len(self.members) < 100 else self.machine.handle(event)
        self.carry_out(actions)
        spent = self.machine.restarts - before
        assert 0 <= self.machine.restarts <= self.machine.job.max_restarts
        assert spent <= 0 or isinstance(event, WorkersExited | WorkersHung), f"{event} spent a restart"
        if actions or len(self.members) < 100:
            check_invariants(self.machine)
            assert not self.is_stuck(), "an attempt is possible, and the machine waits for nothing"

    def is_stuck(self) -> bool:
        """Return whether the machine gathers, though an attempt is possible and neither delay nor last call runs."""
        machine = self.machine
        if not isinstance(machine.state, Gathering) or not machine.members.enough:
            return False
        if machine.state.backoff_until is not None:
            return False
        return machine.state.last_call is None or len(machine.members) >= machine.job.max_nodes

    def next_item(self) -> tuple[float, Scheduled] | None:
        """Return the next tick, event or function with its time; None if nothing is scheduled."""
        if self.timer is not None and (not self.queue or self.timer <= self.queue[0][0]):
            at, self.timer = self.timer, None
            return at, tick(at)
        if not self.queue:
            return None
        when, _, item = heapq.heappop(self.queue)
        return when, item

    def accept(self, event: Event) -> bool:
        """Apply an event to the nodes. Return False if it cannot occur: dead and stopped workers report no exit."""
        match event:
            case NodeJoined():
                self.running_attempt[event.node] = 0
                self.members[event.node] = event
                self.joined_at[event.node] = self.now
            case NodeLost():
                self.running_attempt.pop(event.node, None)
                return self.remove_node(event.node)
            case NodeDraining():
                self.drained |= {event.node} & self.members.keys()
                return event.node in self.members
            case WorkersStopped():
                self.in_grace.discard(event.node)
                return event.node in self.running_attempt
            case WorkersStarted() | WorkersElastic() | WorkersExited() | WorkersCheckpointed():
                return self.running_attempt.get(event.node) == event.attempt
        return True

    def remove_node(self, node: str) -> bool:
        """Remove a node, and return whether it was a member."""
        self.in_grace.discard(node)
        return self.members.pop(node, None) is not None

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Launch():
                    self.launch_all(action)
                case Stop():
                    for node in action.nodes:
                        self.stop_node(node, action)
                case RequestCheckpoint():
                    for node in action.nodes:
                        self.request_checkpoint(node, action.attempt)
                case SetTimer():
                    self.timer = action.at
                case Finish():
                    self.finish = action
                case Release() | Cordon() | Uncordon():
                    self.carry_out_host_action(action)

    def carry_out_host_action(self, action: Release | Cordon | Uncordon) -> None:
        match action:
            case Release():
                self.running_attempt.pop(action.node, None)
                assert self.remove_node(action.node), f"{action.node} is released, but is not a member"
            case Cordon():
                self.cordoned.add(action.host)
            case Uncordon():
                self.cordoned.remove(action.host)

    def launch_all(self, order: Launch) -> None:
        """Assert that no other attempt runs, no grace is cut short, and all nodes of the roster can be used."""
        job, roster = self.machine.job, set(order.roster)
        strays = [node for node, attempt in self.running_attempt.items() if attempt and node not in roster]
        assert not strays, f"{strays} still run an earlier attempt"
        assert not self.in_grace, f"{self.in_grace} still have grace to stop"
        assert job.min_nodes <= len(roster) == len(order.roster) <= job.max_nodes
        assert roster <= self.members.keys() - self.drained
        assert self.cordoned.isdisjoint(self.members[node].host for node in roster)
        workers = sum(self.members[node].nproc for node in roster)
        assert workers % job.multiple_of == 0
        assert workers == self.machine.world.size
        self.launched_at = self.now
        for node in order.roster:
            self.launch_node(node, order.attempt)

    def launch_node(self, node: str, attempt: int) -> None:
        if node in self.running_attempt:  # a dead node may not have been reported as lost yet
            self.running_attempt[node] = attempt
        if "never starts" not in self.silent.get(node, ""):
            self.schedule_event(started(node, self.now + 0.1, attempt=attempt))
            self.schedule_event(finished(node, self.now + 50.0, attempt=attempt))

    def request_checkpoint(self, node: str, attempt: int) -> None:
        assert self.machine.attempt == attempt
        assert self.running_attempt.get(node, attempt) == attempt, f"{node} does not run the attempt that should save"
        if "never saves" not in self.silent.get(node, ""):
            self.schedule_event(checkpointed(node, self.now + 0.4, attempt=attempt))

    def stop_node(self, node: str, order: Stop) -> None:
        """End the attempt on a node; it answers after half of the grace."""
        assert node in self.members
        if self.running_attempt.get(node) == order.attempt:
            self.running_attempt[node] = 0
            if order.grace:
                self.in_grace.add(node)
        if "never stops" not in self.silent.get(node, ""):
            self.schedule_event(stopped(node, self.now + order.grace / 2, attempt=order.attempt))


class ClusterSimulation(Simulation):
    """Hosts that fail and return, and a fleet that keeps as many nodes on them as the job wants."""

    def __init__(
        self,
        job: Job,
        *,
        hosts: int,
        seed: int,
        silent: float = 0.0,
        sizes: tuple[int, ...] = (2,),
        late: float = 0.0,
        twice: float = 0.0,
        elastic: float = 0.0,
        dying: float = 0.0,
    ) -> None:
        """`silent`: the share of silent nodes. `late`: the mean delay of reports. `twice`: the share of duplicates.

        `elastic`: the share of attempts in which the workers of a node can stay. `dying`: the share of launches of
        which the driver dies before it has told all nodes.
        """
        super().__init__(Machine(job))
        self.random = Random(seed)
        self.wanted_nodes = job.max_nodes + job.spares
        self.nproc_of_host = {f"host-{number}": self.random.choice(sizes) for number in range(hosts)}
        self.free_hosts = list(self.nproc_of_host)
        self.away_hosts: set[str] = set()
        self.host_of_node: dict[str, str] = {}
        self.nodes_named = 0
        #: Drained nodes with enough time to leave them.
        self.drained_with_time: set[str] = set()
        #: Failures that no lost node explains.
        self.own_failures = 0
        self.silent_share, self.mean_delay, self.duplicate_share = silent, late, twice
        self.elastic_share, self.dying_share = elastic, dying
        #: Nodes of the present attempt that were not told of it, since the driver dies.
        self.untold: set[str] = set()
        #: The nodes whose workers stay in the present attempt, and those that have said that theirs can.
        self.staying: set[str] = set()
        self.can_stay: set[str] = set()
        self.start_missing_agents()

    # Reports

    def schedule_event(self, event: Event) -> None:
        lag = (
            self.random.expovariate(1 / self.mean_delay) if self.mean_delay and isinstance(event, WorkerEvent) else 0.0
        )
        self.schedule(event.at + lag, event)

    def deliver(self, event: Event) -> None:
        super().deliver(event)
        if isinstance(event, WorkerEvent | NodeLost) and self.random.random() < self.duplicate_share:
            self.schedule(self.now + self.random.expovariate(1.0), lambda: self.deliver_again(event))

    def deliver_again(self, event: Event) -> None:
        super().deliver(replace(event, at=self.now))

    # Drivers

    def driver_dies(self) -> None:
        """Another driver goes on with the ledger of the last one, and tells nodes what they were not told.

        It reaches the same world, and spends no restart.
        """
        run = pickle.loads(pickle.dumps(self.machine.run))
        before = copy.deepcopy((run.world, run.state, run.budget.spent))
        self.machine, self.timer = Machine(run.started_as, run), None
        untold, self.untold = self.untold, set()
        for node in sorted(untold & run.members.nodes.keys()):
            if isinstance(run.state, Starting | Running | Saving):
                self.launch_node(node, run.world.attempt)
            elif node in self.running_attempt:
                self.running_attempt[node] = 0  # what it still ran is stopped
        self.deliver(replaced(self.now))
        assert (self.machine.world, self.machine.state, self.machine.restarts) == before

    def launch_all(self, order: Launch) -> None:
        self.untold = set()
        if self.random.random() < self.dying_share:
            self.untold = {node for node in order.roster if self.random.random() < 0.5}
            self.schedule(self.now, self.driver_dies)
        super().launch_all(order)

    # Survivors

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Launch():
                    self.staying = {*action.staying}
                    assert self.staying <= self.can_stay & {*action.roster}
                    self.can_stay &= self.staying
        super().carry_out(actions)

    def launch_node(self, node: str, attempt: int) -> None:
        """Survivors may have nothing to restore."""
        if node in self.untold:
            return
        if not self.elastic_share:
            super().launch_node(node, attempt)
            return
        if node in self.running_attempt:
            self.running_attempt[node] = attempt
        if "never starts" not in self.silent.get(node, ""):
            stayed = self.random.randrange(3) if node in self.staying else 0
            if self.staying and node == self.machine.roster[0] and self.random.random() < 0.4:
                self.schedule_event(restart_requested(self.now + 0.2, save_seconds=0.0))
            begun = started(node, self.now + 0.1, attempt=attempt)
            self.schedule_event(replace(begun, stayed=stayed))
            if self.random.random() < self.elastic_share:
                self.schedule_event(WorkersElastic(at=self.now + 1.0, attempt=attempt, node=node))
            self.schedule_event(finished(node, self.now + 50.0, attempt=attempt))

    # The fleet

    def start_missing_agents(self) -> None:
        """Start agents for all missing nodes, on hosts that are not cordoned."""
        kept = [host for host in self.free_hosts if host in self.cordoned]
        free = [host for host in self.free_hosts if host not in self.cordoned]
        while free and len(self.host_of_node) < self.wanted_nodes:
            self.nodes_named += 1
            node, host = f"node-{self.nodes_named}", free.pop(self.random.randrange(len(free)))
            self.host_of_node[node] = host
            if self.random.random() < self.silent_share:
                self.silent[node] = self.random.choice(("never starts", "never stops", "never saves"))
            when, nproc = self.now + self.random.uniform(0.2, 1.0), self.nproc_of_host[host]
            self.schedule_event(joined(node, when, nproc=nproc, address=f"10.0.0.{self.nodes_named}", host=host))
        self.free_hosts = kept + free

    def carry_out_host_action(self, action: Release | Cordon | Uncordon) -> None:
        super().carry_out_host_action(action)
        self.schedule(self.now, self.start_missing_agents)

    def accept(self, event: Event) -> bool:
        if isinstance(event, NodeJoined) and event.node not in self.host_of_node:
            return False  # its host failed before the agent was ready
        if isinstance(event, WorkersElastic) and event.attempt == self.machine.attempt:
            self.can_stay.add(event.node)
        return super().accept(event)

    def remove_node(self, node: str) -> bool:
        """Free the host of the node, and let the fleet replace the node."""
        host = self.host_of_node.pop(node, None)
        if host is not None and host not in self.away_hosts:
            self.free_hosts.append(host)
        self.schedule(self.now, self.start_missing_agents)
        return super().remove_node(node)

    # Faults

    def schedule_faults(self, *, until: float, every: float, kinds: tuple[str, ...]) -> None:
        """Schedule one of these methods about every so many seconds, at random, from 10 s on."""
        at = 10.0
        while at < until:
            self.schedule(at, getattr(self, self.random.choice(kinds)))
            at += self.random.expovariate(1 / every)

    def random_node(self) -> str | None:
        return self.random.choice(sorted(self.members)) if self.members else None

    def agent_dies(self) -> None:
        """An agent dies; another may start on its host at once."""
        node = self.random_node()
        if node is not None and node in self.running_attempt:
            self.running_attempt.pop(node)
            self.schedule_event(lost(node, self.now + 0.1))

    def signal_forwarded(self) -> None:
        self.deliver(forward_requested("SIGUSR1", self.now))

    def take_host_away(self, node: str, *, noticed_after: float, away_for: float) -> None:
        """Kill all processes of a host, report the loss of its node a little later, and then return the host."""
        host = self.host_of_node[node]
        self.running_attempt.pop(node, None)
        self.away_hosts.add(host)
        self.schedule_event(lost(node, self.now + noticed_after))
        self.schedule(self.now + noticed_after + away_for, lambda: self.return_host(host))

    def return_host(self, host: str) -> None:
        """Make the host available to the fleet again."""
        self.away_hosts.discard(host)
        if host not in self.host_of_node.values() and host not in self.free_hosts:
            self.free_hosts.append(host)
        self.start_missing_agents()

    def host_dies(self) -> None:
        """A host dies, which is noticed at once."""
        self.lose_host(noticed_after=0.3)

    def host_unreachable(self) -> None:
        """The network of a host fails, which is noticed after the node timeout."""
        self.lose_host(noticed_after=5.0)

    def rack_fails(self) -> None:
        """Five hosts die together."""
        for _ in range(5):
            self.lose_host(noticed_after=0.5)

    def lose_host(self, *, noticed_after: float) -> None:
        """Let a host die. Its workers may be reported as killed before, and those of a peer may fail because of it."""
        node = self.random_node()
        if node is None or node not in self.running_attempt:
            return
        attempt, peer = self.running_attempt[node], self.random_node()
        if attempt and self.random.random() < 0.3:
            self.report_exit(failed(node, self.now, attempt=attempt))
        if (
            node not in self.host_of_node
        ):  # the failure excluded its host, so the node was released before its loss was reported
            self.own_failures += 1
            return
        self.take_host_away(node, noticed_after=noticed_after, away_for=self.random.uniform(1.0, 60.0))
        if attempt and peer is not None and self.random.random() < 0.5:
            self.schedule(self.now + 0.1, lambda: self.fail_peer(peer, node))

    def fail_peer(self, peer: str, gone: str) -> None:
        """A peer fails because of the lost node, if both are part of the present attempt."""
        if gone in self.machine.roster:
            self.report_exit(failed(peer, self.now, attempt=self.running_attempt.get(peer, 0), **PEER_LOST))

    def report_exit(self, report: WorkersExited) -> None:
        """Report an exit of workers, if the node runs that attempt."""
        if report.attempt and self.accept(report):
            self.deliver(report)

    def host_drained(self) -> None:
        """The host of a node is drained: it goes away at a deadline."""
        node = self.random_node()
        if node is None or node not in self.running_attempt or node in self.drained:
            return
        deadline = self.now + self.random.choice((5.0, 30.0, 120.0, 200.0))
        enough = 2 * self.machine.job.shutdown_timeout + STOP_MARGIN
        if deadline - self.now > enough and not (self.silent_share or self.mean_delay):
            self.drained_with_time.add(node)
        host = self.host_of_node[node]
        self.away_hosts.add(host)
        self.schedule_event(draining(node, self.now, deadline=deadline))
        self.schedule(deadline, lambda: self.end_drain(node, host))

    def end_drain(self, node: str, host: str) -> None:
        """Take the drained host away. With enough time and without other faults, its node was released before."""
        if self.host_of_node.get(node) == host:
            assert node not in self.drained_with_time or self.machine.phase is Phase.DONE, (
                f"{node} is still used at its deadline"
            )
            self.take_host_away(node, noticed_after=0.3, away_for=30.0)
        else:
            self.return_host(host)

    def script_crashes(self) -> None:
        """A worker raises an exception of its own."""
        node = self.random_node()
        if node is not None and self.running_attempt.get(node):
            self.own_failures += 1
            self.report_exit(
                failed(
                    node, self.now, attempt=self.running_attempt[node], **raised("ValueError", line=self.own_failures)
                )
            )

    def workers_hang(self) -> None:
        """Workers of a node are found to hang."""
        node = self.random_node()
        if node is not None and self.running_attempt.get(node) and self.machine.phase is Phase.RUNNING:
            self.own_failures += 1
            self.deliver(hung(node, self.now, attempt=self.running_attempt[node], exit_code=1, rank=self.own_failures))

    def progress_reported(self) -> None:
        self.deliver(progressed(self.now, attempt=self.machine.attempt))

    # In the end.

    def largest_world(self, since: float) -> int:
        """Return the most workers that usable nodes could run which joined before `since` (hosts of one size only)."""
        job, (size,) = self.machine.job, set(self.nproc_of_host.values())
        there = [node for node in self.members if node not in self.drained and self.joined_at[node] < since]
        most = min(len(there), job.max_nodes)
        return max((size * nodes for nodes in range(most + 1) if size * nodes % job.multiple_of == 0), default=0)
