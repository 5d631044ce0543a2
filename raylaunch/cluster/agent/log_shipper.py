"""Reads the logs of the agent's workers: ten times a second while they grow, and not at all while they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from raylaunch.cluster.agent.outbox import Outbox
from raylaunch.core.job.outputs import OutputView
from raylaunch.core.placement.environment import Assignment
from raylaunch.core.record.run_layout import LAYOUTS
from raylaunch.node.logs.tail import LogSource, LogTailer, log_sources
from raylaunch.node.protocol.node_spec import NodeSpec
from raylaunch.worker.heartbeats.shared_page import SharedPage

TAIL_SECONDS = 0.1
MOST_PER_TURN = 4 * 1024 * 1024
"""Bytes that are read at a time, before other tasks of the event loop, such as a restart, get their turn."""


class LogShipper:
    """Puts what the logs have into the outbox. While that is full nothing is read; workers never wait for it."""

    def __init__(self, outbox: Outbox[Any], tell: Callable[[], None], page: SharedPage | None = None) -> None:
        """`tell` is called whenever something was put into the outbox. `page`: the one of the workers."""
        self.tailer = LogTailer()
        self._outbox = outbox
        self._tell = tell
        self._page = page
        self._task: asyncio.Task[None] | None = None
        #: Set when the logs may have grown.
        self._news = asyncio.Event()
        #: Set when the outbox has room again.
        self._room = asyncio.Event()

    def follow(self, assignment: Assignment, spec: NodeSpec, view: OutputView, shown: int | None) -> None:
        """Follow what is shown of the workers of an attempt, which begins. `shown`: a rank whose output is already."""
        sources = log_sources(
            view, assignment, LAYOUTS[spec.agent.job.log_layout], spec.run_dir, kept=spec.agent.kept, page=self._page
        )
        self.add([replace(source, prefix=None) if source.rank == shown else source for source in sources])

    def add(self, sources: Sequence[LogSource]) -> None:
        """Also follow the files of these workers."""
        self.tailer.add(sources)
        self._news.set()
        if sources and self._task is None:
            loop = asyncio.get_running_loop()
            if (growth := self.tailer.inotify.fileno()) >= 0:
                loop.add_reader(growth, self._grown)
            self._task = loop.create_task(self._follow())

    def end(self, attempt: int) -> None:
        """Record that nothing more of this attempt will be written. `behind` is true until all of it is read."""
        self.tailer.end_attempt(attempt)
        self._news.set()

    @property
    def behind(self) -> bool:
        """Whether output that belongs before the end of an attempt is unread."""
        return self.tailer.has_backlog

    def taken(self) -> None:
        """Go on after the driver has taken something out of the outbox."""
        if not self._outbox.full:
            self._room.set()

    def read(self) -> None:
        """Ship what the files contain now, without waiting for more."""
        self._outbox.put_output(self.tailer.read(MOST_PER_TURN))
        self._tell()

    def close(self) -> None:
        """Cancel the task that reads, and close the files."""
        if self._task is not None:
            self._task.cancel()
            if (growth := self.tailer.inotify.fileno()) >= 0:
                asyncio.get_running_loop().remove_reader(growth)
        self.tailer.close()

    def _grown(self) -> None:
        self.tailer.inotify.drain()
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
            timer = asyncio.get_running_loop().call_later(pause, self._news.set) if pause is not None else None
            try:
                await self._news.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    def _turn(self) -> float | None:
        """Read, and return the seconds to wait for changes before the next turn; None: without a limit."""
        self.read()
        if self.tailer.has_backlog or self.tailer.bytes_read >= MOST_PER_TURN:
            return 0
        if not self.tailer.has_grown and self.tailer.watch():
            self.read()
            if not self.tailer.has_grown:
                return self.tailer.poll_interval
        return TAIL_SECONDS
