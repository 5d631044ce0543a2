"""What rests after a run of this process, for its next one: agents, on their hosts, with all they have imported.

They belong to this process, however it ends. They hold no resources of the cluster, are those of the last run alone,
and wait no longer than they were told to.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from raylaunch.cluster.agent import AgentSettings
from raylaunch.cluster.lifeline import Anchor, Lifelines, Severed
from raylaunch.core.job import Job
from raylaunch.core.plan import Plan
from raylaunch.core.terminal import is_of_a_terminal
from raylaunch.node.settings import NodeSettings

_OF_A_RUN = frozenset(
    (
        *("settings", "view", "node_timeout", "anchor", "keep_warm"),
        *("node", "address", "run_dir", "run_id", "layout", "max_restarts", "kind", "target", "args", "kwargs"),
        *("payload", "pass_local_rank", "numa_binding", "backend", "master_addr", "master_port", "several_nodes"),
    )
)
"""Fields of what an agent is told that may differ from run to run: each is told anew."""

Key = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resting:
    """An agent that rests."""

    host: str
    """Ray's id of its node."""
    address: str
    nproc: int
    pid: int
    """Of its fork server."""
    memory: int
    """Bytes that the fork server takes, what it shares with others counted in part; 0: not known."""
    until: float
    """time.time() at which it ends, if no run wants it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rester:
    """One that may be put to rest: `agent` is what the next run takes, if it has the same `key`."""

    name: str
    agent: Any
    key: Key
    host: str
    address: str
    nproc: int
    pid: int
    memory: int


def key(told: AgentSettings) -> Key:
    """Of what an agent is told, all that its fork server was started with, and that no later run can change.

    What is not known to change from run to run is taken to be of that kind.
    """
    return {**_lasting(told.settings), **_lasting(told), "submitter_env": lasting_env(told.submitter_env)}


def lasting_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Those variables that matter to a fork server."""
    return {name: value for name, value in environ.items() if not is_of_a_terminal(name)}


def _lasting(told: AgentSettings | NodeSettings) -> Key:
    return {field.name: getattr(told, field.name) for field in fields(told) if field.name not in _OF_A_RUN}


def forbidden(job: Job, plan: Plan, *, in_process: bool) -> str:
    """Why no agent can rest after the run; `""`: that is not asked for, or they can. `in_process`: there is no Ray."""
    if not job.keep_warm or in_process:
        return ""
    if any(bundle.gpus for bundle in plan.bundles):
        return "GPUs are a worker's only while it runs in what Ray reserved for it"
    return "each run brings its own files with `ray.working_dir`" if job.ray.working_dir else ""


_pools: list[Pool] = []


def resting() -> tuple[Resting, ...]:
    """Who rests in this process."""
    return tuple(one for pool in _pools for one in pool.resting())


def close() -> None:
    """End all who rest."""
    for pool in _pools:
        pool.close()


class Pool:
    """All that rests. May be used from any thread."""

    def __init__(self, end: Callable[[Sequence[Any]], None], emptied: Callable[[], None]) -> None:
        """`end` ends such agents, `emptied` is called when none is left; neither raises."""
        self._end = end
        self._emptied = emptied
        self._lock = threading.RLock()
        self._resting: list[Rester] = []
        self._until = 0.0
        self._timer: threading.Timer | None = None
        self._lines: Lifelines | None = None
        self._count = 0
        #: The process that it is of: a fork of it has a copy, and must leave it alone.
        self._process = 0
        _pools.append(self)

    def names(self, count: int) -> list[str]:
        """Names for agents that are to rest, which nobody had before."""
        with self._lock:
            self._count += count
            return [f"resting-{number}" for number in range(self._count - count, self._count)]

    def anchor(self, of_the_run: Anchor | None) -> Anchor | None:
        """Where those who rest hold on to this process; None: nowhere, as in the run."""
        with self._lock:
            if self._lines is None and of_the_run is not None:
                with contextlib.suppress(OSError):
                    self._lines = Lifelines(of_the_run.address)
                    self._lines.start(self._severed)
            return None if self._lines is None else self._lines.anchor

    def put(self, resters: Sequence[Rester], seconds: float) -> None:
        """These rest from here on, and no others."""
        with self._lock:
            if self._process != os.getpid():
                self._process = os.getpid()
                atexit.register(self.close)
            before, self._resting = self._resting, list(resters)
            self._until = time.time() + seconds
            self._stop_timer()
            self._timer = threading.Timer(seconds, self.close)
            self._timer.daemon = True
            self._timer.start()
        self._end([one.agent for one in before])
        self._look_whether_empty()

    def take(self, host: str, wanted: Key) -> Any | None:
        """One that rests on the host and would serve; it rests no more."""
        with self._lock:
            for one in self._resting:
                if one.host == host and one.key == wanted:
                    self._resting.remove(one)
                    if not self._resting:
                        self._stop_timer()
                    return one.agent
        return None

    def keep(self, wanted: Iterable[Key]) -> None:
        """End those who would serve none of these."""
        keys = list(wanted)
        with self._lock:
            ending = [one for one in self._resting if one.key not in keys]
            self._resting = [one for one in self._resting if one.key in keys]
        if ending:  # beside a start that has other things to do
            threading.Thread(target=self._end, args=([one.agent for one in ending],), daemon=True).start()

    def resting(self) -> tuple[Resting, ...]:
        """Who rests."""
        with self._lock:
            return tuple(
                Resting(
                    host=one.host,
                    address=one.address,
                    nproc=one.nproc,
                    pid=one.pid,
                    memory=one.memory,
                    until=self._until,
                )
                for one in self._resting
            )

    def close_if_empty(self) -> None:
        """Keep nothing open for nobody."""
        if not self.resting():
            self.close()

    def close(self) -> None:
        """End all."""
        if self._process not in (0, os.getpid()):
            return
        with self._lock:
            ending, self._resting = self._resting, []
            self._stop_timer()
        self._end([one.agent for one in ending])
        self._look_whether_empty()

    def _severed(self, line: Severed) -> None:
        """The process of one of them is gone."""
        with self._lock:
            self._resting = [one for one in self._resting if one.name != line.node]

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_whether_empty(self) -> None:
        with self._lock:
            if self._resting:
                return
            lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()
        self._emptied()
