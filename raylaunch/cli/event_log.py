"""`--event-log-handler console`: torchelastic's own events, as lines of JSON, for tools that read those."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from raylaunch.cli.console import Console
from raylaunch.cluster.run import Watcher
from raylaunch.core.actions import Finish, Launch
from raylaunch.core.failure import Failure
from raylaunch.core.job import Job
from raylaunch.core.journal import Entry
from raylaunch.core.machine import Machine
from raylaunch.core.plan import Plan
from raylaunch.core.ranks import Assignment, assign
from raylaunch.core.redaction import Secrets
from raylaunch.errors import ExitCode
from raylaunch.node.logs import Output


def watching(job: Job, console: Console) -> Watcher:
    """The console, with the event log before it where the job asks for that."""
    return EventLog(console, console.line) if job.event_log_handler == "console" else console


class EventLog:
    """A watcher in front of another. What it writes has the fields of torch 2.13's `elastic/events/api.py`.

    One event per node and per worker at the end of the run, one per node for each attempt begun, as torchrun's
    agents write them; what those write about their own rendezvous has no counterpart here.
    """

    def __init__(self, watcher: Watcher, write: Callable[[str], None]) -> None:
        self._watcher = watcher
        self._write = write
        self._parts: tuple[Assignment, ...] = ()
        self._run_id = ""
        self._secrets = Secrets()

    def planned(self, job: Job, plan: Plan, run_dir: str) -> None:
        """The run begins."""
        self._secrets = Secrets.of(job, os.environ)
        self._run_id = job.run_id or run_dir.rstrip("/").rpartition("/")[2]
        self._watcher.planned(job, plan, run_dir)

    def wrote(self, output: Iterable[Output]) -> None:
        """Passed on."""
        self._watcher.wrote(output)

    def said(self, text: str) -> None:
        """Passed on."""
        self._watcher.said(text)

    def decided(self, entry: Entry, machine: Machine) -> None:
        """Say what torchrun's agents would have said of it."""
        self._watcher.decided(entry, machine)
        for action in entry.actions:
            match action:
                case Launch():
                    members = [machine.nodes[node] for node in action.roster]
                    self._parts = assign(action.attempt, members)
                    for part in self._parts:
                        self._tell(self._event(machine, part, "START"))
                case Finish():
                    for event in self._last(machine, action):
                        self._tell(event)
                case _:
                    pass

    def _tell(self, event: dict[str, Any]) -> None:
        self._write(json.dumps(self._secrets.shown(event)))

    def _last(self, machine: Machine, finish: Finish) -> Iterator[dict[str, Any]]:
        # A worker that hung is told of again when it is ended: the first word counts.
        failures = {failure.rank: failure for failure in reversed(machine.failures)}
        state = "SUCCEEDED" if finish.exit_code == ExitCode.OK else "FAILED"
        for part in self._parts:
            for local_rank, rank in enumerate(part.ranks):
                failure = failures.get(rank)
                own = state if state == "SUCCEEDED" or (failure and not failure.stopped) else "TERMINATED"
                yield self._event(machine, part, own, local_rank=local_rank, failure=failure)
            yield self._event(machine, part, state)

    def _event(
        self,
        machine: Machine,
        part: Assignment,
        state: str,
        *,
        local_rank: int | None = None,
        failure: Failure | None = None,
    ) -> dict[str, Any]:
        more: dict[str, Any] = {"group_world_size": part.nnodes, "entry_point": machine.job.title}
        rank = None if local_rank is None else part.base_rank + local_rank
        if rank is not None:
            more |= {"local_rank": [local_rank], "role_rank": [rank], "role_world_size": [part.world_size]}
            more |= {"exit_code": [failure and failure.exit_code], "worker_pid": [failure and failure.pid]}
        error = {"message": failure.error.message} if failure and failure.error else None
        member = machine.nodes.get(part.node)
        return {
            "name": f"torchelastic.worker.status.{state}",
            "source": "AGENT" if rank is None else "WORKER",
            "timestamp": 0,
            "metadata": {
                "run_id": self._run_id,
                "global_rank": rank,
                "group_rank": part.node_rank,
                "worker_id": None if rank is None else str(rank),
                "role": machine.job.role,
                "hostname": member.address if member else part.node,
                "state": state,
                "total_run_time": int(machine.now),
                "rdzv_backend": "ray",
                "raw_error": json.dumps(error) if error else None,
                "metadata": json.dumps(more),
                "agent_restarts": machine.restarts,
                "duration_ms": None,
            },
        }
