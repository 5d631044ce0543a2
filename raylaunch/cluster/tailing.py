"""The agent reads its workers' logs on: ten times a second while they grow, and not at all while they do not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from raylaunch.cluster.outbox import Outbox
from raylaunch.node.logs import Source, Tails

_TAIL_SECONDS = 0.1
_MOST_PER_TURN = 4 * 1024 * 1024
"""Bytes that are read before whatever else waits gets its turn: a restart, perhaps."""


class Tailing:
    """Puts into the outbox what the logs have, unless that is full: then logs wait, who write them never do."""

    def __init__(self, outbox: Outbox[Any], tell: Callable[[], None]) -> None:
        """`tell` is called whenever the outbox may have something more."""
        self._tails = Tails()
        self._outbox = outbox
        self._tell = tell
        self._task: asyncio.Task[None] | None = None
        #: There is something to look at.
        self._news = asyncio.Event()
        #: The outbox is not full any more.
        self._room = asyncio.Event()

    def add(self, sources: Sequence[Source]) -> None:
        """Follow these too."""
        self._tails.add(sources)
        self._news.set()
        if sources and self._task is None:
            loop = asyncio.get_running_loop()
            if (growth := self._tails.growth.fileno()) >= 0:
                loop.add_reader(growth, self._grown)
            self._task = loop.create_task(self._follow())

    def end(self, attempt: int) -> None:
        """Nothing more of this attempt and those before it is to come; `behind` until all of it is read."""
        self._tails.end(attempt)
        self._news.set()

    @property
    def behind(self) -> bool:
        """Whether something that belongs before the word of an attempt's end is still to be read."""
        return self._tails.behind

    def taken(self) -> None:
        """Something was taken out of the outbox."""
        if not self._outbox.full:
            self._room.set()

    def read(self) -> None:
        """Read on, one turn."""
        self._outbox.put_output(self._tails.read(_MOST_PER_TURN))
        self._tell()

    def close(self) -> None:
        """Read no more."""
        if self._task is not None:
            self._task.cancel()
            if (growth := self._tails.growth.fileno()) >= 0:
                asyncio.get_running_loop().remove_reader(growth)
        self._tails.close()

    def _grown(self) -> None:
        self._tails.growth.heard()
        self._news.set()

    async def _follow(self) -> None:
        while True:
            self._news.clear()
            if self._outbox.full:
                self._room.clear()
                await self._room.wait()
            pause = self._turn()
            if pause == 0:
                await asyncio.sleep(0)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._news.wait()

    def _turn(self) -> float | None:
        """Look, and say how long to wait for news before looking again; None: however long it takes."""
        self.read()
        if self._tails.behind or self._tails.found >= _MOST_PER_TURN:
            return 0
        if not self._tails.found and self._tails.watch():
            self.read()
            if not self._tails.found:
                return self._tails.patience
        return _TAIL_SECONDS
