"""The agent as a Ray actor. It may serve one run after the other, and be idle in between."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from raylaunch.cluster import ray_internals
from raylaunch.cluster.agent import agent, serialization
from raylaunch.cluster.agent.acceptor import SecretAddress
from raylaunch.cluster.agent.agent import AgentSpec, Home
from raylaunch.cluster.agent.lease import end_this_process
from raylaunch.cluster.agent.link import Link
from raylaunch.cluster.agent.serialization import UnreadableError, VersionMismatchError
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.text import printable
from raylaunch.node.linux import interfaces, processes
from raylaunch.node.logs.log_files import LogAnswer, LogQuery, LogRead
from raylaunch.node.supervisor.forkserver_client import ForkServerClient

TITLE = "raylaunch: agent"
"""What `ps` shows of an agent, after `ray::`."""
CLOSE_SECONDS = 7.0
_KILL_SECONDS = 2.0
_RESOLVE_SECONDS = 2.0
"""How long the lookup of this host's own name may take. It is in /etc/hosts, or known to the name server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleAgent:
    """An agent of which only the fork server is left: its process id, and the memory that it uses."""

    pid: int
    memory: int
    """Bytes (PSS: shared pages are divided among their users); 0: not known."""


class AgentError(Exception):
    """An error of an agent, as the driver gets it: its text is `type: message`, and can be encoded.

    Ray itself would send the error and its traceback, and cannot if a path in them is not UTF-8.
    """


class AgentStartError(AgentError):
    """The agent cannot start on its host."""


class AgentVersionError(AgentStartError):
    """The agent's host has another raylaunch, Python or Ray than the driver. The text names both."""


class AgentActor:
    """One for each node of the run. `begin` is its first call.

    The constructor has no arguments, because Ray's head keeps those of every actor, also of dead ones: the submitter's
    environment has secrets. The arguments of calls go from process to process.
    """

    def __init__(self) -> None:
        type(self).__name__ = TITLE  # Ray shows it in the title of this process between two calls
        self._home = _home()
        #: Until `begin`, and where that failed.
        self._agent: agent.Agent | None = None
        #: Why `begin` failed.
        self._error: AgentStartError | None = None
        #: Set when `begin` is over. Ray may start the first calls of an asynchronous actor in another order.
        self._begun = asyncio.Event()
        #: While the agent is idle.
        self._client: ForkServerClient | None = None
        #: To the process that pools the agent, while it is idle.
        self._link: Link | None = None

    @ray.method(num_returns=0)  # type: ignore[untyped-decorator]
    async def begin(self, message: bytes) -> None:
        """Start the agent by the driver's first message. `next_report` raises what goes wrong."""
        try:
            spec = serialization.load_spec(message)
            processes.set_niceness(spec.niceness)
            self._agent = agent.Agent(spec, self._home)
        except VersionMismatchError as error:
            self._error = AgentVersionError(f"its host {self._home.address} {error}")
        except Exception as error:  # noqa: BLE001
            self._error = AgentStartError(_described(error))
        finally:
            self._begun.set()

    async def next_report(self) -> bytes:
        """Return the next `AgentReport`, as bytes. Raises AgentError."""
        await self._begun.wait()
        if self._agent is None:
            raise self._error or AgentStartError("it was not begun")
        try:
            report = await self._agent.next_report()
        except Exception as error:  # noqa: BLE001
            raise AgentError(_described(error)) from None
        return serialization.dump_report(report)

    @ray.method(num_returns=0)  # type: ignore[untyped-decorator]
    async def handle(self, message: bytes) -> None:
        """Carry out one order. `next_report` raises its errors, since nobody waits for this call."""
        if self._agent is None:
            return
        try:
            self._agent.handle(serialization.load_order(message))
        except Exception as error:  # noqa: BLE001
            self._agent.fail(error)

    async def logs(self, message: bytes) -> bytes:
        """Return the `LogAnswer` to a `LogQuery` or `LogRead`, all as bytes. Raises AgentError."""
        if self._agent is None:
            return serialization.dump_log_answer(LogAnswer())
        try:
            return serialization.dump_log_answer(await self._agent.logs(serialization.load_log_request(message)))
        except Exception as error:  # noqa: BLE001
            raise AgentError(_described(error)) from None

    async def values(self) -> dict[int, bytes]:
        """Return what functions returned, pickled, by rank."""
        return await self._agent.values() if self._agent is not None else {}

    async def become_idle(self, name: NodeId, link_address: SecretAddress | None, seconds: float) -> IdleAgent | None:
        """End the run, so that another can `reuse` the agent within so many seconds. None: it cannot be reused.

        `name` and `link_address`: those of a link to the process that pools the agent, whose end is the agent's too.
        """
        if self._agent is None:
            return None
        link = Link(link_address, name, end_this_process) if link_address is not None else None
        self._client = await self._agent.become_idle(seconds)
        if self._client is None:
            return None
        self._link = link
        return IdleAgent(pid=self._client.pid, memory=self._client.memory())

    async def reuse(self, spec: AgentSpec) -> bool:
        """Begin another run. False: the fork server cannot be used any more."""
        client, before = self._client, self._agent
        if client is None or before is None or not await asyncio.to_thread(client.activate):
            return False
        self._agent = agent.Agent(spec, self._home, client)
        self._client = None
        before.retire()
        if self._link is not None:
            self._link.release()
        return True

    async def close(self) -> None:
        """End every process on this node."""
        if self._client is not None:
            await asyncio.to_thread(self._client.close)
        elif self._agent is not None:
            await self._agent.close()


def _described(error: Exception) -> str:
    text = str(error) if isinstance(error, UnreadableError) else f"{type(error).__name__}: {error}"
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
    return next(
        (one for one in interfaces.resolve(address) if one == address or not interfaces.is_loopback(one)), address
    )


def ask_for_logs(actor: Any, asked: LogQuery | LogRead) -> Future[LogAnswer]:
    """Ask an agent for log files; None: there is none. An error is the future's."""
    answer: Future[LogAnswer] = Future()

    def heard(future: Any) -> None:
        try:
            answer.set_result(serialization.load_log_answer(future.result()))
        except Exception as error:  # noqa: BLE001
            answer.set_exception(error)

    if actor is None:
        answer.set_exception(LookupError("there is no agent"))
    else:
        message = serialization.dump_log_request(asked)
        actor.logs.options(name=TITLE).remote(message).future().add_done_callback(heard)
    return answer


def close(actors: Sequence[Any]) -> None:
    """Have agents end their processes, and wait for that, for seconds at most."""
    if actors:
        with contextlib.suppress(RayError):
            ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=CLOSE_SECONDS)


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
