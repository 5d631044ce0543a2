"""The driver of a detached run whose agents are played: `python -m tools.bench.crowd_driver first|next FOLDER AGENTS ADDRESS`.

The first one runs until it is killed, and says when all workers run. The next one is connected and waits for a line on
stdin; then it takes over, and prints the seconds of its phases as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray

from raylaunch.cluster import named_resources
from raylaunch.cluster.driver import succession
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.cluster.driver.succession import Succession
from raylaunch.cluster.fleet import ray_fleet
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.machine.events_and_actions import DriverReplaced
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.state import Phase
from raylaunch.core.record.journal import JournalEntry
from raylaunch.core.record.run_layout import LAYOUTS
from tests.fakes import RunRecorder
from tools.bench.crowd import Crowds, Room
from tools.bench.driven import NPROC, _plan, _settings

ACTORS = 4
TOKEN = "crowd"
BEGAN = "2026-01-01T00:00:00+00:00"


class Says(RunRecorder):
    """Prints what the bench waits for."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self._has_said = not is_first

    def on_entry(self, entry: JournalEntry, machine: Machine) -> None:
        if machine.phase is Phase.RUNNING and not self._has_said:
            self._has_said = True
            print("runs", flush=True)
        if isinstance(entry.event, DriverReplaced):
            event, nodes = entry.event, len(machine.roster)
            found = {"state": event.state_seconds, "prepare": event.prepare_seconds, "agents": event.agents_seconds}
            print(json.dumps(found | {"all": event.seconds, "nodes": nodes}), flush=True)


def first(folder: Path, agents: int) -> None:
    """Begin the run."""
    job = Job(
        entrypoint=Entrypoint(script="train.py"),
        nnodes=agents,
        nproc_per_node=NPROC,
        node_timeout=60,
        log_dir=str(folder),
    )
    plan, began = _plan(agents), time.monotonic()
    run_folder = RunFolder.create(job, "crowd", print, 1)
    run_folder.open(job, "{}", plan, BEGAN, began)
    named_resources.announce(TOKEN, 1)
    place = Succession(token=TOKEN, request=b"")
    facts = place.facts(job, job, plan, "crowd", BEGAN, _settings(job, run_folder.where))
    driver = place.driver(
        facts,
        place.fleet(plan, facts.spec, print, run_folder.fence.leave),
        run_folder,
        Says(is_first=True),
        began,
        None,
    )
    driver.run()


def another(folder: Path) -> None:
    """Take over as soon as that is asked for."""
    sys.stdin.readline()
    place = succession.find(TOKEN, time.monotonic())
    assert place is not None
    assert place.predecessor is not None
    ledger = place.predecessor.ledger
    facts = ledger.facts
    path = Path(ledger.folder.path)
    run_folder = RunFolder(path, LAYOUTS[facts.job.log_layout], Redactor.of(facts.job, os.environ), print, 2)
    run_folder.resume(ledger.folder, facts.job)
    fleet = place.fleet(facts.plan, facts.spec, print, run_folder.fence.leave)
    place.driver(facts, fleet, run_folder, Says(is_first=False), ledger.began_at(), None).run()


def main() -> None:
    """Have the agents played, and drive."""
    role, folder, agents, address = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    crowds = Crowds(ACTORS, 60.0, NPROC, name="raylaunch-crowd")
    replaced: Any = ray_fleet
    replaced.PlacementGroups, replaced.actor_class = Room, lambda: crowds
    Room.seats = agents
    replaced = named_resources
    replaced.agents = lambda _token: {f"node-{number}": f"node-{number}" for number in range(1, agents + 1)}
    named = ray.get_actor
    ray.get_actor = lambda name, namespace=None: (
        crowds.handle(name) if name.startswith("node-") else named(name, namespace)
    )
    ray.put(None)  # Ray then imports pyarrow and pydantic, which it has done in the process of an actor
    print("connected", flush=True)
    if role == "first":
        first(folder, agents)
    else:
        another(folder)


if __name__ == "__main__":
    main()
