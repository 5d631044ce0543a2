"""The agent as an actor, in a process without Ray."""

from __future__ import annotations

import asyncio
import functools
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from raylaunch.cluster.agent import ray_actor, serialization
from raylaunch.cluster.agent.agent_session import AgentSession
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.node.protocol.node_goal import NodeGoal, OpenStore, Order, StopWorkers
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


works = [True]
"""Whether fork servers do."""


def agent_of_a_run(spec: AgentSpec, handle: Callable[[OpenStore], None] = pytest.fail) -> SimpleNamespace:
    """Return an agent whose fork server can be used again."""

    async def become_idle(_seconds: float) -> SimpleNamespace:
        return SimpleNamespace(activate=lambda: works[0], close=lambda: None)

    session = AgentSession(spec.epoch)
    return SimpleNamespace(
        session=session, handle=handle, fail=pytest.fail, become_idle=become_idle, retire=lambda: None
    )


@pytest.fixture
def idle(monkeypatch, actor) -> tuple[ray_actor.AgentActor, threading.Event]:
    """An idle actor, and an event that is set when its process would end."""
    monkeypatch.setitem(globals(), "works", [True])
    begun(monkeypatch, actor, lambda spec, *_, **__: agent_of_a_run(spec))
    assert asyncio.run(actor.become_idle(9.0))
    ended = threading.Event()
    monkeypatch.setattr(ray_actor, "end_this_process", ended.set)
    return actor, ended


def asked(actor: ray_actor.AgentActor, spec: AgentSpec) -> bool:
    """Ask it to serve a run, and wait until it has ended if it does not."""

    async def work() -> bool:
        is_taken = await actor.reuse(serialization.dump_spec(spec))
        await asyncio.gather(*filter(None, [actor.ending]))
        return is_taken

    return asyncio.run(work())


def test_the_first_of_two_runs_gets_an_idle_agent(idle):
    """Who asks an agent that serves a run does not disturb that run, and does not end the agent."""
    actor, ended = idle
    assert asked(actor, replace(SPEC, epoch=2))
    assert not asked(actor, replace(SPEC, epoch=3))
    assert not asyncio.run(actor.end_if_idle())
    assert not ended.is_set()


@pytest.mark.parametrize("reason", ["key", "code", "version", "fork server", "folder"])
def test_an_idle_agent_that_cannot_serve_a_run_ends(monkeypatch, idle, reason):
    """A run of another kind, changed files, another raylaunch at the driver, and what is gone."""
    actor, ended = idle
    spec = replace(SPEC, epoch=2)
    match reason:
        case "key":
            spec = replace(spec, submitter_env={"A": "1"})
        case "code":
            monkeypatch.setattr(ray_actor.staleness, "changed_since", lambda began: began <= time.time())
        case "version":
            monkeypatch.setattr(serialization, "_first_line", lambda: b"raylaunch 0\n")
            message = serialization.dump_spec(spec)
            monkeypatch.undo()
            monkeypatch.setattr(ray_actor, "end_this_process", ended.set)
            monkeypatch.setattr(serialization, "dump_spec", lambda _: message)
        case "fork server":
            works[0] = False
        case "folder":
            monkeypatch.setattr(ray_actor.agent, "Agent", lambda *_: Path("/nowhere").stat())
    assert not asked(actor, spec)
    assert ended.is_set()


def test_a_person_ends_an_idle_agent(idle):
    actor, ended = idle

    async def work() -> bool:
        is_idle = await actor.end_if_idle()
        await actor.ending
        return is_idle

    assert asyncio.run(work())
    assert ended.is_set()


@pytest.mark.parametrize("begins", [False, True])
def test_an_agent_whose_driver_dies_before_it_begins(monkeypatch, actor, begins):
    """It would outlive the driver. It ends by itself; one that has begun has a lease."""
    ended = threading.Event()
    monkeypatch.setattr(ray_actor, "end_this_process", ended.set)
    alone = ray_actor.AgentActor("", 0.3)
    if begins:
        begun(monkeypatch, alone, lambda *_, **__: None)
    assert ended.wait(0.6 if begins else 100) != begins


def test_an_order_of_the_run_before(monkeypatch, actor):
    """Ray may start its call when the agent is idle or used again. It is not taken for an order of this run."""
    carried_out: list[tuple[int, int]] = []

    def make(spec: AgentSpec, *_: object, **__: object) -> SimpleNamespace:
        def handle(order: OpenStore) -> None:
            carried_out.append((spec.epoch, order.attempt))

        return agent_of_a_run(spec, handle)

    def obey(epoch: int, *attempts: int) -> None:
        asyncio.run(actor.obey(epoch, goal(*(OpenStore(attempt=attempt) for attempt in attempts))))

    begun(monkeypatch, actor, make)
    obey(1, 11)
    assert asyncio.run(actor.become_idle(9.0))
    obey(1, 11, 12)
    assert asyncio.run(actor.reuse(serialization.dump_spec(replace(SPEC, epoch=2))))
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
    """A program may have many, and Ray keeps each class that it was given until it disconnects."""
    assert ray_actor.actor_class() is ray_actor.actor_class()


def test_what_the_dashboard_shows(actor):
    """Node and run. An agent that may serve other runs later has neither, since Ray asks once."""
    assert repr(actor) == "raylaunch: agent"
    spec = replace(SPEC, node="node-2", job=replace(SPEC.job, name="char\nlm"))
    kept = replace(spec, job=replace(SPEC.job, keep_warm=9.0))
    assert ray_actor.creation_arguments(spec)[0] == r"raylaunch: agent node-2 (char\nlm)"
    assert ray_actor.creation_arguments(kept)[0] == "raylaunch: agent kept by keep_warm"


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


def test_the_memory_of_a_node_that_leaves_is_left_to_the_next_agent(expiring, actor):
    """What `State` holds is not freed, as where an agent was killed."""

    async def leave() -> list[tuple[str, int]]:
        agent = await expiring()
        with pytest.raises(ProcessEndError):
            await actor.leave(1)
        return agent.calls

    assert asyncio.run(leave()) == []
