"""Reads log files of the node for those who look at the run, beside what the agent does for the driver."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from raylaunch.node.logs.log_files import LogAnswer

Result = TypeVar("Result")

MOST_READS = 32
"""So many reads go on at a time; further ones fail. A file system that does not answer holds up these and no others."""


class LogReader:
    """Reads in daemon threads, for which nobody waits at the end of the process."""

    def __init__(self) -> None:
        self._going_on = 0

    async def read(self, work: Callable[[], LogAnswer]) -> LogAnswer:
        """Do this in a thread. Raises BlockingIOError if too much goes on already, RuntimeError without a thread."""
        if self._going_on >= MOST_READS:
            msg = "the file system of the node does not answer"
            raise BlockingIOError(msg)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[LogAnswer] = loop.create_future()

        def end(answer: LogAnswer | None, error: Exception | None) -> None:
            self._going_on -= 1
            if not future.done() and answer is not None:
                future.set_result(answer)
            elif not future.done() and error is not None:
                future.set_exception(error)

        def run() -> None:
            answer, error = None, None
            try:
                answer = work()
            except Exception as caught:  # noqa: BLE001
                error = caught
            loop.call_soon_threadsafe(end, answer, error)

        thread = threading.Thread(target=run, daemon=True, name="raylaunch-log-reader")
        thread.start()
        self._going_on += 1
        return await future


async def in_thread(work: Callable[[], Result]) -> Result:
    """Do this in another thread, or in this one where no thread can be started."""
    try:
        future = asyncio.get_running_loop().run_in_executor(None, work)
    except RuntimeError:  # "can't start new thread"
        return work()
    return await future
