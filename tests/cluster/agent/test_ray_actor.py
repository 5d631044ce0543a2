"""The agent as an actor, in a process without Ray."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace

from raylaunch.cluster.agent import ray_actor
from raylaunch.node.protocol.messages import StopWorkers


def test_the_error_of_an_order_is_kept_for_the_next_report(monkeypatch):
    """The driver does not wait for the call that carries an order, so the error cannot be raised there."""
    errors: list[Exception] = []
    context = SimpleNamespace(get_node_id=lambda: "a", get_node_labels=dict)
    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    monkeypatch.setattr(ray_actor, "ray", SimpleNamespace(get_runtime_context=lambda: context, util=util))
    monkeypatch.setattr(ray_actor.processes, "reset_niceness", lambda: None)

    def fail(order: StopWorkers) -> None:
        raise ValueError(order.signal)

    monkeypatch.setattr(ray_actor.agent, "Agent", lambda *_: SimpleNamespace(handle=fail, fail=errors.append))
    actor = ray_actor.AgentActor(None)
    asyncio.run(actor.handle(pickle.dumps(StopWorkers(attempt=1, grace=0.0, signal="SIGTERM"))))
    assert [str(error) for error in errors] == ["SIGTERM"]
