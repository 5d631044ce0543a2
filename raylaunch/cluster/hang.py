"""What all workers were doing when one of them fell silent, collected before they are ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raylaunch.core.events import WorkersHung
from raylaunch.core.hang import hung
from raylaunch.core.progress import Hang
from raylaunch.core.ranks import Assignment
from raylaunch.core.stacks import Stack, report
from raylaunch.node.messages import WorkersStacks

_SECONDS = 1.5
"""What nodes have to answer; one that cannot is told of without."""


class StackCall:
    """One round of questions. Times are seconds since the run began."""

    def __init__(self, hang: Hang, attempt: int, nodes: Iterable[str], now: float) -> None:
        self.attempt = attempt
        self._hang = hang
        self._missing = set(nodes)
        self._deadline = now + _SECONDS
        self._stacks: list[Stack] = []

    def take(self, word: WorkersStacks) -> None:
        """A node's answer."""
        if word.attempt == self.attempt and word.node in self._missing:
            self._missing.remove(word.node)
            self._stacks.extend(word.stacks)

    @property
    def next_look(self) -> float:
        """When there is no more to wait for."""
        return self._deadline if self._missing else 0.0

    def found(self, now: float, parts: Sequence[Assignment], pids: Mapping[str, tuple[int, ...]]) -> WorkersHung:
        """Who is at fault, as far as the answers tell."""
        return hung(self._hang, now, parts, pids, self._stacks)

    def report(self, hung: WorkersHung) -> str:
        """All of it, for a person."""
        return report(self._stacks, hung.groups)
