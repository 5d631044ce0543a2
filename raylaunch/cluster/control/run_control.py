"""Answers what is asked of a run, over HTTP or by code in the driver's process: each request of `control_messages`."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from raylaunch.cluster.capability import DriverPart
from raylaunch.cluster.control.control_messages import (
    Accepted,
    ControlRequest,
    DrainNode,
    GetStacks,
    GetState,
    ListLogs,
    ReadLogs,
    RefusedError,
    ResizeRun,
    RestartRun,
    RunChange,
    RunState,
    StacksCollected,
    StopRun,
)
from raylaunch.cluster.control.control_server import ControlServer
from raylaunch.cluster.control.log_relay import LogRelay
from raylaunch.cluster.driver.driver import Driver
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.cluster.fleet_api import Fleet
from raylaunch.cluster.local import local_machine
from raylaunch.cluster.session.session_base import Session
from raylaunch.cluster.stack_probe import ANSWER_SECONDS, StackProbe
from raylaunch.core.failures.stacks import grouped
from raylaunch.core.machine.events_and_actions import (
    Event,
    NodeDraining,
    RequestEvent,
    ResizeRequested,
    RestartRequested,
    StopRequested,
)
from raylaunch.core.machine.state import Phase
from raylaunch.core.newtypes import SIGTERM, HostId, NodeId, RunTime, assert_never
from raylaunch.core.placement.environment import assign, natural_key
from raylaunch.core.record.result import RunResult
from raylaunch.core.text import host_list, printable
from raylaunch.node.protocol.acceptor import SecretAddress
from raylaunch.node.protocol.node_status import StacksDumped

MOST_WAIT_SECONDS = 15.0
"""The longest time after which the state is answered."""
NO_DEADLINE = 1e9
"""Seconds from a person's drain until the node is taken away: whoever drains it waits until the run has left it."""
_READ_SECONDS = 3.0
"""How long the end of a run waits for clients that read its logs, which are gone with the agents."""
_LEAVE_SECONDS = 2.0
"""How long it waits for clients that look on, to tell them how it ended."""
_ANSWER_SECONDS = 10.0
"""How long the driver may take to answer: it may stand still, as in a file system that does not answer."""
_MOST_NAMED = 8
_MOST_NAME = 100
_MOST_SECONDS = 7 * 86_400.0

Value = TypeVar("Value")


class StackSamples(DriverPart):
    """The samples of stacks that clients wait for. It hears of the nodes' answers as the capabilities do."""

    def __init__(self) -> None:
        #: With what is set when the sample is complete.
        self._probes: dict[StackProbe, threading.Event] = {}

    def begin(self, probe: StackProbe, now: RunTime, in_full: Sequence[int]) -> None:
        """Begin a sample, in the driver's loop. `in_full`: see `StackProbe.sample`."""
        self._probes[probe] = threading.Event()
        probe.sample(now, in_full)

    def stacks(self, answer: StacksDumped) -> None:
        """Take the stacks of a node's workers."""
        for probe, complete in [*self._probes.items()]:
            probe.answered(answer)
            if not probe.next_check:
                complete.set()

    def end(self, probe: StackProbe) -> None:
        """Wait until a sample is complete, but not longer than nodes have to answer. Any thread may call this."""
        self._probes[probe].wait(ANSWER_SECONDS)
        del self._probes[probe]


class RunControl:
    """Answers requests, in the threads of those who ask. What only the driver's loop may do is called there."""

    def __init__(
        self,
        driver: Driver,
        folder: RunFolder,
        log_layout: str,
        fleet: Fleet,
        hosts: Callable[[], frozenset[HostId] | None],
        why_no_room: Callable[[int], str],
    ) -> None:
        """`hosts` returns all hosts on which there may be nodes; None: there may be more later.

        `why_no_room` returns why there could never be room for this number of nodes; "": there could be, as far as is
        known. Any thread may call both.
        """
        self._driver = driver
        self._folder = folder
        self._log_layout = log_layout
        self._fleet = fleet
        self._hosts = hosts
        self.why_no_room = why_no_room
        self._logs = LogRelay(fleet, folder.recorded.status)
        #: Set when the workers have ended; and when nothing of the run is left.
        self._over, self._ended = threading.Event(), threading.Event()
        self._result: RunResult | None = None
        self._server: ControlServer | None = None
        self._samples = StackSamples()
        driver.parts["control"] = self._samples

    @property
    def address(self) -> SecretAddress | None:
        """Where it is served; None: nowhere."""
        return self._server.secret_address if self._server is not None else None

    @property
    def run_dir(self) -> str:
        """The path of the run folder; `""`: nothing is kept."""
        return self._folder.where

    @property
    def is_over(self) -> bool:
        """Whether the workers have ended, and their agents are about to."""
        return self._over.is_set()

    def serve(self, address: str) -> None:
        """Serve at this address of this machine, until `close`. Raises OSError."""
        self._server = ControlServer(address, self.answer)
        self._server.start()

    def over(self) -> None:
        """Answer clients that wait for the workers' end. Then wait some seconds for clients that read logs."""
        self._over.set()
        if self._server is not None:
            self._server.await_clients(_READ_SECONDS, reading_logs=True)

    def ended(self, result: RunResult) -> None:
        """Publish the result of the run, of which nothing is left. Wait some seconds for clients to get it."""
        self._result = result
        self._over.set()
        self._ended.set()
        if self._server is not None:
            self._server.await_clients(_LEAVE_SECONDS)

    def close(self) -> None:
        """Close the control port and the connections of all clients."""
        self._over.set()
        if self._server is not None:
            self._server.close()

    def answer(self, request: ControlRequest) -> Any:
        """Carry a request out, and return its answer. Raises RefusedError."""
        match request:
            case GetState():
                awaited = self._ended if self._over.is_set() else self._over
                awaited.wait(min(request.wait, MOST_WAIT_SECONDS))
                can_save = not request.before_change or self._can_save()  # first: the state is newer
                return replace(self._state(), can_save=can_save)
            case StopRun() | RestartRun() | ResizeRun() | DrainNode():
                return self._awaited(self.change(request))
            case GetStacks():
                return self._stacks(request.ranks)
            case ListLogs():
                return self._logs.spans(request)
            case ReadLogs():
                return self._logs.blocks(request)

    def _awaited(self, answer: Future[Value]) -> Value:
        try:
            return answer.result(timeout=_ANSWER_SECONDS)
        except CancelledError:
            raise RefusedError(f"the run has ended: {self._driver.machine.status}") from None
        except FutureTimeoutError:
            hint = "it may still do it: `raylaunch status` shows that"
            raise RefusedError(f"the driver has not answered within {_ANSWER_SECONDS:g} s", hint) from None

    def _can_save(self) -> bool:
        """Return whether the workers can save, as far as is known: True where the driver does not tell."""
        with contextlib.suppress(RefusedError):
            return self._over.is_set() or self._awaited(self.change(None)).can_save
        return True

    def _state(self) -> RunState:
        result = self._result  # first: the status is newer
        return RunState(
            status=self._folder.recorded.status(),
            log_layout=self._log_layout,
            keeps_logs=self._folder.path is not None,
            ended=result is not None,
            exit_code=result.exit_code if result is not None else None,
            why=result.why if result is not None else "",
        )

    def change(self, request: RunChange | None) -> Future[Accepted]:
        """Order the driver to change the run. The returned future tells when it has begun to, or why it does not.

        None: only tell where the run is, and whether its workers can save; and report how far they are.
        """
        hosts = self._hosts() if isinstance(request, DrainNode) else None
        return self._in_loop(lambda now: self._changed(request, now, hosts))

    def _in_loop(self, work: Callable[[RunTime], Generator[Event, None, Value]]) -> Future[Value]:
        """Have this done in the driver's loop, which handles the events that it yields. Return what it returns."""
        answer: Future[Value] = Future()
        if self._over.is_set():  # the loop has ended
            answer.cancel()
            return answer

        def answered(now: RunTime) -> Iterator[Event]:
            try:
                answer.set_result((yield from work(now)))
            except RefusedError as refused:
                answer.set_exception(refused)

        self._driver.inbox.call(answered, answer)
        return answer

    # In the driver's loop.

    def _changed(
        self, request: RunChange | None, now: RunTime, hosts: frozenset[HostId] | None
    ) -> Generator[Event, None, Accepted]:
        machine = self._driver.machine
        events = self._events(request, now, hosts) if request is not None else ()
        for event in events:
            if why := machine.refusal(event):
                raise RefusedError(why)
        if request is None and machine.phase is Phase.RUNNING:
            yield from self._driver.monitor.progress(now)
        attempt, can_save = machine.attempt, self._driver.monitor.can_save
        yield from events
        status = machine.status
        if len(drained := [event.node for event in events if isinstance(event, NodeDraining)]) > 1:
            status = f"{status}; on that host are {host_list(drained)}, which are all drained"
        return Accepted(attempt=attempt, phase=machine.phase, status=status, can_save=can_save)

    def _events(
        self, request: RunChange, at: RunTime, hosts: frozenset[HostId] | None
    ) -> Sequence[RequestEvent | NodeDraining]:
        by = printable(request.by)[:_MOST_NAME] or "a person"
        match request:
            case DrainNode(node=node):
                return self._drains(printable(node), by, at, hosts)
            case ResizeRun(min_nodes=low, max_nodes=high):
                return [ResizeRequested(at=at, by=by, min_nodes=low, max_nodes=high)]
            case RestartRun():
                return [RestartRequested(at=at, by=by, save_seconds=_seconds(request.save_seconds))]
            case StopRun(at_once=now):
                seconds = 0.0 if now else _seconds(request.save_seconds)
                return [StopRequested(at=at, signal=SIGTERM, by=by, save_seconds=seconds, now=now)]
            case _:
                return assert_never(request)

    def _drains(self, name: str, by: str, at: RunTime, hosts: frozenset[HostId] | None) -> list[NodeDraining]:
        machine = self._driver.machine
        nodes = machine.nodes
        named = [node for node, member in nodes.items() if name in (node, member.address)]
        if not named:
            there = sorted(nodes, key=natural_key)
            more = f" and {len(there) - _MOST_NAMED} more" if len(there) > _MOST_NAMED else ""
            names = ", ".join(f"{node} ({nodes[node].address})" for node in there[:_MOST_NAMED]) or "none"
            raise RefusedError(f"the run has no node {name[:_MOST_NAME]}: there are {names}{more}")
        host = nodes[named[0]].host
        if host == local_machine.HOST_ID:
            raise RefusedError("the run is on this machine alone, and cannot leave it")
        if all(nodes[node].draining for node in named):
            raise RefusedError(f"{named[0]} is being drained already")
        affected = machine.members.on_host(host) if host else named
        left = {member.host for member in nodes.values() if member.draining} | {host}
        staying = [node for node, member in nodes.items() if member.host not in left]
        if hosts is not None and hosts <= left and len(staying) < machine.job.min_nodes:
            raise RefusedError(self._why_not_left(named, affected))
        deadline, why = RunTime(at + NO_DEADLINE), f"{by} requested it"
        return [NodeDraining(at=at, node=node, deadline=deadline, why=why, by=by) for node in affected]

    def _why_not_left(self, named: Sequence[NodeId], affected: Sequence[NodeId]) -> str:
        """Return why the run cannot leave the host of some nodes, where the cluster has no other one."""
        machine = self._driver.machine
        why = f"the cluster has no other host that could take the place of {named[0]}"
        others = [node for node in affected if node not in named]
        if not others:
            return why
        verb = "is" if len(others) == 1 else "are"
        why = f"{why}, and {', '.join(others)} {verb} on the same host"
        fewer = len(machine.members) - 1
        return f"{why}: `raylaunch resize {fewer}` gives up a node" if machine.job.nprocs is None else why

    def _sample(self, now: RunTime, in_full: Sequence[int]) -> Generator[Event, None, StackProbe]:
        """Ask the nodes what their workers are doing. `in_full`: the ranks of which all threads are wanted."""
        machine, world = self._driver.machine, self._driver.machine.world
        if machine.phase in (Phase.GATHERING, Phase.DONE):
            raise RefusedError(f"no workers run: {machine.status}")
        parts = assign(world.attempt, world.members)
        there = [part for part in parts if part.node in world.unfinished]
        probe = StackProbe(there or parts, self._fleet.send)
        self._samples.begin(probe, now, in_full)
        yield from ()
        return probe

    # Anywhere.

    def _stacks(self, ranks: Sequence[int]) -> StacksCollected:
        """Return what all workers are doing. A node that does not answer in time is left out."""
        probe = self._awaited(self._in_loop(partial(self._sample, in_full=ranks)))
        self._samples.end(probe)
        groups = grouped(probe.stacks, probe.unheard_ranks)
        groups.sort(key=lambda group: (-len(group.ranks), group.ranks))
        stacks = sorted((stack for stack in probe.stacks if stack.rank in ranks), key=lambda stack: stack.rank)
        return StacksCollected(attempt=probe.attempt, groups=tuple(groups), stacks=tuple(stacks))


def _seconds(seconds: float) -> float:
    """Return a time that timers can be set for, whatever a client says."""
    return min(max(0.0, seconds), _MOST_SECONDS) if math.isfinite(seconds) else _MOST_SECONDS


@contextlib.contextmanager
def served(control: RunControl, session: Session, warn: Callable[[str], None]) -> Iterator[RunControl]:
    """Serve a run while it lasts. `warn` takes a message if that is not possible: the run goes on without it."""
    try:
        control.serve(session.own_address)
    except OSError as error:
        warn(f"other machines cannot look at this run: {error}")
    with contextlib.closing(control):
        yield control
