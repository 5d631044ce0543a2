"""One step for all, in every order of events: nobody waits for ever, and nobody saves at another step.

The code itself is run, that of the driver, of the nodes and of the workers. Whatever one of them reads or writes of
what another one writes is an event of its own; all orders of such events are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from raylaunch.cluster import proposal
from raylaunch.core.ranks import Member, assign
from raylaunch.node.asking import Asking
from raylaunch.node.messages import Proposed
from raylaunch.node.present import Present
from raylaunch.worker import page, watch
from raylaunch.worker.page import slot
from raylaunch.worker.watch import Watch

SHARED = {page.ASK, page.SETTLED, slot(0) + page.ASKED, slot(1) + page.ASKED}
NODES = ("node-1", "node-2")


class Paused(BaseException):
    """The next event is somebody else's, or there is to be none before time goes on."""


class Numbers:
    """A page for one call that is made again from its beginning: what it has read before it reads again."""

    def __init__(self, values: dict[int, int], before: tuple[int, ...]) -> None:
        self.values = values
        self.before = before
        self.seen: list[int] = []

    def _event(self) -> bool:
        """Whether it happens at present; False: it has."""
        if len(self.seen) > len(self.before):
            raise Paused
        return len(self.seen) == len(self.before)

    def __getitem__(self, field: int) -> int:
        if field not in SHARED:
            return 0
        self.seen.append(self.values.get(field, 0) if self._event() else self.before[len(self.seen)])
        return self.seen[-1]

    def __setitem__(self, field: int, value: int) -> None:
        if field in SHARED:
            if self._event():
                self.values[field] = value
            self.seen.append(value)


@dataclass(frozen=True)
class Rank:
    """`doing`: step, ask, wait (for what is to be settled), save, parked or done."""

    doing: str = "step"
    at: int = 2
    seen: tuple[int, ...] = ()


@dataclass(frozen=True)
class Node:
    """`orders`: those that are under way to it, and the one that it obeys; `seen`: of the page, by that one."""

    shared: tuple[tuple[int, int], ...] = ()
    orders: tuple[tuple[str, int], ...] = ()
    seen: tuple[int, ...] = ()


@dataclass(frozen=True)
class World:
    """`taken`: words that the driver has heard, as soon as they were said, since its orders may take any time.

    None: it has not asked yet.
    """

    ranks: tuple[Rank, ...]
    nodes: tuple[Node, ...]
    taken: tuple[Proposed, ...] | None = None


@dataclass(frozen=True)
class Setting:
    """`homes`: where each rank is; `ahead`: steps that one may be ahead of another, which its collectives allow."""

    homes: tuple[int, ...]
    ahead: int
    step: int
    last: int
    every: int = 1


def put(things: tuple[Any, ...], index: int, thing: Any) -> tuple[Any, ...]:
    return (*things[:index], thing, *things[index + 1 :])


def nexts(world: World, setting: Setting) -> Iterator[World]:
    for index in range(len(world.ranks)):
        yield from of_rank(world, index, setting)
    for index, node in enumerate(world.nodes):
        if node.orders:
            yield of_node(world, index, setting)
    if world.taken is None:
        yield of_driver(world, None, setting)


def of_rank(world: World, index: int, setting: Setting) -> Iterator[World]:
    rank, all_ranks = world.ranks[index], world.ranks
    if rank.doing == "step" and all(other.at >= rank.at - setting.ahead for other in all_ranks):
        asks = rank.at % setting.every == 0
        yield replace(
            world, ranks=put(all_ranks, index, replace(rank, doing="ask") if asks else further(rank, setting))
        )
    elif rank.doing == "save" and all(other.doing in ("save", "parked") for other in all_ranks):
        yield replace(world, ranks=put(all_ranks, index, replace(rank, doing="parked")))
    elif rank.doing in ("ask", "wait"):
        home = setting.homes[index]
        shared = dict(world.nodes[home].shared)
        after = asked(rank, setting.homes[:index].count(home), shared, setting)
        node = replace(world.nodes[home], shared=tuple(sorted(shared.items())))
        yield replace(world, ranks=put(all_ranks, index, after), nodes=put(world.nodes, home, node))


def further(rank: Rank, setting: Setting) -> Rank:
    return Rank("done" if rank.at == setting.last else "step", rank.at + (rank.at < setting.last))


def asked(rank: Rank, local_rank: int, shared: dict[int, int], setting: Setting) -> Rank:
    """`should_checkpoint`, by one event more."""
    numbers = Numbers(shared, rank.seen)
    watching = Watch(numbers, slot(local_rank))  # type: ignore[arg-type]
    call = watching.asks if rank.doing == "ask" else watching._becomes_due
    try:
        yes = call(rank.at)
    except Asleep:
        return replace(rank, doing="wait", seen=())
    except Paused:
        return replace(rank, seen=tuple(numbers.seen))
    return Rank("save", rank.at) if yes else further(rank, setting)


class Asleep(BaseException):
    """It looks again from the beginning."""


def of_node(world: World, index: int, setting: Setting) -> World:
    node = world.nodes[index]
    order, step = node.orders[0]
    numbers = Numbers(dict(node.shared), node.seen)
    asking = Asking(SimpleNamespace(numbers=numbers))  # type: ignore[arg-type]
    reached = None
    try:
        if order == "ask":
            reached = asking.ask(1, step, present(index, setting))
        else:
            asking._attempt = 1
            asking.settle(1, step)
    except Paused:
        after = replace(node, seen=tuple(numbers.seen))
    else:
        after = replace(node, seen=(), orders=node.orders[1:])
    shared = tuple(sorted(numbers.values.items()))
    world = replace(world, nodes=put(world.nodes, index, replace(after, shared=shared)))
    if reached is None:
        return world
    return of_driver(world, Proposed(node=NODES[index], attempt=1, step=step, reached=reached), setting)


def present(index: int, setting: Setting) -> Present:
    local = setting.homes.count(index)
    (part,) = assign(1, [Member(node=NODES[index], address="", nproc=local)])
    return Present(part=part, pids=tuple(range(1, local + 1)))


class Sent:
    """The fleet: orders in the order in which they are given, to each node."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, tuple[str, int]]] = []

    def ask_checkpoint(self, node: str, attempt: int, step: int) -> None:
        self.orders.append((node, ("ask", step)))

    def settle(self, node: str, attempt: int, step: int) -> None:
        self.orders.append((node, ("settle", step)))


def of_driver(world: World, word: Proposed | None, setting: Setting) -> World:
    """It proposes a step, or takes a word; all that it has done before it does again, which nobody hears."""
    sent = Sent()
    names = NODES[: len(world.nodes)]
    driver = proposal.Proposal(sent, 1, names, setting.step)  # type: ignore[arg-type]
    for heard in world.taken or ():
        driver.take(heard)
    taken = world.taken or ()
    if word is not None:
        sent.orders.clear()
        driver.take(word)
        taken = (*taken, word)
    nodes = tuple(
        replace(node, orders=node.orders + tuple(order for to, order in sent.orders if to == name))
        for name, node in zip(names, world.nodes, strict=True)
    )
    return replace(world, nodes=nodes, taken=taken)


def start(setting: Setting) -> World:
    """All have asked once before: else they cannot be asked."""
    nodes = []
    for index in sorted(set(setting.homes)):
        slots = [slot(local_rank) + page.ASKED for local_rank in range(setting.homes.count(index))]
        nodes.append(Node(shared=tuple((field, 1) for field in slots)))
    return World(ranks=tuple(Rank() for _ in setting.homes), nodes=tuple(nodes))


def ends(setting: Setting) -> set[World]:
    """All worlds in which nothing can happen any more."""
    seen, last = {start(setting)}, set()
    to_do = list(seen)
    while to_do:
        world = to_do.pop()
        told = {rank.at for rank in world.ranks if rank.doing in ("save", "parked")}
        assert len(told) <= 1, world
        following = set(nexts(world, setting)) - {world}
        if not following:
            last.add(world)
        to_do.extend(following - seen)
        seen |= following
    return last


@pytest.fixture(autouse=True)
def _time_does_not_pass(monkeypatch):
    """Whoever sleeps looks again as soon as anything has happened."""

    def sleep(_seconds: float) -> None:
        raise Asleep

    monkeypatch.setattr(watch, "sleep", sleep)
    monkeypatch.setattr(watch, "monotonic_ns", count().__next__)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(homes=(0, 1), ahead=0, step=2, last=3),
        Setting(homes=(0, 0), ahead=1, step=3, every=2, last=6),
    ],
    ids=lambda setting: f"ranks on {setting.homes}, {setting.ahead} ahead, step {setting.step}",
)
def test_all_save_at_one_step_or_none_does(setting):
    """Where the driver asks too late for any step that is left, all come to their end."""
    last = ends(setting)
    for world in last:
        assert len({(rank.doing, rank.at) for rank in world.ranks}) == 1, world
    assert {world.ranks[0].doing for world in last} == {"parked", "done"}
