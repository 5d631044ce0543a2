"""Reading logs beside what the agent does, also where the file system does not answer."""

from __future__ import annotations

import asyncio
import threading

import pytest

from raylaunch.cluster.agent import agent as agent_module
from raylaunch.cluster.agent.agent import LogReader
from raylaunch.node.logs.log_files import LogAnswer


def test_what_is_read_is_returned():
    """Errors are raised to who asked."""

    def fail() -> LogAnswer:
        raise PermissionError(13, "Permission denied")

    async def run() -> None:
        reader = LogReader()
        assert await reader.read(LogAnswer) == LogAnswer()
        with pytest.raises(PermissionError):
            await reader.read(fail)

    asyncio.run(run())


def test_a_file_system_that_does_not_answer_holds_up_so_many_reads():
    """Further ones fail at once, until those are answered."""
    answers = threading.Event()

    def wait() -> LogAnswer:
        answers.wait(100)
        return LogAnswer()

    async def run() -> None:
        reader = LogReader()
        stuck = [asyncio.ensure_future(reader.read(wait)) for _ in range(agent_module.MOST_READS)]
        await asyncio.sleep(0)
        with pytest.raises(BlockingIOError):
            await reader.read(LogAnswer)
        answers.set()
        assert await asyncio.gather(*stuck) == [LogAnswer()] * len(stuck)
        assert await reader.read(LogAnswer) == LogAnswer()

    asyncio.run(run())
