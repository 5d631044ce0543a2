"""What raylaunch's driver saw and did, on the clock of all processes of the machine (CLOCK_MONOTONIC)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from raylaunch.core.machine.events_and_actions import Launch
from raylaunch.core.record import journal
from raylaunch.core.record.journal import JournalEntry

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class EventLog:
    """`clock`: when the driver's times began, CLOCK_MONOTONIC; `began`: the same as wall-clock time, ISO 8601."""

    clock: float = 0.0
    began: str = ""
    entries: tuple[JournalEntry, ...] = ()

    def events(self, kind: type[Kind]) -> list[tuple[float, Kind]]:
        """Return the events of a kind, each with when the driver took it."""
        found = [(entry.event, entry.event) for entry in self.entries if entry.event is not None]
        return [(self.clock + event.at, same) for event, same in found if isinstance(same, kind)]

    def actions(self, kind: type[Kind]) -> list[Kind]:
        """Return the actions of a kind."""
        return [action for entry in self.entries for action in entry.actions if isinstance(action, kind)]

    def launched(self, attempt: int) -> float:
        """Return when the driver has ordered an attempt."""
        for entry in self.entries:
            if entry.event and any(isinstance(one, Launch) and one.attempt == attempt for one in entry.actions):
                return self.clock + entry.event.at
        raise ValueError(f"attempt {attempt} was not ordered")


def read(path: Path | None) -> EventLog:
    """Return what an events.jsonl has so far: nothing, if there is none yet."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    if not lines:
        return EventLog()
    header = journal.read_header(lines[0])
    return EventLog(header.clock, header.began, tuple(journal.read(lines)[1]))
