"""The driver waits for the last checkpoint, says how far it is, and gives it up where it must."""

from __future__ import annotations

from concurrent.futures import Future

import msgspec
import pytest

from raylaunch.capabilities.state import last_checkpoint
from raylaunch.node.state.checkpoint_writes import LastWrite


class Agents:
    """Agents that answer one thing after the other; the last one again and again. An exception is raised."""

    def __init__(self, **answers: list[LastWrite | Exception]) -> None:
        self.answers = answers

    def ask(self, node: str) -> Future[bytes]:
        left = self.answers[node]
        answer = left.pop(0) if len(left) > 1 else left[0]
        future: Future[bytes] = Future()
        if isinstance(answer, LookupError):
            raise answer
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(msgspec.msgpack.encode(answer))
        return future


def written(agents: Agents) -> list[str]:
    """Return what is said."""
    said: list[str] = []
    last_checkpoint.write(agents.ask, [*agents.answers], said.append)
    return said


@pytest.fixture
def _at_once(monkeypatch):
    """Say at each look how far the checkpoint is."""
    for name in ("_FIRST_SECONDS", "_TELL_SECONDS"):
        monkeypatch.setattr(last_checkpoint, name, 0.0)


@pytest.mark.usefixtures("_at_once")
def test_it_says_how_far_the_nodes_are_until_all_have_written():
    begun = LastWrite(is_over=False, folder="/d")
    part = LastWrite(is_over=False, folder="/d", written=3 * 2**20, total=8 * 2**20)
    done = LastWrite(is_over=True, folder="/d")
    said = written(Agents(a=[begun, begun, part, done], b=[begun, begun, done]))
    assert said == [
        "writing the last checkpoint to /d: it begins; Ctrl-C gives it up",
        "writing the last checkpoint to /d: 3 of 8 MiB; Ctrl-C gives it up",
    ]


def test_what_went_wrong_is_said_once_and_a_dead_agent_does_not_stop_the_others():
    full = LastWrite(is_over=True, folder="/d", why="no space")
    said = written(Agents(a=[full], b=[full], c=[RuntimeError("it died\nat once")], d=[LookupError()]))
    assert said == ["no space", "c has not written its part of the last checkpoint: it died"]


def test_a_run_without_a_durable_folder_says_nothing():
    assert written(Agents(a=[LastWrite(is_over=True)], b=[RuntimeError("it died")])) == []


def test_a_disk_that_does_not_answer_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(last_checkpoint, "STALLED_SECONDS", 0.2)
    said = written(Agents(a=[LastWrite(is_over=False, folder="/d", written=5, total=8)]))
    assert said == ["the last checkpoint is given up: nothing was written of it for 0.2 s"]


def test_an_agent_that_does_not_answer_is_not_waited_for_forever(monkeypatch):
    class Silent(Agents):
        def ask(self, node: str) -> Future[bytes]:
            return super().ask(node) if node == "a" else Future()

    monkeypatch.setattr(last_checkpoint, "ANSWER_SECONDS", 0.2)
    done = LastWrite(is_over=True, folder="/d")
    why = "b has not written its part of the last checkpoint: its agent has not answered for 0.2 s"
    assert written(Silent(a=[done], b=[done])) == [why]
