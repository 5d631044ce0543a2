"""Who is told of a run while it goes on, and where it is written down."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from raylaunch.core.journal import Entry
from raylaunch.core.machine import Machine
from raylaunch.node.logs import Output


class Observer(Protocol):
    """Whoever watches the run: the terminal."""

    def decided(self, entry: Entry, machine: Machine) -> None:
        """The machine took a step."""

    def wrote(self, output: Iterable[Output]) -> None:
        """Shown ranks wrote something."""

    def said(self, text: str) -> None:
        """Something worth a line that is no decision."""


class Journal(Protocol):
    """Where entries are written."""

    def append(self, entry: Entry) -> None:
        """One more."""

    def write_stacks(self, attempt: int, text: str) -> str:
        """What the workers of an attempt that hung were doing. Returns where that is kept, `""` for nowhere."""
