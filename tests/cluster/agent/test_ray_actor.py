"""The agent as an actor, in a process without Ray."""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from raylaunch.cluster.agent import ray_actor
from raylaunch.node.protocol.messages import StopWorkers

SPEC = SimpleNamespace(niceness=7)


@pytest.fixture
def actor(monkeypatch) -> Iterator[ray_actor.AgentActor]:
    """An actor that has not begun. `agent.Agent` and `set_niceness` are the tests' own."""
    context = SimpleNamespace(get_node_id=lambda: "a", get_node_labels=dict)
    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    monkeypatch.setattr(ray_actor, "ray", SimpleNamespace(get_runtime_context=lambda: context, util=util))
    monkeypatch.setattr(ray_actor.processes, "set_niceness", lambda _: None)
    return ray_actor.AgentActor()


def begun(monkeypatch, actor, make) -> None:
    """Begin, with an agent that `make` returns or an error that it raises."""
    monkeypatch.setattr(ray_actor.agent, "Agent", make)
    asyncio.run(actor.begin(pickle.dumps(SPEC)))


def test_the_error_of_an_order_is_kept_for_the_next_report(monkeypatch, actor):
    """The driver does not wait for the call that carries an order, so the error cannot be raised there."""
    errors: list[Exception] = []

    def fail(order: StopWorkers) -> None:
        raise ValueError(order.signal)

    begun(monkeypatch, actor, lambda *_: SimpleNamespace(handle=fail, fail=errors.append))
    asyncio.run(actor.handle(pickle.dumps(StopWorkers(attempt=1, grace=0.0, signal="SIGTERM"))))
    assert [str(error) for error in errors] == ["SIGTERM"]


def test_the_niceness_of_the_command(monkeypatch, actor):
    """`nice` counts for the workers too, as with torchrun, and not what Ray gives its own."""
    found: list[int] = []
    monkeypatch.setattr(ray_actor.processes, "set_niceness", found.append)
    begun(monkeypatch, actor, lambda *_: None)
    assert found == [7]


def test_an_agent_that_cannot_begin(monkeypatch, actor):
    """The next report says why, in text that Ray can send: the name of a folder may not be UTF-8."""

    def fail(*_: object) -> None:
        raise FileNotFoundError("no caf\udce9")

    begun(monkeypatch, actor, fail)
    with pytest.raises(ray_actor.AgentStartError) as raised:
        asyncio.run(actor.next_report())
    assert str(raised.value) == r"FileNotFoundError: no caf\xe9"
    assert raised.value.__context__ is None
    assert asyncio.run(actor.values()) == {}
    asyncio.run(actor.close())


def test_an_error_of_the_agent_can_be_sent(monkeypatch, actor):
    """An error that Ray cannot encode would be lost, and with it the reason."""

    async def fail() -> None:
        raise OSError("no caf\udce9")

    begun(monkeypatch, actor, lambda *_: SimpleNamespace(next_report=fail))
    with pytest.raises(ray_actor.AgentError) as raised:
        asyncio.run(actor.next_report())
    "".join(traceback.format_exception(raised.value)).encode()
