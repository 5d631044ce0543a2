"""Messages between driver and agents in any form, order and number, and strangers at the ports: nothing of ours fails.

A message is damaged, or has fields of other types: it is refused. All types are right, but not the values: whoever gets
it may lose the node, and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.cluster.agent import lease, ray_actor, serialization
from raylaunch.cluster.agent.agent import AgentReport, Home
from raylaunch.cluster.agent.link import LinkServer
from raylaunch.cluster.agent.serialization import UnreadableError, VersionMismatchError
from raylaunch.cluster.driver.driver import Driver
from raylaunch.cluster.fleet_api import ReportReceived
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.monitoring.heartbeat import Heartbeat
from raylaunch.errors import ClusterError
from raylaunch.node.logs.tail import LogOutput
from raylaunch.node.protocol.node_goal import LaunchWorkers, NodeGoal, Order
from raylaunch.node.protocol.node_spec import AgentSpec
from raylaunch.node.protocol.node_status import NodeStatus, StacksDumped
from tests import profiles
from tests.cluster.agent.test_ray_actor import SPEC
from tests.fakes import FakeFleet, RunRecorder

integers = st.integers(-2, 3) | st.sampled_from([10**9, -(10**9), 2**70])
texts = st.sampled_from(["", "node-1", "node-2", "\x1b", "\udce9", "SIGTERM", "127.0.0.1"]) | st.text(max_size=5)
numbers = st.floats(0.0, 9.0) | st.sampled_from([float("nan"), float("inf"), -1.0, 1e300])
anything = st.none() | integers | texts | numbers | st.binary(max_size=3) | st.just([]) | st.just({}) | st.just(len)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for values of a type, also for a union of messages."""
    if get_args(kind) and not hasattr(kind, "__supertype__") and type(None) not in get_args(kind):
        return st.one_of([values(each) for each in get_args(kind)]) if _is_union(kind) else st.from_type(kind)
    return st.from_type(kind)


def _is_union(kind: Any) -> bool:
    return type(kind) is type(int | str)


@pytest.fixture(autouse=True, scope="module")
def odd_values() -> None:
    """Draw small and odd values for fields."""
    for kind, strategy in ((int, integers), (str, texts), (float, numbers)):
        st.register_type_strategy(kind, strategy)


orders = st.deferred(lambda: values(Order))
goals = st.lists(orders, max_size=3).map(lambda several: functools.reduce(NodeGoal.after, several, NodeGoal()))
reports = st.deferred(
    lambda: st.builds(
        AgentReport,
        sent_at=numbers,
        status=st.none() | values(NodeStatus),
        stacks=st.lists(values(StacksDumped), max_size=1),
        output=st.lists(st.builds(LogOutput, stream=st.sampled_from(["stdout", "stderr"])), max_size=1),
        heartbeat=st.none() | values(Heartbeat),
    )
)
"""Each way to damage a message: at a place, with these bytes."""
damages = st.tuples(
    st.sampled_from(["truncate", "insert", "overwrite", "remove"]), st.integers(0, 2000), st.binary(min_size=1)
)


def damaged(message: bytes, damage: tuple[str, int, bytes]) -> bytes:
    way, at, data = damage
    at %= len(message) + 1
    match way:
        case "truncate":
            return message[:at]
        case "insert":
            return message[:at] + data + message[at:]
        case "remove":
            return message[:at] + message[at + len(data) :]
        case _:
            return message[:at] + data + message[at + len(data) :]


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Let no pickle take more than half a gigabyte: a damaged one may ask for a list of any length."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def dump_order(order: Order) -> bytes:
    """Return a goal that has only this order, as bytes."""
    return serialization.dump_goal(NodeGoal(generation=1, orders=((1, order),)))


KINDS = {
    "spec": (st.just(SPEC), serialization.dump_spec, serialization.load_spec, AgentSpec),
    "goal": (goals, serialization.dump_goal, serialization.load_goal, NodeGoal),
    "order": (orders, dump_order, serialization.load_goal, NodeGoal),
    "report": (reports, serialization.dump_report, serialization.load_report, AgentReport),
}


def is_right(value: Any, hint: Any) -> bool:
    """Return whether a field of this type may have the value. A list will do for a tuple."""
    try:
        msgspec.convert(msgspec.to_builtins(value, builtin_types=(bytes,)), hint)
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
@profiles.examples(100)
@given(data=st.data())
def test_a_damaged_message_is_refused_or_is_still_one(kind, data):
    drawn, dump, load, hint = KINDS[kind]
    message = dump(data.draw(drawn))
    assert isinstance(load(message), hint)
    for damage in data.draw(st.lists(damages, min_size=1, max_size=3)):
        message = damaged(message, damage)
    with little_memory(), contextlib.suppress(UnreadableError, VersionMismatchError):
        assert isinstance(load(message), hint)


@pytest.mark.parametrize("kind", ["spec", "order", "report"])
@profiles.examples(60)
@given(data=st.data())
def test_a_message_with_a_field_of_another_type_is_refused(kind, data):
    drawn, dump, load, _ = KINDS[kind]
    message = data.draw(drawn.filter(fields))
    name = data.draw(st.sampled_from([field.name for field in fields(message)]))
    wrong = data.draw(anything.filter(lambda value: not is_right(value, get_type_hints(type(message))[name])))
    with pytest.raises((UnreadableError, TypeError)):  # TypeError: of who writes a function
        load(dump(replace(message, **{name: wrong})))


@profiles.examples(60)
@given(st.lists(st.tuples(st.sampled_from(["node-1", "node-2", "node-9"]), reports), max_size=6), st.booleans())
def test_a_driver_that_is_told_anything(told, is_late):
    """In any order. It ends as people tell it to, or says that the cluster is of no use."""
    fleet = FakeFleet(2)
    recorder = RunRecorder()
    job = Job(entrypoint=Entrypoint(script="train.py"), nnodes="1:2", max_restarts=2, join_timeout=0.1)
    driver = Driver(job, "run", fleet, recorder, recorder, time.monotonic())

    def tell() -> None:
        for node, report in told:
            fleet.tell(ReportReceived(node=node, report=report, at=time.monotonic()))
        driver.signalled("SIGINT")
        driver.signalled("SIGINT")

    if is_late:
        fleet.on_launched[1] = tell
    else:
        start = fleet.start
        fleet.start = lambda tell_driver: (start(tell_driver), tell())
    with contextlib.suppress(ClusterError):
        assert driver.run().exit_code in (0, 1, 3, 130)


@pytest.mark.skipif(not profiles.is_fuzzing(), reason="each case takes a second; `make fuzz` draws some")
@profiles.examples(4)
@given(st.lists(orders | st.binary(max_size=9), min_size=1, max_size=6))
def test_an_agent_that_is_told_anything(messages):
    """It goes on, or says what is wrong; and in the end nothing of it is left."""
    home = Home(host="a", address="127.0.0.1", environ=dict(os.environ))
    with pytest.MonkeyPatch.context() as patch, stderr() as written, tempfile.TemporaryDirectory() as folder:
        patch.setattr(ray_actor, "_home", lambda: home)  # to ask Ray would start a cluster
        patch.setattr(ray_actor.processes, "set_niceness", lambda _: None)
        patch.setattr(ray_actor, "end_this_process", lambda: None)  # when the lease is over, after `close`
        patch.setattr(lease, "_CLOSE_SECONDS", 1.0)
        try:
            asyncio.run(asyncio.wait_for(tell_agent(messages, folder), 200))
        finally:
            for thread in threading.enumerate():
                if thread.name == "raylaunch-lease":
                    thread.join(100)
        assert "Traceback" not in written(), written()


@contextlib.contextmanager
def stderr() -> Iterator[Callable[[], str]]:
    """Give a function that returns what this process and those that it starts write to stderr."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: (file.seek(0), file.read().decode(errors="replace"))[1]
        finally:
            os.dup2(before, 2)
            os.close(before)


async def tell_agent(messages: list[Order | bytes], folder: str) -> None:
    def print_error(_: object, context: dict[str, Any]) -> None:
        os.write(2, f"Traceback of a task: {context!r}\n".encode(errors="backslashreplace"))

    asyncio.get_running_loop().set_exception_handler(print_error)
    actor = ray_actor.AgentActor()
    job = replace(SPEC.job, node_timeout=1000.0)
    await actor.begin(serialization.dump_spec(replace(SPEC, job=job, run_dir=folder)))
    try:
        serialization.load_report(await actor.next_report(SPEC.epoch))
        goal = NodeGoal()
        for order in messages:
            if isinstance(order, bytes):
                await actor.obey(SPEC.epoch, order)
            elif not isinstance(order, LaunchWorkers) or -1 < order.assignment.nproc < 4:
                goal = goal.after(order)
                await actor.obey(SPEC.epoch, serialization.dump_goal(goal))
            with contextlib.suppress(ray_actor.AgentError, TimeoutError):
                serialization.load_report(await asyncio.wait_for(actor.next_report(SPEC.epoch), 0.3))
    finally:
        await actor.close()


packets = st.lists(st.binary(max_size=300) | st.just(b"secret node-3\n"), max_size=4)


@profiles.examples(25)
@given(st.lists(st.tuples(packets, st.booleans()), max_size=6))
def test_strangers_at_the_link_port(strangers):
    """Whatever they send, in whatever pieces, an agent is admitted after them."""
    with contextlib.ExitStack() as stack:
        server = LinkServer("127.0.0.1")
        stack.callback(server.close)
        server.start(lambda _: None)
        place = (server.address.host, server.address.port)
        for parts, stays in strangers:
            stranger = stack.enter_context(socket.create_connection(place, timeout=100))
            with contextlib.suppress(ConnectionError):
                for part in parts:
                    stranger.sendall(part.replace(b"secret", server.address.secret[:-1].encode()))
            if not stays:
                stranger.close()
        admitted = stack.enter_context(socket.create_connection(place, timeout=100))
        admitted.sendall(f"{server.address.secret} node-1\n".encode())
        assert admitted.recv(1) == b"+"
        assert not server.is_up("node-3")
