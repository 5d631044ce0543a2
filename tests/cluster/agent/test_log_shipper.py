"""The agent reads logs when they grow, and sleeps while they do not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from raylaunch.cluster.agent import agent as agent_module
from raylaunch.cluster.agent.agent import LogShipper, Outbox
from raylaunch.node.logs.tail import LogSource, LogTailer

SECONDS = 100.0


class ShippingAgent:
    """The part of an agent that reads logs.

    `read_count`: how often it has read them; `output_at`: the one of these reads that found the output.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log"
        self.path.touch()
        self.outbox = Outbox()
        self.output_ready = asyncio.Event()
        self.shipper = LogShipper(self.outbox, self.tell)
        self.read_count = self.output_at = 0
        read = self.shipper.tailer.read

        def counted(most: int):
            self.read_count += 1
            return read(most)

        self.shipper.tailer.read = counted  # type: ignore[method-assign]
        self.shipper.add([LogSource(attempt=1, rank=0, stream="stdout", path=str(self.path), prefix=b"")])

    def tell(self) -> None:
        if self.outbox.has_some(more_output=False) and not self.output_ready.is_set():
            self.output_at = self.read_count
            self.output_ready.set()

    def write(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)

    async def next_output(self) -> bytes:
        """Wait for output, and return it."""
        await asyncio.wait_for(self.output_ready.wait(), SECONDS)
        self.output_ready.clear()
        _, output = self.outbox.take(more_output=self.shipper.behind)
        self.shipper.taken()
        return b"".join(part.data for part in output)

    async def wait_until_idle(self) -> None:
        """Wait until nothing is read any more."""
        before, end = -1, time.monotonic() + SECONDS
        while before != self.read_count:
            assert time.monotonic() < end
            before = self.read_count
            await asyncio.sleep(5 * agent_module.TAIL_SECONDS)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent_module, "TAIL_SECONDS", 0.02)

    def run(body: Callable[[ShippingAgent], object]) -> None:
        async def whole() -> None:
            agent = ShippingAgent(tmp_path)
            try:
                await body(agent)  # type: ignore[misc]
            finally:
                agent.shipper.close()

        asyncio.run(whole())

    return run


def test_logs_are_read_only_when_they_grow(run):
    async def body(agent: ShippingAgent) -> None:
        await agent.wait_until_idle()
        before = agent.read_count
        agent.write(b"one\n")
        assert await agent.next_output() == b"one\n"
        assert agent.output_at == before + 1, "it read once, and not in vain"
        agent.write(b"two\n")
        assert await agent.next_output() == b"two\n"
        await agent.wait_until_idle()
        agent.write(b"three\n")
        assert await agent.next_output() == b"three\n"

    run(body)


def test_logs_are_polled_without_inotify(run, monkeypatch):
    monkeypatch.setattr("raylaunch.node.linux.inotify.Inotify.watch", lambda *_: False)

    async def body(agent: ShippingAgent) -> None:
        for line in (b"one\n", b"two\n"):
            agent.write(line)
            assert await agent.next_output() == line
            before = agent.read_count
            await asyncio.sleep(5 * agent_module.TAIL_SECONDS)
            assert agent.read_count > before

    run(body)


def test_a_full_outbox_pauses_reading(run, monkeypatch):
    """What is not read yet stays in the file, and none of it is lost."""
    monkeypatch.setattr(agent_module, "_FULL", 100_000)
    monkeypatch.setattr(agent_module, "_MOST_AT_ONCE", 50_000)
    monkeypatch.setattr(agent_module, "_MOST_PER_TURN", 60_000)
    monkeypatch.setattr(agent_module, "LogTailer", partial(LogTailer, chunk=30_000))
    text = b"".join(b"%06d\n" % number for number in range(200_000))

    async def body(agent: ShippingAgent) -> None:
        agent.write(text)
        await agent.wait_until_idle()
        assert 100_000 <= agent.outbox.queued_bytes <= 200_000
        shown = b""
        while len(shown) < len(text):
            shown += await agent.next_output()
            agent.tell()
        assert shown == text

    run(body)


def test_what_one_turn_does_not_read_is_read_in_the_next_ones(run, monkeypatch):
    """At once, and others have their turns in between."""
    monkeypatch.setattr(agent_module, "TAIL_SECONDS", 3600.0)
    monkeypatch.setattr(agent_module, "_MOST_PER_TURN", 60_000)
    monkeypatch.setattr(agent_module, "LogTailer", partial(LogTailer, chunk=30_000))
    text = b"".join(b"%06d\n" % number for number in range(100_000))

    async def body(agent: ShippingAgent) -> None:
        agent.write(text)
        shown, turns = b"", 0
        while len(shown) < len(text):
            shown += await agent.next_output()
            turns += 1
        assert shown == text
        assert turns > 1

    run(body)


def test_the_last_output_of_an_attempt_is_read_at_once(run, monkeypatch):
    """However long the poll interval is."""
    monkeypatch.setattr(agent_module, "TAIL_SECONDS", 3600.0)

    async def body(agent: ShippingAgent) -> None:
        agent.write(b"one\n")
        assert await agent.next_output() == b"one\n"
        agent.write(b"last words")
        agent.shipper.end(1)
        assert agent.shipper.behind
        assert await agent.next_output() == b"last words"
        assert not agent.shipper.behind

    run(body)
