"""The agent as an actor, in a process without Ray."""

from __future__ import annotations

import asyncio
import functools
import os
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from raylaunch.cluster.agent import ray_actor, serialization
from raylaunch.cluster.succession.agent_session import AgentSession
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.node.protocol.messages import OpenStore, Order, StopWorkers
from raylaunch.node.protocol.node_goal import NodeGoal
from raylaunch.node.protocol.node_spec import AgentSpec

SPEC = AgentSpec(
    job=Job(entrypoint=Entrypoint(script="t.py"), preload=[], start_method="spawn", gpus_per_worker=0),
    run_dir="",
    address=None,
    nproc=1,
    submitter_env={},
    niceness=7,
    cwd=None,
    ray_address="",
    epoch=1,
)


@pytest.fixture
def actor(monkeypatch) -> Iterator[ray_actor.AgentActor]:
    """An actor that has not begun. `agent.Agent` and `set_niceness` are the tests' own."""
    context = SimpleNamespace(get_node_id=lambda: "a")
    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
    monkeypatch.setattr(ray_actor, "ray", SimpleNamespace(get_runtime_context=lambda: context, util=util))
    monkeypatch.setattr(ray_actor.ray_internals, "node_labels", dict)
    monkeypatch.setattr(ray_actor.ray_internals, "environment", os.environ.copy)
    monkeypatch.setattr(ray_actor.processes, "set_niceness", lambda _: None)
    return ray_actor.AgentActor()


def goal(*orders: Order) -> bytes:
    """Return the goal that these orders make, one after the other, as bytes."""
    return serialization.dump_goal(functools.reduce(NodeGoal.after, orders, NodeGoal()))


def begun(monkeypatch, actor, make) -> None:
    """Begin, with an agent that `make` returns or an error that it raises."""
    monkeypatch.setattr(ray_actor.agent, "Agent", make)
    asyncio.run(actor.begin(serialization.dump_spec(SPEC)))


def test_the_error_of_an_order_is_kept_for_the_next_report(monkeypatch, actor):
    """The driver does not wait for the call that carries an order, so the error cannot be raised there."""
    errors: list[Exception] = []

    def fail(order: StopWorkers) -> None:
        raise ValueError(order.signal)

    session = AgentSession()
    begun(monkeypatch, actor, lambda *_, **__: SimpleNamespace(session=session, handle=fail, fail=errors.append))
    asyncio.run(actor.obey(0, goal(StopWorkers(attempt=1, grace=0.0, signal="SIGTERM"))))
    assert [str(error) for error in errors] == ["SIGTERM"]


def test_a_goal_whose_call_ray_has_started_too_late_has_nothing_new(monkeypatch, actor):
    """The one after it had its orders, too. Each is carried out once, in the order in which it was given."""
    carried_out: list[int] = []
    agent = SimpleNamespace(
        session=AgentSession(), handle=lambda order: carried_out.append(order.attempt), fail=pytest.fail
    )
    begun(monkeypatch, actor, lambda *_, **__: agent)
    orders = [OpenStore(attempt=number) for number in range(1, 6)]
    for number, done in ((2, [1, 2]), (1, [1, 2]), (4, [1, 2, 3, 4]), (3, [1, 2, 3, 4]), (5, [1, 2, 3, 4, 5])):
        asyncio.run(actor.obey(0, goal(*orders[:number])))
        assert carried_out == done


def test_an_order_of_the_run_before(monkeypatch, actor):
    """Ray may start its call when the agent is idle or used again. It is not taken for an order of this run."""
    carried_out: list[tuple[int, int]] = []
    client = SimpleNamespace(pid=7, memory=lambda: 0, activate=lambda: True)

    async def become_idle(_seconds: float) -> SimpleNamespace:
        return client

    def make(spec: AgentSpec, *_: object, **__: object) -> SimpleNamespace:
        def handle(order: OpenStore) -> None:
            carried_out.append((spec.epoch, order.attempt))

        session = AgentSession(spec.epoch)
        return SimpleNamespace(
            session=session, handle=handle, fail=pytest.fail, become_idle=become_idle, retire=lambda: None
        )

    def obey(epoch: int, *attempts: int) -> None:
        asyncio.run(actor.obey(epoch, goal(*(OpenStore(attempt=attempt) for attempt in attempts))))

    begun(monkeypatch, actor, make)
    obey(1, 11)
    asyncio.run(actor.become_idle("idle-0", None, 9.0))
    obey(1, 11, 12)
    assert asyncio.run(actor.reuse(replace(SPEC, epoch=2)))
    obey(1, 11, 12)
    obey(2, 21)
    obey(2, 21, 22)
    assert carried_out == [(1, 11), (2, 21), (2, 22)]


def test_the_niceness_of_the_command(monkeypatch, actor):
    """`nice` counts for the workers too, as with torchrun, and not what Ray gives its own."""
    found: list[int] = []
    monkeypatch.setattr(ray_actor.processes, "set_niceness", found.append)
    begun(monkeypatch, actor, lambda *_, **__: None)
    assert found == [7]


def test_an_agent_that_cannot_begin(monkeypatch, actor):
    """The next report says why, in text that Ray can send: the name of a folder may not be UTF-8."""

    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError("no caf\udce9")

    begun(monkeypatch, actor, fail)
    with pytest.raises(ray_actor.AgentStartError) as raised:
        asyncio.run(actor.next_report())
    assert str(raised.value) == r"FileNotFoundError: no caf\xe9"
    assert raised.value.__context__ is None
    assert asyncio.run(actor.read_result(0, 0)) == b""
    asyncio.run(actor.close())


def test_an_error_of_the_agent_can_be_sent(monkeypatch, actor):
    """An error that Ray cannot encode would be lost, and with it the reason."""

    async def fail(_epoch: int) -> None:
        raise OSError("no caf\udce9")

    session = AgentSession()
    begun(monkeypatch, actor, lambda *_, **__: SimpleNamespace(next_report=fail, session=session))
    with pytest.raises(ray_actor.AgentError, match="no caf") as raised:
        asyncio.run(actor.next_report())
    "".join(traceback.format_exception(raised.value)).encode()


def test_a_driver_of_another_version(monkeypatch, actor):
    """The agent does not start, and says which versions there are."""
    started: list[object] = []
    monkeypatch.setattr(ray_actor.agent, "Agent", lambda *args: started.append(args))
    with monkeypatch.context() as patch:
        patch.setattr(serialization, "version", lambda: "9.9")
        message = serialization.dump_spec(SPEC)
    asyncio.run(actor.begin(message))
    with pytest.raises(ray_actor.AgentVersionError) as raised:
        asyncio.run(actor.next_report())
    ours = serialization.dump_spec(SPEC).partition(b"\n")[0].decode()
    theirs = message.partition(b"\n")[0].decode()
    assert theirs.startswith("raylaunch 9.9 (protocol ")
    assert str(raised.value) == f"its host 127.0.0.1 has {ours}, and the driver has {theirs}"
    assert started == []


def test_an_order_that_cannot_be_read(monkeypatch, actor):
    errors: list[Exception] = []
    session = AgentSession()
    begun(monkeypatch, actor, lambda *_, **__: SimpleNamespace(session=session, handle=None, fail=errors.append))
    asyncio.run(actor.obey(0, b"!garbage"))
    asyncio.run(actor.obey(0, pickle.dumps("stop")))
    assert [type(error) for error in errors] == [serialization.UnreadableError] * 2
    assert str(errors[1]) == "a goal cannot be read: ValidationError: Expected `array`, got `str`"


def test_all_runs_of_a_process_use_one_actor_class():
    """A daemon has many runs, and Ray keeps each class that it was given until it disconnects."""
    assert ray_actor.actor_class() is ray_actor.actor_class()


def test_what_the_dashboard_shows(actor):
    """Node and run. An agent that may serve other runs later has neither, since Ray asks once."""
    assert repr(actor) == "raylaunch: agent"
    spec = replace(SPEC, node="node-2", job=replace(SPEC.job, name="char\nlm"))
    assert ray_actor.title_of(spec) == r"raylaunch: agent node-2 (char\nlm)"
    assert (
        ray_actor.title_of(replace(spec, job=replace(SPEC.job, keep_warm=9.0))) == "raylaunch: agent kept by keep_warm"
    )


# Of a detached run, when the lease of the node expires: in the thread of the lease.


class EndingAgent:
    """An agent whose lease `expire` ends, and which notes the threads in which it is called."""

    def __init__(self, spec: AgentSpec, home: object, client: object = None, *, end: Callable[[], None]) -> None:
        del spec, home, client
        self.session = AgentSession(epoch=1)
        self.expire = end
        self.calls: list[tuple[str, int]] = []

    async def end_node(self) -> None:
        self.calls.append(("end_node", threading.get_ident()))
        self.session.node_ended()

    async def close(self) -> None:
        self.calls.append(("close", threading.get_ident()))


class ProcessEndError(Exception):
    """The process would have ended here."""


@pytest.fixture
def expiring(monkeypatch, actor):
    """Return a coroutine that begins a detached run and returns its agent; what ends the process raises an error."""

    def end_process() -> None:
        raise ProcessEndError

    monkeypatch.setattr(ray_actor, "end_this_process", end_process)
    monkeypatch.setattr(ray_actor.named_resources, "has_driver", lambda _: True)
    agents: list[EndingAgent] = []
    monkeypatch.setattr(
        ray_actor.agent, "Agent", lambda *args, **more: agents.append(EndingAgent(*args, **more)) or agents[0]
    )

    async def begin() -> EndingAgent:
        await actor.begin(serialization.dump_spec(replace(SPEC, job=replace(SPEC.job, driver_timeout=0.0), token="t")))
        return agents[0]

    return begin


def test_an_expired_lease_ends_the_node_in_the_event_loop(expiring):
    """The thread of the lease does not touch what belongs to the loop, which may be in the middle of a call."""

    async def expire() -> list[tuple[str, int]]:
        agent = await expiring()
        with pytest.raises(ProcessEndError):
            await asyncio.to_thread(agent.expire)
        return agent.calls

    assert asyncio.run(expire()) == [("end_node", threading.get_ident())]


def test_an_expired_lease_ends_the_process_whose_loop_does_not_answer(monkeypatch, expiring):
    """As long as the loop hangs in a file system, nobody could get the driver's state from it."""
    monkeypatch.setattr(ray_actor, "_END_SECONDS", 0.1)

    async def expire() -> list[tuple[str, int]]:
        agent = await expiring()

        def lease() -> None:
            with pytest.raises(ProcessEndError) as found:
                agent.expire()
            raised.append(found)

        thread = threading.Thread(target=lease)
        thread.start()
        thread.join()  # this is the loop's thread
        return [*agent.calls]

    raised: list[object] = []
    assert asyncio.run(expire()) == []
    assert len(raised) == 1


def test_the_memory_of_a_node_that_has_ended_is_left_to_the_next_agent(expiring, actor):
    """A driver that has stood still replaces it: what `State` holds is not freed, as where an agent was killed."""

    async def leave() -> list[str]:
        agent = await expiring()
        await agent.end_node()
        with pytest.raises(ProcessEndError):
            await actor.leave(1)
        return [name for name, _ in agent.calls]

    assert asyncio.run(leave()) == ["end_node"]
