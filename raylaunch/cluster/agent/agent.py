"""The agent of each node: passes orders to the node's supervisor and reports to the driver. It knows no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from raylaunch.cluster.agent.agent_session import SUCCESSION_SECONDS, AgentSession
from raylaunch.cluster.agent.lease import Lease, end_this_process, report_interval
from raylaunch.cluster.agent.link import Link
from raylaunch.cluster.capability import AgentPart, AgentPort
from raylaunch.core.job import outputs
from raylaunch.core.job.node_rules import NodeAttributes, matching
from raylaunch.core.machine.workers_status import WorkersStatus
from raylaunch.core.monitoring.heartbeat import Heartbeat
from raylaunch.core.newtypes import HostId, NodeTime
from raylaunch.core.placement import devices
from raylaunch.core.placement.environment import Assignment, base_env, interface_env, is_of_a_terminal
from raylaunch.core.record.run_layout import LAYOUTS
from raylaunch.node.linux import interfaces, limits, processes, working_folder
from raylaunch.node.logs import log_files
from raylaunch.node.logs.log_files import LogAnswer, LogQuery, LogRead
from raylaunch.node.logs.tail import LogOutput, LogSource, LogTailer, log_sources
from raylaunch.node.protocol.acceptor import SecretAddress
from raylaunch.node.protocol.node_goal import CapabilitySection, LaunchWorkers, Order
from raylaunch.node.protocol.node_spec import AgentSpec, NodeSpec
from raylaunch.node.protocol.node_status import (
    AgentReady,
    NodeEvent,
    NodeStatus,
    NodeWarning,
    Ready,
    StacksDumped,
    StatusFeed,
)
from raylaunch.node.supervisor.forkserver_client import ForkServerClient
from raylaunch.node.supervisor.supervisor import Supervisor
from raylaunch.worker.heartbeats.shared_page import SharedPage

_Result = TypeVar("_Result")

_MOST_AT_ONCE = 4 * 1024 * 1024
"""Bytes of output in one report."""
_FULL = 8 * 1024 * 1024
"""Bytes of output that wait. More is not read from the logs until the driver has caught up; nothing is lost."""
TAIL_SECONDS = 0.1
_MOST_PER_TURN = 4 * 1024 * 1024
"""Bytes that are read at a time, before other tasks of the event loop, such as a restart, get their turn."""
MOST_READS = 32
"""Reads of log files at a time; more fail. A file system that does not answer holds up these and no others."""


def per_process(spec: AgentSpec) -> Mapping[str, Any]:
    """Return all that a fork server is started with, and no later run can change. A run needs a fork server with equal.

    Variables that describe a terminal do not matter to it.
    """
    names = ("nodes", "env", "cpus_per_worker", "preload", "start_method")
    of_job = {name: getattr(spec.job, name) for name in names}
    of_agent = {name: getattr(spec, name) for name in ("kept", "nproc", "niceness", "cwd", "ray_address")}
    environ = {name: value for name, value in spec.submitter_env.items() if not is_of_a_terminal(name)}
    return {**of_job, **of_agent, "submitter_env": environ}


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The machine that an agent runs on, as its cluster knows it."""

    host: HostId
    address: str
    environ: Mapping[str, str]
    """The environment of processes there, before anything of the job is added."""
    labels: Mapping[str, str] = field(default_factory=dict)
    host_addresses: tuple[str, ...] = ()
    """The addresses of the machine to which its own name leads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """What an agent tells at one time. An empty report says that it is alive.

    `sent_at` is the node's clock, by which the driver converts the times in the status.
    """

    sent_at: NodeTime
    status: NodeStatus | None = None
    """None: it is the one of the last report to this driver."""
    stacks: list[StacksDumped] = field(default_factory=list)
    output: list[LogOutput] = field(default_factory=list)
    heartbeat: Heartbeat | None = None
    """The progress of the node's workers."""
    kept: int = 0
    """The generation of the driver's ledger that is kept here."""


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, limits.explained(error, "the agent")) from error


class LeaseExpiredError(Exception):
    """The node's processes have ended, since nothing was heard of the driver for too long."""


class Agent:
    """One node of a run. All methods must be called in one event loop, and return at once but `next_report`."""

    def __init__(
        self,
        spec: AgentSpec,
        home: Home,
        client: ForkServerClient | None = None,
        end: Callable[[], None] = end_this_process,
    ) -> None:
        """Start the supervisor. Raises FileNotFoundError without the working folder, ValueError with too few GPUs.

        `client`: what the agent of an earlier run left, whose specification had an equal `agent_pool.key_of`.
        `end` is called in a thread when the lease has expired.
        """
        address = spec.address or home.address
        place = NodeAttributes(address=address, labels=home.labels, interfaces=interfaces.addresses())
        env = base_env(
            home.environ,
            spec.submitter_env,
            (spec.job.env, *(rule.env for rule in matching(spec.job.nodes, place).values())),
            place=place,
            nproc=spec.nproc,
            cpus_per_worker=spec.job.cpus_per_worker,
            ray_address=spec.ray_address,
        )
        of_several_hosts = interface_env(place, home.host_addresses, interfaces.bridges(), env)
        self._up = partial(
            AgentReady,
            host=home.host,
            address=address,
            nproc=spec.nproc,
            threads=env.get("OMP_NUM_THREADS", ""),
            interface_env=of_several_hosts,
        )
        self._log_reader = LogReader()
        self._supervisor = _made_supervisor(spec, address, env, of_several_hosts, client)
        self._pending = PendingReport(spec.epoch, self._supervisor.client.page)
        self._polls_supervisor = False
        self._loop = asyncio.get_running_loop()
        #: Set when the lease has expired and, of a detached run, all processes of the node have ended.
        self._ended = asyncio.Event()
        #: By the names of their capabilities. One of them may find that nothing can be started here.
        self._parts = {name: self._begun(name, begin, home.host) for name, begin in spec.parts.items()}
        with _explained():
            self._supervisor.start()
        self.session = AgentSession(spec.epoch)
        self._lease = Lease(spec.job.node_timeout, self._supervisor.renew_lease, end)
        self._lease.start()
        gone = None
        if spec.token:
            gone = partial(self._in_loop, partial(self._driver_gone, spec.job.driver_timeout))
        self._link = Link(spec.link_address, spec.node, end_this_process, gone) if spec.link_address else None

    def _begun(self, capability: str, begin: Callable[[AgentPort], AgentPart], host: HostId) -> AgentPart:
        spec, pending = self._supervisor.spec, self._pending
        return begin(
            AgentPort(
                spec=spec.agent,
                address=spec.address,
                host=host,
                memory=self._supervisor.state,
                call=self._in_loop,
                warn=lambda why: pending.put(NodeWarning(why=why)),
                tell=lambda body: pending.put(CapabilitySection(capability=capability, body=body)),
                put_output=lambda output: pending.put_output([output]),
                is_full=lambda: pending.is_full,
            )
        )

    async def next_report(self, epoch: int = 0) -> AgentReport:
        """Wait until there is something to report, for the report interval at most.

        The driver of this epoch always has one such call pending. A driver that has just taken over is told all at
        once. Raises the error of an order that failed, and LeaseExpiredError.
        """
        if self._pending.is_over:
            return AgentReport(sent_at=NodeTime(time.monotonic()))
        await self._raise_if_expired()
        self._lease.driver_called()
        if not self._polls_supervisor:
            self._polls_supervisor = True
            self._loop.add_reader(self._supervisor.fileno(), self._poll_supervisor)
        await self._pending.wait(epoch, report_interval(self._supervisor.spec.agent.job.node_timeout))
        if self._pending.is_over:
            return AgentReport(sent_at=NodeTime(time.monotonic()))
        heartbeat = self._supervisor.heartbeat()
        await self._raise_if_expired()  # a report could be of workers that the lease has ended
        self._lease.report_sent()
        return self._pending.take(epoch, heartbeat)

    async def _raise_if_expired(self) -> None:
        """Raise LeaseExpiredError if the lease has expired, when `end_node` has ended the node or this process ends."""
        if self._lease.expired:
            await self._ended.wait()
            raise LeaseExpiredError("nothing was heard of the driver for too long")

    def _driver_gone(self, driver_timeout: float) -> None:
        self.session.driver_gone()
        self._lease.agent_idle(min(SUCCESSION_SECONDS, driver_timeout))  # it lasts for the next driver

    def adopted(self, epoch: int, link_address: SecretAddress | None) -> AgentReport:
        """Obey another driver, which has taken over: open a link to it, and tell it what is true here."""
        self._link = self._link.moved_to(link_address) if self._link is not None else None
        self._lease.report_sent()
        self._pending.wake()  # for the call of the last driver
        return self._pending.status(epoch, self._supervisor.heartbeat())

    def handle(self, order: Order) -> None:
        """Carry out one order of the driver's, unless the lease has expired."""
        if self._lease.expired:
            return
        if isinstance(order, CapabilitySection):
            if order.capability in self._parts:  # else the run is over here
                self._parts[order.capability].shown(order.body)
            return
        if isinstance(order, LaunchWorkers):
            self._launch(order)
        else:
            self._supervisor.handle(order)

    def _launch(self, order: LaunchWorkers) -> None:
        spec, workers = self._supervisor.spec, self._supervisor.spec.workers(order)
        for part in self._parts.values():
            workers = part.workers(order.assignment, workers)
        self._supervisor.launch(order, workers)
        shown = next((worker.rank for worker in workers if worker.terminal), None)
        self._pending.logs.follow(order.assignment, spec, shown)

    async def logs(self, asked: LogQuery | LogRead) -> LogAnswer:
        """Return what the log files of workers on this node have. Raises OSError."""
        spec = self._supervisor.spec.agent
        return await self._log_reader.read(
            lambda: log_files.answer(spec.run_dir, spec.job.log_layout, asked) if spec.kept else LogAnswer()
        )

    async def read_result(self, rank: int, offset: int) -> bytes:
        """Return a part of what the function of a rank returned or raised; see `Supervisor.read_result`."""
        return self._supervisor.read_result(rank, offset)

    async def become_idle(self, seconds: float) -> ForkServerClient | None:
        """End all of the run but what the next one can use; unless `retire` is called, all ends after these seconds."""
        self._pending.end()
        self._lease.agent_idle(seconds)
        self._stop_polling()
        client = await _in_thread(self._supervisor.release_client)
        if client is not None and self._link is not None:
            self._link.release()
        return client

    def retire(self) -> None:
        """Let the lease go: another agent has taken over what this one left."""
        self._lease.release()

    async def ask(self, capability: str) -> bytes:
        """Return what a capability's part answers to its part in the driver."""
        return self._parts[capability].asked()

    async def close(self) -> None:
        """End every process of the run on this node."""
        self._lease.node_closing()
        self._stop_polling()
        await _in_thread(self._supervisor.close)

    async def end_processes(self) -> None:
        """End every process of the run on this node, and go on giving other agents what `State` holds."""
        self._stop_polling_supervisor()
        await _in_thread(self._supervisor.client.end_server)

    async def end_node(self) -> None:
        """The lease has expired: end every process of the run on this node but this one, for seconds at most.

        What `State` holds stays for the next agent, as where an agent was killed.
        """
        self._stop_polling()
        await _in_thread(self._supervisor.client.leave_state)
        self.session.node_ended()
        self._ended.set()
        self._pending.wake()

    def _stop_polling(self) -> None:
        while self._parts:
            self._parts.popitem()[1].close()
        self._pending.logs.close()
        self._stop_polling_supervisor()

    def _stop_polling_supervisor(self) -> None:
        if self._polls_supervisor:
            self._polls_supervisor = False
            self._loop.remove_reader(self._supervisor.fileno())

    def fail(self, error: Exception) -> None:
        """Let the next `next_report` raise this error, for a call whose caller does not wait for the result."""
        self._pending.fail(error)

    def _in_loop(self, work: Callable[[], None]) -> None:
        """Have the event loop call this. Any thread may call it."""
        self._loop.call_soon_threadsafe(work)

    def _poll_supervisor(self) -> None:
        try:
            events = self._supervisor.poll()
            for part in self._parts.values():
                part.workers_changed()
        except Exception as error:  # noqa: BLE001
            self.fail(error)
            return
        for event in events:
            self._pending.put(self._agent_ready(event) if isinstance(event, Ready) else event)

    def _agent_ready(self, ready: Ready) -> AgentReady:
        processes.release_memory()  # from here on this process mostly waits
        return self._up(ready=ready)


def _made_supervisor(
    spec: AgentSpec,
    address: str,
    env: dict[str, str],
    of_several_hosts: dict[str, str],
    client: ForkServerClient | None,
) -> Supervisor:
    cwd = spec.cwd or working_folder.current()
    if not os.path.isdir(cwd):
        msg = f"the folder {cwd} does not exist on the node {address}"
        raise FileNotFoundError(msg)
    if spec.job.virtual_local_rank:  # known before the first attempt
        devices.own(devices.indices(spec.nproc - 1, spec.nproc, spec.gpus_per_worker), env)
    with _explained():
        return Supervisor(spec, address=address, env=env, interface_env=of_several_hosts, cwd=cwd, client=client)


class PendingReport:
    """Collects what the next report has: events, output, or an error. Knows when it is due."""

    def __init__(self, epoch: int, page: SharedPage) -> None:
        """`epoch`: see `AgentSpec`. `page`: the one of the workers."""
        self._outbox = Outbox()
        self._status = StatusFeed(epoch)
        #: Set when there is something to report.
        self._due = asyncio.Event()
        self._error: Exception | None = None
        #: Whether there will be no more reports.
        self.is_over = False
        self.logs = LogShipper(self._outbox, self._wake_if_needed, page)

    @property
    def is_full(self) -> bool:
        """Whether no more output should be put."""
        return self._outbox.full

    def put(self, event: AgentReady | NodeEvent) -> None:
        """Append an event. The output of the workers that it ends comes first."""
        is_last = False
        if isinstance(event, WorkersStatus):
            is_last = event.are_gone
            self.logs.end(event.attempt if is_last else event.attempt - 1)
            self.logs.read()  # a worker's last output is reported before its end
        self._outbox.put(event, last=is_last)
        self._wake_if_needed()

    def put_output(self, output: list[LogOutput]) -> None:
        """Append output that is not from a log."""
        self._outbox.put_output(output)
        self._wake_if_needed()

    def fail(self, error: Exception) -> None:
        """Let `wait` raise this error, now and from now on."""
        self._error = error
        self.wake()

    def end(self) -> None:
        """Record that there will be no more reports, and let `wait` return."""
        self.is_over = True
        self.wake()

    def wake(self) -> None:
        """Let `wait` return, also if there is nothing to report."""
        self._due.set()

    def _wake_if_needed(self) -> None:
        if self._outbox.has_some(more_output=self.logs.behind):
            self.wake()

    async def wait(self, epoch: int, seconds: float) -> None:
        """Wait until the driver of this epoch can be told something, for these seconds at most.

        Raises the error that `fail` was given, unless reports are over.
        """
        if self._status.is_asked_first(epoch):
            self.wake()
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, self.wake)
        try:
            await self._due.wait()
        finally:
            timer.cancel()
        if timer.when() <= loop.time():
            self.logs.read()  # some file systems do not notify of writes
        if self._error is not None and not self.is_over:
            raise self._error

    def take(self, epoch: int, heartbeat: Heartbeat | None) -> AgentReport:
        """Return the report for the driver of this epoch, and begin the next one."""
        self._due.clear()
        events, output = self._outbox.take(more_output=self.logs.behind)
        self.logs.taken()
        self._wake_if_needed()
        stacks = [event for event in events if isinstance(event, StacksDumped)]
        for event in events:
            if not isinstance(event, StacksDumped):
                self._status.add(event)
        return replace(self.status(epoch, heartbeat), stacks=stacks, output=output)

    def status(self, epoch: int, heartbeat: Heartbeat | None) -> AgentReport:
        """Return a report without events. Its status is None if the driver of this epoch was told it last."""
        now = NodeTime(time.monotonic())
        return AgentReport(sent_at=now, status=self._status.news(epoch), heartbeat=heartbeat)


class Outbox:
    """Holds events and output, each in order, until the next report.

    An event that is put with `last` waits for all output before it, and later events wait behind it.
    """

    def __init__(self) -> None:
        self._events: deque[tuple[AgentReady | NodeEvent, bool]] = deque()
        self._output: deque[LogOutput] = deque()
        self.queued_bytes = 0

    @property
    def full(self) -> bool:
        """Whether no more output should be put."""
        return self.queued_bytes >= _FULL

    def put(self, event: AgentReady | NodeEvent, *, last: bool) -> None:
        """Append an event. `last`: no output of its attempt comes after it."""
        self._events.append((event, last))

    def put_output(self, output: list[LogOutput]) -> None:
        """Append output of workers to the next report."""
        self._output.extend(output)
        self.queued_bytes += sum(len(part.data) for part in output)

    def take(self, *, more_output: bool) -> tuple[list[AgentReady | NodeEvent], list[LogOutput]]:
        """Remove and return what can be reported now. `more_output`: logs have output that comes before events."""
        output: list[LogOutput] = []
        size = 0
        while self._output and size < _MOST_AT_ONCE:
            output.append(self._output.popleft())
            size += len(output[-1].data)
        self.queued_bytes -= size
        events: list[AgentReady | NodeEvent] = []
        while self._events and not (self._events[0][1] and (self._output or more_output)):
            events.append(self._events.popleft()[0])
        return events, output

    def has_some(self, *, more_output: bool) -> bool:
        """Return whether `take` would return anything."""
        return bool(self._output) or bool(self._events and not (self._events[0][1] and more_output))


class LogShipper:
    """Puts what the logs have into the outbox. While that is full nothing is read; workers never wait for it.

    Logs are read ten times a second while they grow, and not at all while they do not.
    """

    def __init__(self, outbox: Outbox, tell: Callable[[], None], page: SharedPage | None = None) -> None:
        """`tell` is called whenever something was put into the outbox. `page`: the one of the workers."""
        self.tailer = LogTailer()
        self._outbox = outbox
        self._tell = tell
        self._page = page
        self._task: asyncio.Task[None] | None = None
        #: Set when the logs may have grown.
        self._news = asyncio.Event()
        #: Set when the outbox has room again.
        self._room = asyncio.Event()

    def follow(self, assignment: Assignment, spec: NodeSpec, shown: int | None) -> None:
        """Follow what is shown of the workers of an attempt, which begins. `shown`: a rank whose output is already."""
        job, kept = spec.agent.job, spec.agent.kept
        view, layout = outputs.view(job), LAYOUTS[job.log_layout]
        sources = log_sources(view, assignment, layout, spec.run_dir, kept=kept, page=self._page)
        self.add([replace(source, prefix=None) if source.rank == shown else source for source in sources])

    def add(self, sources: Sequence[LogSource]) -> None:
        """Also follow the files of these workers."""
        self.tailer.add(sources)
        self._news.set()
        if sources and self._task is None:
            loop = asyncio.get_running_loop()
            if (growth := self.tailer.inotify.fileno()) >= 0:
                loop.add_reader(growth, self._grown)
            self._task = loop.create_task(self._follow())

    def end(self, attempt: int) -> None:
        """Record that nothing more of this attempt will be written. `behind` is true until all of it is read."""
        self.tailer.end_attempt(attempt)
        self._news.set()

    @property
    def behind(self) -> bool:
        """Whether output that belongs before the end of an attempt is unread."""
        return self.tailer.has_backlog

    def taken(self) -> None:
        """Go on after the driver has taken something out of the outbox."""
        if not self._outbox.full:
            self._room.set()

    def read(self) -> None:
        """Ship what the files contain now, without waiting for more."""
        self._outbox.put_output(self.tailer.read(_MOST_PER_TURN))
        self._tell()

    def close(self) -> None:
        """Cancel the task that reads, and close the files."""
        if self._task is not None:
            self._task.cancel()
            if (growth := self.tailer.inotify.fileno()) >= 0:
                asyncio.get_running_loop().remove_reader(growth)
        self.tailer.close()

    def _grown(self) -> None:
        self.tailer.inotify.drain()
        self._news.set()

    async def _follow(self) -> None:
        while True:
            self._news.clear()
            if self._outbox.full:
                self._room.clear()
                await self._room.wait()
            pause = self._turn()
            if pause == 0:
                await asyncio.sleep(0)
                continue
            timer = asyncio.get_running_loop().call_later(pause, self._news.set) if pause is not None else None
            try:
                await self._news.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    def _turn(self) -> float | None:
        """Read, and return the seconds to wait for changes before the next turn; None: without a limit."""
        self.read()
        if self.tailer.has_backlog or self.tailer.has_more:
            return 0
        if not self.tailer.has_grown and self.tailer.watch():
            self.read()
            if not self.tailer.has_grown:
                return self.tailer.poll_interval
        return TAIL_SECONDS


class LogReader:
    """Reads log files for those who look at the run, in daemon threads: nobody waits for these at the end."""

    def __init__(self) -> None:
        self._going_on = 0

    async def read(self, work: Callable[[], LogAnswer]) -> LogAnswer:
        """Do this in a thread. Raises BlockingIOError if too much goes on already, RuntimeError without a thread."""
        if self._going_on >= MOST_READS:
            msg = "the file system of the node does not answer"
            raise BlockingIOError(msg)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[LogAnswer] = loop.create_future()

        def end(answer: LogAnswer | None, error: Exception | None) -> None:
            self._going_on -= 1
            if not future.done() and answer is not None:
                future.set_result(answer)
            elif not future.done() and error is not None:
                future.set_exception(error)

        def run() -> None:
            answer, error = None, None
            try:
                answer = work()
            except Exception as caught:  # noqa: BLE001
                error = caught
            loop.call_soon_threadsafe(end, answer, error)

        thread = threading.Thread(target=run, daemon=True, name="raylaunch-log-reader")
        thread.start()
        self._going_on += 1
        return await future


async def _in_thread(work: Callable[[], _Result]) -> _Result:
    """Do this in another thread, or in this one where no thread can be started."""
    try:
        future = asyncio.get_running_loop().run_in_executor(None, work)
    except RuntimeError:  # "can't start new thread"
        return work()
    return await future
