"""What all workers are doing when one of them has fallen silent, collected before anybody is ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from raylaunch.core.events import WorkersHung
from raylaunch.core.evidence import LOOK_SECONDS, LOOKS, Look
from raylaunch.core.hang import hung
from raylaunch.core.progress import Hang
from raylaunch.core.ranks import Assignment
from raylaunch.core.stacks import Stack, report
from raylaunch.node.messages import WorkersStacks

_SECONDS = 1.5
"""What nodes have to answer; one that cannot is told of without."""


class Inquiry:
    """One look at all workers where that is enough, else several. Times are seconds since the run began."""

    def __init__(self, hang: Hang, parts: Sequence[Assignment], ask: Callable[[str, int], None]) -> None:
        """`ask` has a node tell what an attempt's workers are doing."""
        self._ask = ask
        self._parts = parts
        self.attempt = parts[0].attempt
        self.hang = hang
        self.looks: list[Look] = []

    def begin(self, now: float) -> None:
        """A look: all nodes are asked."""
        self._began = now
        self._missing = {part.node for part in self._parts}
        self._stacks: list[Stack] = []
        for part in self._parts:
            self._ask(part.node, self.attempt)

    def take(self, word: WorkersStacks) -> None:
        """A node's answer."""
        if word.attempt == self.attempt and word.node in self._missing:
            self._missing.remove(word.node)
            self._stacks.extend(word.stacks)

    @property
    def next_look(self) -> float:
        """When there is no more to wait for, and `goes_on` is to be asked."""
        if self._missing:
            return self._began + _SECONDS
        return 0.0 if self.hang.is_sure else self._began + LOOK_SECONDS

    def goes_on(self, hang: Hang, now: float) -> bool:
        """Note what was seen. Whether it takes another look: then that has begun. `hang`: as it stands."""
        self.hang = hang
        self.looks.append(Look(at=self._began, stacks=tuple(self._stacks)))
        if hang.is_sure or len(self.looks) == LOOKS:
            return False
        self.begin(now)
        return True

    def found(self, now: float, pids: Mapping[str, tuple[int, ...]]) -> WorkersHung:
        """Who is at fault, as far as the last answers tell."""
        return hung(self.hang, now, self._parts, pids, self._stacks)

    def report(self, hung: WorkersHung) -> str:
        """All of it, for a person."""
        return report(self._stacks, hung.groups)
