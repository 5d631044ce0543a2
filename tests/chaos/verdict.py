"""What a job's event log and its steps prove together: planned ends lost nothing, and nobody paid for lost nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from raylaunch.core.machine.machine import Machine
from raylaunch.core.record import journal
from tests.chaos.check_steps import AttemptSteps

Lines = Iterable[dict[str, Any]]


def planned_ends(lines: Lines) -> set[int]:
    """Attempts whose workers were asked to save, and to whom nothing else happened before they were stopped."""
    asked: set[int] = set()
    found: set[int] = set()
    for line in lines:
        for action in line["actions"]:
            if action["is"] == "RequestCheckpoint":
                asked.add(action["attempt"])
            elif action["is"] == "Stop" and action["attempt"] in asked:
                asked.remove(action["attempt"])
                found |= set() if _is_a_blow(line["event"]) else {action["attempt"]}
    return found


def _is_a_blow(event: dict[str, Any]) -> bool:
    return event["is"] in ("NodeLost", "WorkersHung", "StopRequested") or bool(event.get("failures"))


def lost_steps(lines: Lines, found: Sequence[AttemptSteps]) -> Iterator[str]:
    """A planned end loses none, whether or not the workers answered."""
    planned = planned_ends(lines)
    for before, after in pairwise(found):
        if before.attempt in planned and after.first != before.last + 1:
            lost = before.last + 1 - after.first
            yield f"the planned end of attempt {before.attempt} lost {lost} steps: step {after.first} is the next"


def replayed(events: Path, may_spend: int) -> Iterator[str]:
    """The log leads to the same decisions again; `may_spend`: how many restarts the faults may have taken in all."""
    of, entries = journal.read(events.read_text().splitlines())
    machine = Machine(of)
    machine.start()
    for entry in entries:
        if entry.event is not None and tuple(machine.handle(entry.event)) != entry.actions:
            yield f"the log does not lead to the decision in it on {entry.event}"
            return
    if machine.restarts > may_spend:
        yield f"{machine.restarts} restarts are spent, for {may_spend} faults that may take one"
