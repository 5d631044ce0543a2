"""The pool of idle agents: what one run of this process leaves for the next one (`keep_warm`).

An idle agent has its fork server with all that is imported, and no resources of the cluster. The pool holds agents of
the last run only and ends them after `keep_warm` seconds, or when this process ends, in whatever way.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raylaunch.cluster.agent.link import LinkDown, LinkServer
from raylaunch.core.job.job import Job
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.placement.environment import is_of_a_terminal
from raylaunch.core.placement.plan import Plan
from raylaunch.node.protocol.acceptor import SecretAddress
from raylaunch.node.protocol.node_spec import AgentSpec

Key = Mapping[str, Any]
"""What an idle agent's fork server was started with. A run can use the agent if it has an equal key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledAgent:
    """An idle agent. `handle`: what a fleet needs to use it again, an actor handle or a ForkServerClient."""

    name: NodeId
    """The id by which its link to this process is known; `NO_NODE`: it has no link."""
    handle: Any
    key: Key
    host: HostId
    """Ray's id of its node."""
    address: str
    nproc: int
    pid: int
    """The process id of its fork server."""
    memory: int
    """Bytes that the fork server uses (PSS: shared pages are divided among their users); 0: not known."""


def key_of(spec: AgentSpec) -> Key:
    """Return the key of an agent: all that its fork server was started with, which no later run can change."""
    of_job = {name: getattr(spec.job, name) for name in ("nodes", "cpus_per_worker", "preload", "start_method")}
    of_agent = {name: getattr(spec, name) for name in ("kept", "env", "nproc", "niceness", "cwd", "ray_address")}
    return {**of_job, **of_agent, "submitter_env": without_terminal(spec.submitter_env)}


def without_terminal(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables that describe a terminal, which do not matter to a fork server."""
    return {name: value for name, value in environ.items() if not is_of_a_terminal(name)}


def why_unusable(job: Job, plan: Plan, *, in_process: bool) -> str:
    """Return why `keep_warm` has no effect; `""` if it has, or is not set. `in_process`: the run uses no Ray."""
    if not job.keep_warm or in_process:
        return ""
    if any(bundle.gpus for bundle in plan.bundles):
        return "GPUs are a worker's only while it runs in what Ray reserved for it"
    return "each run brings its own files with `ray.working_dir`" if job.ray.working_dir else ""


class AgentPool:
    """Idle agents. Any thread may call any method."""

    def __init__(self, end: Callable[[Sequence[Any]], None], on_empty: Callable[[], None]) -> None:
        """`end` ends the agents with these handles; `on_empty` is called when none is left. Neither may raise."""
        self._end = end
        self._on_empty = on_empty
        self._lock = threading.RLock()
        #: Held while agents end, so that no other thread closes the connection by which they are told.
        self._ending = threading.RLock()
        self._agents: list[PooledAgent] = []
        self._timer: threading.Timer | None = None
        self._links: LinkServer | None = None
        self._names_made = 0
        #: The process that put agents here. A fork of it has a copy of the pool, which must not end them.
        self._pid = 0

    def new_names(self, count: int) -> list[NodeId]:
        """Return names for agents that become idle, each different from all names before."""
        with self._lock:
            self._names_made += count
            return [NodeId(f"idle-{number}") for number in range(self._names_made - count, self._names_made)]

    def link_address(self, of_run: SecretAddress | None) -> SecretAddress | None:
        """Return where idle agents connect their links to; None if they need none or this process cannot listen.

        `of_run`: where their links went during the run; None: they had none.
        """
        with self._lock:
            if self._links is None and of_run is not None:
                with contextlib.suppress(OSError):
                    self._links = LinkServer(of_run.host)
                    self._links.start(self._link_down)
            return None if self._links is None else self._links.address

    def put(self, agents: Sequence[PooledAgent], seconds: float) -> None:
        """Hold these agents for some seconds, and end all that the pool held before."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                atexit.register(self.close)
            before, self._agents = self._agents, list(agents)
            self._stop_timer()
            self._timer = threading.Timer(seconds, self.close)
            self._timer.daemon = True
            self._timer.start()
        self._end([one.handle for one in before])
        self._close_links_if_empty()

    def take(self, host: HostId, key: Key) -> Any | None:
        """Remove an agent on this host with this key and return its handle; None: there is none."""
        with self._lock:
            for one in self._agents:
                if one.host == host and one.key == key:
                    self._agents.remove(one)
                    if not self._agents:
                        self._stop_timer()
                    return one.handle
        return None

    def retain(self, keys: Iterable[Key]) -> None:
        """End the agents whose key is none of these."""
        wanted = list(keys)
        with self._lock:
            ending = [one for one in self._agents if one.key not in wanted]
            self._agents = [one for one in self._agents if one.key in wanted]
        if ending:  # in a thread, since a run is starting
            threading.Thread(target=self._end_locked, args=(ending,), daemon=True).start()

    def agents(self) -> tuple[PooledAgent, ...]:
        """Return the agents that are idle now."""
        with self._lock:
            return tuple(self._agents)

    def close_if_empty(self) -> None:
        """Close what only idle agents need, if there are none."""
        if not self.agents():
            self.close()

    def close(self) -> None:
        """End all idle agents. Does nothing in a fork of the process that put them here."""
        if self._pid not in (0, os.getpid()):
            return
        with self._lock:
            ending, self._agents = self._agents, []
            self._stop_timer()
        with self._ending:
            self._end([one.handle for one in ending])
            self._close_links_if_empty()

    def _link_down(self, link: LinkDown) -> None:
        """The process of an idle agent ended."""
        with self._lock:
            self._agents = [one for one in self._agents if one.name != link.node]

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_locked(self, agents: Sequence[PooledAgent]) -> None:
        with self._ending:
            self._end([one.handle for one in agents])

    def _close_links_if_empty(self) -> None:
        with self._lock:
            if self._agents:
                return
            links, self._links = self._links, None
        if links is not None:
            links.close()
        self._on_empty()
