"""The interfaces by which the driver reports a run: to a person, and to the run folder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from raylaunch.core.machine.machine import Machine
from raylaunch.core.record.journal import JournalEntry
from raylaunch.node.logs.tail import LogOutput


class Observer(Protocol):
    """Shows the run to a person: the terminal. Called in the driver's thread, which waits for it."""

    def on_entry(self, entry: JournalEntry, machine: Machine) -> None:
        """The machine handled an event; `machine` is its state afterwards."""

    def on_output(self, output: Iterable[LogOutput]) -> None:
        """Workers whose output is shown wrote something."""

    def on_message(self, text: str) -> None:
        """Show a line that is not about a decision of the machine."""


class RunRecord(Protocol):
    """Keeps the run: see `RunFolder`."""

    def append(self, entry: JournalEntry) -> None:
        """Append an entry to the journal."""

    def write_stacks(self, attempt: int, text: str) -> str:
        """Keep the stacks of an attempt that hung. Return the file's path; `""` if nothing is kept."""
