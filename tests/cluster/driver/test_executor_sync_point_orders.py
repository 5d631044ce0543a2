"""A sync point in every order of events: no worker waits forever, and none saves at another step.

The code of driver, nodes and workers itself is run. Each read or write of a field that another of them writes is an
event of its own, and all orders of these events are tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from raylaunch.cluster.driver import executor
from raylaunch.core.placement.environment import Member, assign
from raylaunch.node.protocol.node_goal import Order, ProposeCheckpoint
from raylaunch.node.protocol.node_status import StepProposed
from raylaunch.node.supervisor.attempt_state import AttemptState
from raylaunch.node.supervisor.supervisor import CheckpointPoll
from raylaunch.worker.heartbeats import heartbeat_writer, shared_page
from raylaunch.worker.heartbeats.heartbeat_writer import HeartbeatWriter
from raylaunch.worker.heartbeats.shared_page import slot_offset

SHARED = {
    shared_page.PROPOSED_STEP,
    shared_page.COMMITTED_STEP,
    slot_offset(0) + shared_page.POLLED_STEP,
    slot_offset(1) + shared_page.POLLED_STEP,
}
NODES = ("node-1", "node-2")


class Pause(BaseException):
    """The call is at its next event, which may come before or after events of others."""


class ReplayedPage:
    """The shared page for a call that is repeated from its start.

    It replays what the call has read before, and then lets it read or write once.
    """

    def __init__(self, values: dict[int, int], before: tuple[int, ...]) -> None:
        self.values = values
        self.before = before
        self.seen: list[int] = []

    def _is_next_event(self) -> bool:
        """Whether this access is the next event; False: it is replayed. Raises Pause after the event."""
        if len(self.seen) > len(self.before):
            raise Pause
        return len(self.seen) == len(self.before)

    def __getitem__(self, field: int) -> int:
        if field not in SHARED:
            return 0
        self.seen.append(self.values.get(field, 0) if self._is_next_event() else self.before[len(self.seen)])
        return self.seen[-1]

    def __setitem__(self, field: int, value: int) -> None:
        if field in SHARED:
            if self._is_next_event():
                self.values[field] = value
            self.seen.append(value)


@dataclass(frozen=True)
class Rank:
    """`doing`: step, poll, wait (for a commit), save, parked, done, or gone, when its node knows of its end.

    `seen`: what its current call has read.
    """

    doing: str = "step"
    at: int = 2
    seen: tuple[int, ...] = ()


@dataclass(frozen=True)
class Node:
    """`orders`: those that it has not carried out; `seen`: what the first of them has read from the page."""

    shared: tuple[tuple[int, int], ...] = ()
    orders: tuple[Order, ...] = ()
    seen: tuple[int, ...] = ()


@dataclass(frozen=True)
class World:
    """`answers`: those that the driver has handled, in order; None: it has not proposed a step yet."""

    ranks: tuple[Rank, ...]
    nodes: tuple[Node, ...]
    answers: tuple[StepProposed, ...] | None = None


@dataclass(frozen=True)
class Setting:
    """`homes`: the node of each rank; `ahead`: how many steps a rank may be ahead of another.

    Its collectives limit that. `step`: the proposed one; `last`: the last of the training; `every`: how often it polls.
    """

    homes: tuple[int, ...]
    ahead: int
    step: int
    last: int
    every: int = 1


def put(things: tuple[Any, ...], index: int, thing: Any) -> tuple[Any, ...]:
    return (*things[:index], thing, *things[index + 1 :])


def successors(world: World, setting: Setting) -> Iterator[World]:
    """Yield the states that one event leads to."""
    for index in range(len(world.ranks)):
        yield from rank_event(world, index, setting)
    for index, node in enumerate(world.nodes):
        if node.orders:
            yield node_event(world, index, setting)
    if world.answers is None:
        yield driver_event(world, None, setting)


def rank_event(world: World, index: int, setting: Setting) -> Iterator[World]:
    rank, all_ranks = world.ranks[index], world.ranks
    if rank.doing == "step" and all(other.at >= rank.at - setting.ahead for other in all_ranks):
        polls = rank.at % setting.every == 0
        yield replace(
            world, ranks=put(all_ranks, index, replace(rank, doing="poll") if polls else next_step(rank, setting))
        )
    elif rank.doing == "save" and all(other.doing in ("save", "parked") for other in all_ranks):
        yield replace(world, ranks=put(all_ranks, index, replace(rank, doing="parked")))
    elif rank.doing == "done" and not world.nodes[setting.homes[index]].seen:
        yield replace(world, ranks=put(all_ranks, index, replace(rank, doing="gone")))
    elif rank.doing in ("poll", "wait"):
        home = setting.homes[index]
        shared = dict(world.nodes[home].shared)
        after = poll_event(rank, setting.homes[:index].count(home), shared, setting)
        node = replace(world.nodes[home], shared=tuple(sorted(shared.items())))
        yield replace(world, ranks=put(all_ranks, index, after), nodes=put(world.nodes, home, node))


def next_step(rank: Rank, setting: Setting) -> Rank:
    return Rank("done" if rank.at == setting.last else "step", rank.at + (rank.at < setting.last))


def poll_event(rank: Rank, local_rank: int, shared: dict[int, int], setting: Setting) -> Rank:
    """Do one more event of `should_checkpoint`."""
    numbers = ReplayedPage(shared, rank.seen)
    writer = HeartbeatWriter(numbers, slot_offset(local_rank))  # type: ignore[arg-type]
    call = writer.should_save if rank.doing == "poll" else writer.await_commit
    try:
        saves = call(rank.at)
    except Sleep:
        return replace(rank, doing="wait", seen=())
    except Pause:
        return replace(rank, seen=tuple(numbers.seen))
    return Rank("save", rank.at) if saves else next_step(rank, setting)


class Sleep(BaseException):
    """The call sleeps, and will start again from its beginning."""


def node_event(world: World, index: int, setting: Setting) -> World:
    node = world.nodes[index]
    order = node.orders[0]
    numbers = ReplayedPage(dict(node.shared), node.seen)
    poll = CheckpointPoll(SimpleNamespace(numbers=numbers))  # type: ignore[arg-type]
    reached = None
    try:
        if isinstance(order, ProposeCheckpoint):
            reached = poll.propose(order, attempt_state(world, index, setting))
        else:
            poll.attempt = 1
            poll.commit(order)
    except Pause:
        after = replace(node, seen=tuple(numbers.seen))
    else:
        after = replace(node, seen=(), orders=node.orders[1:])
    shared = tuple(sorted(numbers.values.items()))
    world = replace(world, nodes=put(world.nodes, index, replace(after, shared=shared)))
    if reached is None:
        return world
    return driver_event(world, StepProposed(node=NODES[index], attempt=1, step=order.step, reached=reached), setting)


def attempt_state(world: World, index: int, setting: Setting) -> AttemptState:
    own = [rank for rank, home in zip(world.ranks, setting.homes, strict=True) if home == index]
    (part,) = assign(1, [Member(node=NODES[index], address="", nproc=len(own))])
    ends = {rank: 0 for rank, known in enumerate(own) if known.doing == "gone"}
    state = AttemptState(assignment=part, pids=tuple(range(1, len(own) + 1)), ends=ends)
    state.take_finished()
    return state


class RecordingFleet:
    """Records orders in the order in which they are sent."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, Order]] = []

    def send(self, node: str, order: Order) -> None:
        self.orders.append((node, order))


def driver_event(world: World, answer: StepProposed | None, setting: Setting) -> World:
    """Propose a step, or handle an answer. The driver's earlier events are replayed, and their orders dropped."""
    sent = RecordingFleet()
    names = NODES[: len(world.nodes)]
    driver = executor.SyncPoint(sent.send, names, ProposeCheckpoint(attempt=1, step=setting.step))  # type: ignore[arg-type]
    for earlier in world.answers or ():
        driver.answered(earlier)
    answers = world.answers or ()
    if answer is not None:
        sent.orders.clear()
        driver.answered(answer)
        answers = (*answers, answer)
    nodes = tuple(
        replace(node, orders=node.orders + tuple(order for to, order in sent.orders if to == name))
        for name, node in zip(names, world.nodes, strict=True)
    )
    return replace(world, nodes=nodes, answers=answers)


def initial_world(setting: Setting) -> World:
    """All ranks have polled once before, without which no step is proposed."""
    nodes = []
    for index in sorted(set(setting.homes)):
        slots = [slot_offset(local_rank) + shared_page.POLLED_STEP for local_rank in range(setting.homes.count(index))]
        nodes.append(Node(shared=tuple((field, 1) for field in slots)))
    return World(ranks=tuple(Rank() for _ in setting.homes), nodes=tuple(nodes))


def final_worlds(setting: Setting) -> set[World]:
    """Return all states in which nothing more can happen. From every state one of them can be reached."""
    first = initial_world(setting)
    numbers, worlds, before, final = {first: 0}, [first], defaultdict(list), set()
    for number, world in enumerate(worlds):  # which grows
        steps = {rank.at for rank in world.ranks if rank.doing in ("save", "parked")}
        assert len(steps) <= 1, world
        following = {numbers.setdefault(after, len(numbers)): after for after in successors(world, setting)}
        worlds += [after for found, after in sorted(following.items()) if found >= len(worlds)]
        for after in following.keys() - {number}:
            before[after].append(number)
        if not following.keys() - {number}:
            final.add(number)
    to_do = list(final)
    while to_do:
        to_do += before.pop(to_do.pop(), ())
    assert not before, f"a rank waits forever: {worlds[max(before)]}"
    return {worlds[number] for number in final}


@pytest.fixture(autouse=True)
def _sleep_returns_at_the_next_event(monkeypatch):
    """A call that sleeps starts again when anything has happened."""

    def sleep(_seconds: float) -> None:
        raise Sleep

    monkeypatch.setattr(heartbeat_writer, "sleep", sleep)
    monkeypatch.setattr(heartbeat_writer, "monotonic_ns", count().__next__)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(homes=(0, 1), ahead=0, step=2, last=3),
        Setting(homes=(0, 0), ahead=1, step=3, every=2, last=6),
    ],
    ids=lambda setting: f"ranks on {setting.homes}, {setting.ahead} ahead, step {setting.step}",
)
def test_all_save_at_one_step_or_none_does(setting):
    """If the driver proposes a step too late for any that is left, all ranks come to their end."""
    final = final_worlds(setting)
    for world in final:
        assert len({(rank.doing, rank.at) for rank in world.ranks}) == 1, world
    assert {world.ranks[0].doing for world in final} == {"parked", "gone"}
