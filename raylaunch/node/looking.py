"""What no word tells the supervisor of: it looks again and again, as long as there is something to look for."""

from __future__ import annotations

import time
from collections.abc import Iterator

from raylaunch.core.events import WorkersCheckpointed
from raylaunch.node import asking, messages, stacks
from raylaunch.node.alarm import Alarm
from raylaunch.node.asking import Asking
from raylaunch.node.present import Present
from raylaunch.node.stacks import Dumps
from raylaunch.worker.page import Page

Seen = messages.WorkersStacks | messages.Proposed | WorkersCheckpointed


class Looking:
    """Checkpoints that workers were asked for, and stacks."""

    def __init__(self, page: Page, node: str) -> None:
        self._node = node
        self._alarm = Alarm()
        self._asking = Asking(page)
        self._proposed: list[messages.Proposed] = []
        self._dumps = Dumps(node)

    def fileno(self) -> int:
        """Readable when it is time to `look`."""
        return self._alarm.fileno()

    def soon(self) -> None:
        """It is time."""
        self._alarm.set(0)

    def ask_checkpoint(self, attempt: int, step: int, present: Present | None) -> None:
        """Propose a step to the present attempt's workers."""
        reached = self._asking.ask(attempt, step, present)
        if reached is not None:
            self._proposed.append(messages.Proposed(node=self._node, attempt=attempt, step=step, reached=reached))
        self.soon()

    def settle(self, attempt: int, step: int) -> None:
        """It is the step."""
        self._asking.settle(attempt, step)

    def drop_checkpoint(self) -> None:
        """Nobody waits for it any more."""
        self._asking.drop()

    def dump_stacks(self, attempt: int, present: Present | None) -> None:
        """The fork server is about to ask the attempt's workers for their stacks."""
        self._dumps.ask(attempt, present.live() if present is not None and present.attempt == attempt else [])
        self.soon()

    def take(self, word: messages.Asked, fd: int | None) -> None:
        """It has asked one."""
        self._dumps.take(word, fd)

    def look(self, present: Present | None) -> Iterator[Seen]:
        """What there is to be seen."""
        yield from self._proposed
        self._proposed.clear()
        answer = self._asking.look(present)
        if answer is not None:
            yield WorkersCheckpointed(at=time.monotonic(), attempt=answer.attempt, node=self._node, step=answer.step)
        dumped = self._dumps.look()
        if dumped is not None:
            yield dumped
        if self._asking.is_open:
            self._alarm.set(asking.LOOK_SECONDS)
        else:
            self._alarm.set(stacks.LOOK_SECONDS if self._dumps.is_open else None)

    def close(self) -> None:
        """Look no more."""
        self._dumps.close()
        self._alarm.close()
