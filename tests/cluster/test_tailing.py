"""An agent reads logs when they grow, and sleeps while they do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from raylaunch.cluster import outbox, tailing
from raylaunch.cluster.outbox import Outbox
from raylaunch.cluster.tailing import Tailing
from raylaunch.node.logs import Source

SECONDS = 20.0


class Agent:
    """As much of one as reads logs. `looks` is how often they were read."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log"
        self.path.touch()
        self.outbox: Outbox[str] = Outbox()
        self.told = asyncio.Event()
        self.tailing = Tailing(self.outbox, self._tell)
        self.looks = 0
        read = self.tailing._tails.read

        def counted(most: int):
            self.looks += 1
            return read(most)

        self.tailing._tails.read = counted  # type: ignore[method-assign]
        self.tailing.add([Source(attempt=1, rank=0, stream="stdout", path=str(self.path), header=b"")])

    def _tell(self) -> None:
        if self.outbox.has_some(more_output=False):
            self.told.set()

    def write(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)

    async def hear(self) -> bytes:
        """The next words."""
        async with asyncio.timeout(SECONDS):
            await self.told.wait()
        self.told.clear()
        _, output = self.outbox.take(more_output=self.tailing.behind)
        self.tailing.taken()
        return b"".join(part.data for part in output)

    async def asleep(self) -> None:
        """Wait until it waits to be told of growth."""
        async with asyncio.timeout(SECONDS):
            before = -1
            while before != self.looks:
                before = self.looks
                await asyncio.sleep(5 * tailing._TAIL_SECONDS)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tailing, "_TAIL_SECONDS", 0.02)

    def run(body: Callable[[Agent], object]) -> None:
        async def whole() -> None:
            agent = Agent(tmp_path)
            try:
                await body(agent)  # type: ignore[misc]
            finally:
                agent.tailing.close()

        asyncio.run(whole())

    return run


def test_logs_that_stand_still_are_not_looked_at_and_a_line_wakes_the_agent(run):
    async def body(agent: Agent) -> None:
        await agent.asleep()
        before = agent.looks
        agent.write(b"one\n")
        assert await agent.hear() == b"one\n"
        assert agent.looks == before + 1, "it was told, it did not look in vain"
        agent.write(b"two\n")
        assert await agent.hear() == b"two\n"
        await agent.asleep()
        agent.write(b"three\n")
        assert await agent.hear() == b"three\n"

    run(body)


def test_logs_are_looked_at_where_the_kernel_does_not_tell(run, monkeypatch):
    monkeypatch.setattr("raylaunch.node.growth.Growth.watch", lambda *_: False)

    async def body(agent: Agent) -> None:
        for line in (b"one\n", b"two\n"):
            agent.write(line)
            assert await agent.hear() == line
            before = agent.looks
            await asyncio.sleep(5 * tailing._TAIL_SECONDS)
            assert agent.looks > before

    run(body)


def test_a_full_outbox_is_filled_no_further_and_then_read_on(run, monkeypatch):
    """However much is written: what is not read waits in the file, none of it is lost."""
    monkeypatch.setattr(outbox, "_FULL", 100_000)
    monkeypatch.setattr(outbox, "_MOST_AT_ONCE", 50_000)
    monkeypatch.setattr(tailing, "_MOST_PER_TURN", 60_000)
    monkeypatch.setattr("raylaunch.node.logs._CHUNK", 30_000)
    text = b"".join(b"%06d\n" % number for number in range(200_000))

    async def body(agent: Agent) -> None:
        agent.write(text)
        await agent.asleep()
        assert 100_000 <= agent.outbox._bytes <= 200_000
        shown = b""
        while len(shown) < len(text):
            shown += await agent.hear()
            agent._tell()
        assert shown == text

    run(body)


def test_the_end_of_an_attempt_is_not_waited_for(run, monkeypatch):
    """Its last words are read at once, however seldom logs are looked at."""
    monkeypatch.setattr(tailing, "_TAIL_SECONDS", 3600.0)

    async def body(agent: Agent) -> None:
        agent.write(b"one\n")
        assert await agent.hear() == b"one\n"
        agent.write(b"last words")
        agent.tailing.end(1)
        assert agent.tailing.behind
        assert await agent.hear() == b"last words"
        assert not agent.tailing.behind

    run(body)
