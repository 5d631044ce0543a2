"""`--event-log-handler console`: torchelastic's events as lines of JSON, for tools that read them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from raylaunch.cluster.driver.observer import RunObserver
from raylaunch.core.failures.failure import Failure
from raylaunch.core.job.job import Job
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.machine.events_and_actions import Finish, Launch
from raylaunch.core.machine.machine import Machine
from raylaunch.core.placement.environment import Assignment, assign
from raylaunch.core.placement.plan import Plan
from raylaunch.core.record.journal import JournalEntry
from raylaunch.errors import ExitCode


class EventLog:
    """An observer that writes torchelastic's events and passes everything on to another observer.

    The events have the fields of torch 2.13's `elastic/events/api.py`. As torchrun's agents do, it writes one per node
    when an attempt starts, and one per node and per worker at the end of the run. The events about torchrun's
    rendezvous have no counterpart here.
    """

    def __init__(self, observer: RunObserver, write: Callable[[str], None]) -> None:
        self._observer = observer
        self._write = write
        self._assignments: tuple[Assignment, ...] = ()
        self._run_id = ""
        self._secrets = Redactor()
        self.on_progress = observer.on_progress
        self.on_output = observer.on_output
        self.on_message = observer.on_message

    def on_plan(self, job: Job, plan: Plan, run_dir: str) -> None:
        """Keep the run id, which every event contains."""
        self._begin(job, run_dir)
        self._observer.on_plan(job, plan, run_dir)

    def on_takeover(self, job: Job, run_dir: str) -> None:
        """Keep the run id, as `on_plan` does."""
        self._begin(job, run_dir)
        self._observer.on_takeover(job, run_dir)

    def _begin(self, job: Job, run_dir: str) -> None:
        self._secrets = Redactor.of(job, os.environ)
        self._run_id = job.run_id or run_dir.rstrip("/").rpartition("/")[2]

    def on_entry(self, entry: JournalEntry, machine: Machine) -> None:
        """Write the events that torchrun's agents would write."""
        self._observer.on_entry(entry, machine)
        for action in entry.actions:
            match action:
                case Launch():
                    members = [machine.nodes[node] for node in action.roster]
                    self._assignments = assign(action.attempt, members)
                    for part in self._assignments:
                        self._emit(self._event(machine, part, "START"))
                case Finish():
                    for event in self._final_events(machine, action):
                        self._emit(event)
                case _:
                    pass

    def _emit(self, event: dict[str, Any]) -> None:
        self._write(json.dumps(self._secrets.shown(event)))

    def _final_events(self, machine: Machine, finish: Finish) -> Iterator[dict[str, Any]]:
        # A worker that hung is reported again when it is stopped: the first report counts.
        failures = {failure.rank: failure for failure in reversed(machine.world.failures)}
        state = "SUCCEEDED" if finish.exit_code == ExitCode.OK else "FAILED"
        for part in self._assignments:
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
