"""The agent as a Ray actor. With `keep_warm` it serves one run after the other, and is idle in between."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from raylaunch.cluster import named_resources, ray_internals
from raylaunch.cluster.agent import agent, serialization
from raylaunch.cluster.agent.agent import Home, LeaseExpiredError
from raylaunch.cluster.agent.agent_session import Adoption, SupersededError
from raylaunch.cluster.agent.lease import FIRST_CALL_SECONDS, end_this_process
from raylaunch.cluster.agent.serialization import UnreadableError, VersionMismatchError
from raylaunch.core.newtypes import HostId
from raylaunch.core.text import printable
from raylaunch.node.linux import interfaces, processes
from raylaunch.node.logs.log_files import LogAnswer, LogQuery, LogRead
from raylaunch.node.protocol.acceptor import SecretAddress
from raylaunch.node.protocol.node_spec import AgentSpec
from raylaunch.node.supervisor.forkserver_client import ForkServerClient
from raylaunch.worker.runtime import staleness

TITLE = "raylaunch: agent"
"""What `ps` shows of an agent, after `ray::`."""
CLOSE_SECONDS = 7.0
_KILL_SECONDS = 2.0
_END_SECONDS = 15.0
"""How long a node may take to end when its lease has expired, before this process exits, and with it the rest."""
_RESOLVE_SECONDS = 2.0
"""How long the lookup of this host's own name may take. It is in /etc/hosts, or known to the name server."""


def creation_arguments(spec: AgentSpec) -> tuple[str] | tuple[str, float]:
    """Return the arguments of the constructor. With `keep_warm` an agent outlives drivers and serves other runs."""
    if spec.job.keep_warm:
        return f"{TITLE} kept by keep_warm", FIRST_CALL_SECONDS
    return (printable(f"{TITLE} {spec.node} ({spec.job.title})"),)


class AgentError(Exception):
    """An error of an agent, as the driver gets it: its text is `type: message`, and can be encoded.

    Ray itself would send the error and its traceback, and cannot if a path in them is not UTF-8.
    """


class AgentStartError(AgentError):
    """The agent cannot start on its host."""


class AgentVersionError(AgentStartError):
    """The agent's host has another raylaunch, Python or Ray than the driver. The text names both."""


class AgentActor:
    """The actor of an agent, one for each node of the run. `begin` is its first call.

    Ray's head keeps the arguments of the constructor of every actor, also of dead ones, so there must be no secrets in
    them, as the submitter's environment has. The arguments of calls go from process to process.
    """

    def __init__(self, title: str = TITLE, begin_seconds: float = math.inf) -> None:
        """`title`: what Ray's dashboard shows of it. The process ends if `begin` is not called within these seconds."""
        self._title = title
        self._began_at = time.time()
        type(self).__name__ = TITLE  # Ray shows it in the title of this process between two calls
        self._home = _home()
        #: Until `begin`, and where that failed.
        self._agent: agent.Agent | None = None
        #: Why `begin` failed.
        self._error: AgentStartError | None = None
        #: Set when `begin` is over. Ray may start the first calls of an asynchronous actor in another order.
        self._begun = asyncio.Event()
        #: What the fork server was started with.
        self._started_with: Mapping[str, Any] = {}
        #: While the agent is idle.
        self._client: ForkServerClient | None = None
        #: Ends a process that outlives its driver, if that dies before `begin`.
        self._end_unbegun = threading.Timer(begin_seconds, end_this_process)
        self._end_unbegun.daemon = True
        if not math.isinf(begin_seconds):
            self._end_unbegun.start()
        #: Ends this process, once the agent is idle and cannot or must not be used any more.
        self.ending: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        """Return the title. Ray asks for it once, after the constructor."""
        return self._title

    @ray.method(num_returns=0)  # type: ignore[untyped-decorator]
    async def begin(self, message: bytes) -> None:
        """Start the agent by the driver's first message. `next_report` raises what goes wrong.

        Of a detached run, another driver may send it once more, since the last one may have died before it had.
        """
        if self._begun.is_set():
            return
        self._end_unbegun.cancel()
        try:
            spec = serialization.load_spec(message)
            processes.set_niceness(spec.niceness)
            end = functools.partial(self._lease_expired, asyncio.get_running_loop(), spec)
            self._agent = agent.Agent(spec, self._home, end=end)
            self._started_with = agent.per_process(spec)
        except VersionMismatchError as error:
            self._error = AgentVersionError(f"its host {self._home.address} {error}")
        except Exception as error:  # noqa: BLE001
            self._error = AgentStartError(_described(error))
        finally:
            self._begun.set()

    async def next_report(self, epoch: int = 0) -> bytes:
        """Return the next `AgentReport` to the driver of this epoch, as bytes. Raises AgentError."""
        await self._begun.wait()
        if self._agent is None:
            raise self._error or AgentStartError("it was not begun")
        session = self._agent.session
        try:
            session.check(epoch)
            report = await self._agent.next_report(epoch)
            session.check(epoch)
            return serialization.dump_report(replace(report, kept=session.kept))
        except Exception as error:  # noqa: BLE001
            raise AgentError(_described(error)) from None

    @ray.method(num_returns=0)  # type: ignore[untyped-decorator]
    async def obey(self, epoch: int, goal: bytes, ledger: bytes = b"") -> None:
        """Carry out what is new in a goal, and keep the driver's ledger, unless that driver is in command no more.

        `epoch`: the driver's epoch in a detached run; else 0. `ledger`: empty if this agent is not to keep it. Nobody
        waits for this call: `next_report` raises the errors of orders.
        """
        await self._begun.wait()
        if self._agent is None:
            return
        session = self._agent.session
        try:
            session.check(epoch)
            shown = serialization.load_goal(goal)
            if ledger:
                session.keep(epoch, shown.generation, ledger)
            for order in session.new_orders(epoch, shown):
                self._agent.handle(order)
        except SupersededError:
            pass
        except Exception as error:  # noqa: BLE001
            self._agent.fail(error)

    # Of a detached run, whose driver may be followed by another.

    async def look(self) -> Adoption:
        """Return what a driver needs that is about to take over."""
        return self._agent.session.look() if self._agent is not None else self._without_agent()

    async def adopt(self, epoch: int, link_address: SecretAddress | None) -> tuple[Adoption, bytes]:
        """Obey the driver of this epoch from now on. Raises AgentError if a later one is in command.

        Returns what the agent has of earlier drivers, and a report with its status, as bytes.
        """
        if self._agent is None:
            return self._without_agent(), b""
        found = replace(self._agent.session.look(), ledger=b"")
        try:
            self._agent.session.adopt(epoch)
        except SupersededError as error:
            raise AgentError(_described(error)) from None
        return found, serialization.dump_report(self._agent.adopted(epoch, link_address))

    def _without_agent(self) -> Adoption:
        return Adoption(epoch=0, has_begun=self._begun.is_set())

    async def leave(self, epoch: int) -> None:
        """End this process, unless that driver is not in command any more.

        The subreaper ends the node, and keeps what `State` holds for another agent, unless `close` came before.
        """
        if self._agent is not None:
            try:
                self._agent.session.check(epoch)
            except SupersededError:
                return
        end_this_process()

    def _lease_expired(self, loop: asyncio.AbstractEventLoop, spec: AgentSpec) -> None:
        """End this process or, in a detached run, only the node: the state is kept until no driver can come any more.

        In the thread of the lease. A loop that does not answer could not give the state to anybody: then all ends.
        """
        if not spec.token or self._agent is None:
            end_this_process()
            return
        try:
            asyncio.run_coroutine_threadsafe(self._agent.end_node(), loop).result(_END_SECONDS)
        except Exception:  # noqa: BLE001
            end_this_process()
        session = self._agent.session
        while (left := spec.job.driver_timeout - session.alone) > 0:
            time.sleep(left)
        if not named_resources.has_driver(spec.token):  # else only this node had none
            named_resources.remove(spec.token)
        end_this_process()

    async def logs(self, asked: LogQuery | LogRead) -> LogAnswer:
        """Return what the log files of workers on this node have. Raises AgentError."""
        if self._agent is None:
            return LogAnswer()
        try:
            return await self._agent.logs(asked)
        except Exception as error:  # noqa: BLE001
            raise AgentError(_described(error)) from None

    async def read_result(self, rank: int, offset: int) -> bytes:
        """Return a part of what the function of a rank returned or raised; see `Supervisor.read_result`."""
        return await self._agent.read_result(rank, offset) if self._agent is not None else b""

    async def become_idle(self, seconds: float) -> bool:
        """End the run. Any driver may `reuse` the agent for another within `seconds`. False: it cannot be reused."""
        if self._agent is None:
            return False
        self._agent.session.end_run()
        self._client = await self._agent.become_idle(seconds)
        return self._client is not None

    async def reuse(self, message: bytes) -> bool:
        """Begin another run, by its driver's first message. False: this agent serves a run, or ends since it cannot.

        It cannot if the driver has another version, code has changed on the host since this process started, or the run
        needs a fork server that was started with something else.
        """
        client, before, self._client = self._client, self._agent, None
        if client is None or before is None:
            return False
        try:
            spec = serialization.load_spec(message)
            if agent.per_process(spec) == self._started_with and await asyncio.to_thread(self._is_current, client):
                self._agent = agent.Agent(spec, self._home, client)
                before.retire()
                return True
        except Exception:  # noqa: BLE001, S110
            pass  # the new agent says what is wrong
        self.ending = asyncio.ensure_future(_end_idle(client))
        return False

    def _is_current(self, client: ForkServerClient) -> bool:
        return not staleness.changed_since(self._began_at) and client.activate()

    async def end_if_idle(self) -> bool:
        """End this process if no run uses it. Return whether it ends."""
        client, self._client = self._client, None
        if client is None:
            return False
        self.ending = asyncio.ensure_future(_end_idle(client))
        return True

    async def ask(self, capability: str) -> bytes:
        """Return what a capability's part answers to its part in the driver. Raises LookupError if there is none."""
        if self._agent is None:
            raise LookupError(capability)
        return await self._agent.ask(capability)

    async def close(self, epoch: int | None = None) -> None:
        """End every process on this node. Raises SupersededError if the driver is not in command any more.

        `epoch`: None: the driver knows that it is.
        """
        if epoch is not None and self._agent is not None:
            self._agent.session.check(epoch)
        if self._client is not None:
            await asyncio.to_thread(self._client.close)
        elif self._agent is not None:
            await self._agent.close()


async def _end_idle(client: ForkServerClient) -> None:
    await asyncio.to_thread(client.close)
    end_this_process()


def _described(error: Exception) -> str:
    is_plain = isinstance(error, UnreadableError | LeaseExpiredError)
    text = str(error) if is_plain else f"{type(error).__name__}: {error}"
    return printable(text)


def _home() -> Home:
    context = ray.get_runtime_context()
    return Home(
        host=HostId(context.get_node_id()),
        address=_numeric(ray.util.get_node_ip_address()),
        environ=ray_internals.environment(),
        labels=ray_internals.node_labels(),
        host_addresses=interfaces.host_addresses(_RESOLVE_SECONDS),
    )


def _numeric(address: str) -> str:
    """Return the node's address as Ray knows it, as a number: other nodes may not resolve a name."""
    found = interfaces.resolve(address)
    return next((one for one in found if one == address or not interfaces.is_loopback(one)), address)


def close(actors: Sequence[Any]) -> None:
    """Make agents end their processes, and wait for that, for seconds at most."""
    with contextlib.suppress(RayError):
        if answers := [actor.close.remote() for actor in actors]:
            ray.wait(answers, num_returns=len(answers), timeout=CLOSE_SECONDS)


def kill(actors: Sequence[Any], then: Callable[[], None] = lambda: None) -> None:
    """Kill the processes of agents. Waits for Ray, which may be gone, for seconds at most."""

    def work() -> None:
        for actor in actors:
            with contextlib.suppress(Exception):  # dead already
                ray.kill(actor)
        then()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_KILL_SECONDS)


def dismiss(actors: Sequence[Any]) -> None:
    """Close agents and then kill them, in a thread of its own: closing may take long."""

    def work() -> None:
        close(actors)
        kill(actors)

    threading.Thread(target=work, daemon=True).start()


@functools.cache
def actor_class() -> Any:
    """Return the actor class. Actors are not restarted: a new agent is a new node of the run.

    There is one for all runs of a process: Ray keeps 16 kB of each until it disconnects.
    """
    return ray.remote(max_restarts=0, max_task_retries=0, enable_task_events=False)(AgentActor)
