"""What holds whatever happens.

Scripts of disasters are generated, told to a machine, and each claim is checked at every step: what must never happen
(safety). Then a world of obedient and of silent nodes carries the orders out: what must happen in the end (liveness).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import World
from story import (
    WAITING,
    asked,
    begun,
    check,
    checkpointed,
    draining,
    failed,
    finished,
    forward,
    hung,
    job,
    joined,
    lost,
    progressed,
    raised,
    started,
    stopped,
    tick,
)

from raylaunch.core import journal
from raylaunch.core.actions import Action, AskCheckpoint, Finish, Forward, Launch, Readmit, Release, Shun, Stop, WakeAt
from raylaunch.core.events import (
    Event,
    ForwardAsked,
    NodeDraining,
    NodeJoined,
    NodeLost,
    StopAsked,
    Tick,
    WorkerEvent,
    WorkersCheckpointed,
    WorkersExited,
)
from raylaunch.core.job import Job
from raylaunch.core.machine import Machine
from raylaunch.core.phases import STOP_MARGIN, Phase

FIXED = settings(derandomize=True, deadline=None, database=None)
"""The same examples each time: what fails here fails everywhere."""

HOW_WORKERS_FAIL: tuple[dict[str, Any], ...] = (
    {},
    {"rank": 2},
    raised("ValueError", "loss is NaN"),
    raised("RuntimeError", "Connection reset by peer"),
    raised("ImportError", "no module named x"),
    {"exit_code": -15, "stopped": True},
)

jobs = st.builds(
    lambda low, more, **others: job(f"{low}:{low + more}", **others),
    low=st.integers(1, 3),
    more=st.integers(0, 2),
    max_restarts=st.integers(0, 4),
    last_call=st.sampled_from((5.0, 0.0, 400.0)),
    join_timeout=st.sampled_from((600.0, 3.0)),
    shutdown_timeout=st.sampled_from((30.0, 0.0)),
    multiple_of=st.sampled_from((1, 1, 1, 4)),
    exclude_after=st.sampled_from((3, 1, 2, 0)),
)


# Scripts: moves that mean something at every state of a machine.

MOVES = {
    "answer": 8,
    "join": 4,
    "fail": 3,
    "tick": 3,
    "finish": 1,
    "start": 1,
    "stop": 1,
    "save": 1,
    "lose": 2,
    "drain": 1,
    "hang": 1,
    "progress": 1,
    "late tick": 1,
    "ask": 1,
}
"""What may come next, and how often. An answer is what the machine waits for."""

moves = st.sampled_from(
    [
        (move, which, pause)
        for move, often in MOVES.items()
        for which in range(9)
        for pause in (0.1, 0.0, 4.0, 40.0)
        for _ in range(often)
    ]
)
Script = list[tuple[str, int, float]]
scripts = st.builds(
    lambda opening, more: [("join", 0, 0.1)] * opening + more,
    opening=st.integers(0, 5),
    more=st.lists(moves, max_size=40) | st.lists(moves, min_size=25, max_size=40),
)


@dataclass(frozen=True)
class Step:
    """One event, what was ordered, and the machine before and after. `usable` is known from the events alone."""

    event: Event
    actions: list[Action]
    before: dict[str, Any]
    after: dict[str, Any]
    usable: set[str]
    hosts: dict[str, str]
    """Of all nodes that ever joined."""


def play(of: Job, script: Script) -> list[Step]:
    """Tell the machine the script's events, up to three beyond its end."""
    machine = begun(of)
    fresh = snapshot(machine)
    names = iter(f"node-{number}" for number in range(1, 100))
    usable: set[str] = set()
    hosts: dict[str, str] = {}
    steps: list[Step] = []
    for move, which, pause in script:
        if len(steps) > 3 and steps[-3].before["phase"] is Phase.DONE:
            break
        event = _event(machine, move, which, machine.now + pause, names)
        if event is None:
            continue
        match event:
            case NodeJoined():
                usable.add(event.node)
                hosts[event.node] = event.host
            case NodeLost() | NodeDraining():
                usable.discard(event.node)
        actions = machine.handle(event)
        check(machine)
        usable -= {action.node for action in actions if isinstance(action, Release)}
        before = steps[-1].after if steps else fresh
        steps.append(Step(event, actions, before, snapshot(machine), set(usable), hosts))
    return steps


def _event(machine: Machine, move: str, which: int, at: float, names: Iterator[str]) -> Event | None:
    here = list(machine.nodes)
    match move:
        case "ask":
            return asked("SIGINT", at) if which < 3 else forward(f"SIGUSR{1 + which % 2}", at)
        case "tick":
            return tick(machine.last_call or at)
        case "late tick":
            return tick((machine.deadline or at) + 1) if which < 5 else tick(machine.deadline or at)
        case "join":
            return (
                joined(next(names), at, address=f"10.0.0.{10 - which}", host=f"h{which % 4}") if len(here) < 6 else None
            )
        case "lose":
            return lost(here[which % len(here)], at) if here else None
        case "drain":
            return draining(here[which % len(here)], at, deadline=at + (10, 100, 0)[which % 3]) if here else None
    return _word(machine, move, which, at)


def _word(machine: Machine, move: str, which: int, at: float) -> Event | None:
    """What a node of the roster says; now and then, of the attempt before."""
    nodes = sorted(machine.awaited) or machine.roster
    if not nodes:
        return None
    node, attempt = nodes[which % len(nodes)], machine.attempt - (which == 8)
    if move == "fail":
        return failed(node, at, attempt=attempt, **HOW_WORKERS_FAIL[which % len(HOW_WORKERS_FAIL)])
    if move == "hang":
        return hung(node, at, attempt=attempt, **HOW_WORKERS_FAIL[which % 2])
    if move == "progress":
        return progressed(at, attempt=attempt)
    if move == "save" or (move == "answer" and machine.asking):
        return checkpointed(node, at, attempt=attempt, step=None if which % 3 == 0 else 7)
    if move == "answer":
        move = {Phase.STARTING: "start", Phase.STOPPING: "stop"}.get(machine.phase, "start")
    return {"start": started, "finish": finished, "stop": stopped}[move](node, at, attempt=attempt)


def snapshot(machine: Machine) -> dict[str, Any]:
    """All that the machine knows."""
    kept = {name: copy.deepcopy(vars(getattr(machine, name))) for name in ("members", "health", "budget", "crashes")}
    own = {name: copy.copy(value) if isinstance(value, set | list) else value for name, value in vars(machine).items()}
    return own | kept | {"nodes": dict(machine.nodes), "restarts": machine.restarts}


def orders(steps: Sequence[Step], kind: type[Any]) -> list[Any]:
    return [action for step in steps for action in step.actions if isinstance(action, kind)]


# Claims.


def attempts_have_no_gaps(of: Job, steps: Sequence[Step]) -> None:
    """Attempts count 1, 2, 3."""
    attempts = [order.attempt for order in orders(steps, Launch)]
    assert attempts == list(range(1, len(attempts) + 1))


def rosters_are_good(of: Job, steps: Sequence[Step]) -> None:
    """A roster has MIN to MAX nodes, each once, all there and none of them draining."""
    for step in steps:
        for order in orders([step], Launch):
            assert of.min_nodes <= len(order.roster) <= of.max_nodes
            assert len(set(order.roster)) == len(order.roster)
            assert set(order.roster) <= step.usable
            assert step.after["workers"] == 2 * len(order.roster)
            assert step.after["workers"] % of.multiple_of == 0


def survivors_keep_their_order(of: Job, steps: Sequence[Step]) -> None:
    """Nodes of two attempts in a row have the same order in both, and come before newcomers."""
    for before, after in pairwise(orders(steps, Launch)):
        both = [node for node in before.roster if node in after.roster]
        assert list(after.roster[: len(both)]) == both


def every_attempt_is_ended_once_for_the_next(of: Job, steps: Sequence[Step]) -> None:
    """Between two launches there is a Stop of the first; and a Stop names only nodes that had a part in it."""
    rosters: dict[int, tuple[str, ...]] = {}
    ended = set()
    for order in (action for step in steps for action in step.actions):
        match order:
            case Stop():
                assert set(order.nodes) <= set(rosters[order.attempt])
                ended.add(order.attempt)
            case AskCheckpoint():
                assert order.attempt not in ended
                assert order.attempt == max(rosters)
                assert set(order.nodes) <= set(rosters[order.attempt])
            case Launch():
                assert order.attempt == 1 or order.attempt - 1 in ended
                rosters[order.attempt] = order.roster


def forwarding_changes_nothing(of: Job, steps: Sequence[Step]) -> None:
    """A signal to forward leaves the machine as it was, but for being held while workers start."""
    for step in steps:
        if isinstance(step.event, ForwardAsked):
            assert step.after | {"now": 0.0, "held": []} == step.before | {"now": 0.0, "held": []}
            assert all(isinstance(action, Forward) for action in step.actions)
            assert step.after["held"] == step.before["held"] or step.before["phase"] is Phase.STARTING


def signals_reach_whole_worlds(of: Job, steps: Sequence[Step]) -> None:
    """Those that are forwarded go to nodes that run workers; those that come while they start wait for all of them."""
    waiting: set[str] = set()
    for step in steps:
        forwarded = orders([step], Forward)
        assert all(step.after["phase"] is Phase.RUNNING for _ in forwarded)
        assert all(set(order.nodes) <= set(step.before["nodes"]) for order in forwarded)
        if isinstance(step.event, ForwardAsked) and step.before["phase"] is Phase.STARTING:
            waiting.add(step.event.signal)
        elif step.before["phase"] is Phase.STARTING and step.after["phase"] is Phase.RUNNING:
            assert sorted(order.signal for order in forwarded) == sorted(waiting)
            waiting.clear()


def the_end_is_the_end(of: Job, steps: Sequence[Step]) -> None:
    """At most one Finish, and nothing ordered after it."""
    flat = [action for step in steps for action in step.actions]
    ends = [index for index, action in enumerate(flat) if isinstance(action, Finish)]
    assert ends in ([], [len(flat) - 1])


def done_is_finished(of: Job, steps: Sequence[Step]) -> None:
    """DONE comes with Finish, and not otherwise."""
    assert bool(orders(steps, Finish)) == (bool(steps) and steps[-1].after["phase"] is Phase.DONE)


def restarts_stay_in_the_budget(of: Job, steps: Sequence[Step]) -> None:
    """Only failures of workers spend it, and only lost nodes give something back."""
    for step in steps:
        assert 0 <= step.after["restarts"] <= of.max_restarts
        spent = step.after["restarts"] - step.before["restarts"]
        assert spent <= 1
        assert spent <= 0 or getattr(step.event, "failures", ())
        assert spent >= 0 or isinstance(step.event, NodeLost)


def a_well_world_is_asked_before_it_is_ended(of: Job, steps: Sequence[Step]) -> None:
    """Nobody who only comes, or is about to go, ends a running world before it could save."""
    for step in steps:
        if step.before["phase"] is Phase.RUNNING and isinstance(step.event, NodeJoined | NodeDraining | Tick):
            assert not orders([step], Stop)
            assert not orders([step], Launch)


def who_is_asked_may_save(of: Job, steps: Sequence[Step]) -> None:
    """Workers that save are stopped when all have, or cannot; or the world is broken, or the time over, or at will."""
    for step in steps:
        if not step.before["asking"] or not any(order.grace for order in orders([step], Stop)):
            continue
        match step.event:
            case WorkersCheckpointed(step=int()) | WorkersExited(failures=()):
                assert step.before["awaited"] <= {step.event.node}
            case Tick():
                assert step.event.at >= step.before["deadline"]
            case _:
                assert isinstance(step.event, WorkersCheckpointed | StopAsked)


def drained_nodes_without_a_part_are_let_go(of: Job, steps: Sequence[Step]) -> None:
    """Only those of the present world are there for longer; and none is while nodes are waited for."""
    for step in steps:
        going = {node for node, member in step.after["nodes"].items() if member.draining}
        if step.after["phase"] is not Phase.DONE:
            assert going <= (set() if step.after["phase"] is Phase.GATHERING else set(step.after["roster"]))


def hosts_that_are_left_out_have_no_part(of: Job, steps: Sequence[Step]) -> None:
    """From Shun to Readmit no world has a node there; and a host is shunned only while others can be had."""
    out: set[str] = set()
    for step in steps:
        for order in step.actions:
            match order:
                case Shun():
                    assert of.exclude_after > 0
                    out.add(order.host)
                case Readmit():
                    out.remove(order.host)
                case Launch():
                    assert out.isdisjoint(step.hosts[node] for node in order.roster)


def no_wake_is_in_the_past(of: Job, steps: Sequence[Step]) -> None:
    """A time to be woken at is still to come."""
    for step in steps:
        assert all(order.at >= step.after["now"] for order in orders([step], WakeAt))


def who_waits_will_be_woken(of: Job, steps: Sequence[Step]) -> None:
    """Whatever the machine waits for, and whoever is left out, the latest WakeAt is not later than its time."""
    alarm: float | None = of.placement_timeout
    for step in steps:
        alarm = None if isinstance(step.event, Tick) else alarm
        for order in orders([step], WakeAt):
            alarm = order.at
        names = {
            Phase.GATHERING: ("deadline", "last_call", "not_before"),
            Phase.RUNNING: ("deadline", "last_call", "evacuation"),
        }.get(step.after["phase"], ("deadline",))
        times = [step.after[name] for name in names if step.after[name] is not None]
        times += [] if step.after["phase"] is Phase.DONE else step.after["health"]["_until"].values()
        if times:
            assert alarm is not None
            assert alarm <= max(min(times), step.after["now"])


def the_dropped_changes_nothing(of: Job, steps: Sequence[Step]) -> None:
    """A word of another attempt leaves everything as it was, except the time."""
    for step in steps:
        if isinstance(step.event, WorkerEvent) and step.event.attempt != step.before["attempt"]:
            assert step.actions == []
            assert step.after == step.before | {"now": step.after["now"]}


CLAIMS: tuple[Callable[[Job, Sequence[Step]], None], ...] = (
    attempts_have_no_gaps,
    rosters_are_good,
    who_is_asked_may_save,
    drained_nodes_without_a_part_are_let_go,
    survivors_keep_their_order,
    every_attempt_is_ended_once_for_the_next,
    forwarding_changes_nothing,
    signals_reach_whole_worlds,
    the_end_is_the_end,
    done_is_finished,
    restarts_stay_in_the_budget,
    a_well_world_is_asked_before_it_is_ended,
    hosts_that_are_left_out_have_no_part,
    no_wake_is_in_the_past,
    who_waits_will_be_woken,
    the_dropped_changes_nothing,
)


@settings(FIXED, max_examples=300)
@given(jobs, scripts)
def test_what_must_never_happen(of, script):
    """All claims hold at every step of every script (`check` adds those about the machine's state)."""
    steps = play(of, script)
    for claim in CLAIMS:
        claim(of, steps)


@settings(FIXED, max_examples=40)
@given(jobs, scripts)
def test_stale_words_change_nothing(of, script):
    """At any state: words of other attempts, of nodes with no part in this one, of nodes nobody knows."""
    machine = begun(of)
    for step in play(of, script):
        machine.handle(step.event)
    before = snapshot(machine)
    now, attempt = machine.now, machine.attempt
    outside = [*(set(machine.nodes) - set(machine.roster)), "nobody"]
    stale: list[Event] = [lost("nobody", now), draining("nobody", now)]
    for word in (started, finished, failed, stopped, checkpointed):
        stale += [word(node, now, attempt=attempt) for node in outside]
        stale += [word(node, now, attempt=n) for node in machine.roster for n in (attempt - 1, attempt + 1)]
        if machine.phase is Phase.GATHERING:  # no attempt is there
            stale += [word(node, now, attempt=attempt) for node in machine.roster]
    stale += [hung("a", now, attempt=n) for n in (attempt - 1, attempt + 1)]
    stale += [progressed(now, attempt=n) for n in (attempt - 1, attempt + 1)]
    for event in stale:
        assert machine.handle(event) == []
        assert snapshot(machine) == before


@settings(FIXED, max_examples=60)
@given(jobs, scripts)
def test_the_log_gives_the_same_decisions(of, script):
    """Written down, read again and played again, the events lead to the same actions."""
    told = [journal.Entry(event=step.event, actions=tuple(step.actions)) for step in play(of, script)]
    first = journal.Entry(event=None, actions=tuple(Machine(of).start()))
    lines = [journal.header(of, "2026-01-01T00:00:00"), *map(journal.line, [first, *told])]
    found, entries = journal.read(lines)
    assert (found, entries) == (of, [first, *told])
    assert journal.replay(found, [entry.event for entry in entries if entry.event is not None]) == entries


# A world that obeys, in part.

SILENCES = ("", "", "", "never starts", "never stops", "never starts, never stops", "never saves")


NODES = tuple("abcdefgh")
disasters = st.lists(
    st.tuples(
        st.sampled_from(("crash", "join", "lose", "drain", "ask")),
        st.sampled_from(NODES),
        st.sampled_from((0.05, 8.0, 30.0, 70.0, 700.0)),
    ),
    max_size=10,
)


def lived(of: Job, silences: Sequence[str], script: Sequence[tuple[str, str, float]]) -> World:
    """Four nodes at first, up to four more later, and what befalls them."""
    world = World(Machine(of), silent=dict(zip(NODES, silences, strict=False)))
    for node in NODES[:4]:
        world.expect(joined(node, 1.0))
    came = set(NODES[:4])
    at = 1.0
    for kind, node, pause in script:
        at += pause
        if kind == "join" and node not in came:
            came.add(node)
            world.expect(joined(node, at))
        elif kind == "crash":
            for attempt in range(1, 10):  # of whichever runs then
                world.expect(failed(node, at, attempt=attempt))
        elif kind == "lose":
            world.expect(lost(node, at))
        elif kind == "drain":
            world.expect(draining(node, at, deadline=at + 20))
            world.expect(lost(node, at + 20))
        elif kind == "ask" and node == "a":
            world.expect(asked("SIGINT", at))
    world.live(at_most=2000)
    return world


@settings(FIXED, max_examples=120)
@given(jobs, disasters)
def test_an_obedient_world_comes_to_an_end(of, script):
    """Where every order is obeyed in its time, the run ends, or ends waiting for nodes that do not come."""
    world = lived(of, [], script)
    assert world.finish is not None, f"waits in {world.machine.phase} for {world.machine.awaited}"
    assert world.finish.exit_code in (0, 1, 3, 130)


@settings(FIXED, max_examples=120)
@given(jobs, disasters, st.lists(st.sampled_from(SILENCES), min_size=8, max_size=8))
def test_silent_nodes_do_not_hold_up_the_end(of, script, silences):
    """Nodes that never start or never stop are given up, and the run ends without them."""
    world = lived(of, silences, script)
    assert world.finish is not None, f"waits in {world.machine.phase} for {world.machine.awaited}"


def test_all_nodes_are_silent():
    """Each is given up in its time; then there are too few, and the run ends with exit 3."""
    world = lived(job("2:3"), ["never starts, never stops"] * 8, [])
    assert world.finish == Finish(exit_code=3, why="1 of 2 nodes after 600 s")
    assert world.now == 1 + 120 + 600


def test_nothing_goes_wrong():
    """The simulated world itself works: four nodes, one attempt, exit 0."""
    world = lived(job(4), [], [])
    assert world.finish == Finish(exit_code=0, why="all 8 workers finished")
    assert (world.machine.attempt, world.machine.status) == (1, "all 8 workers finished")


@pytest.mark.parametrize("silence", ["", "never stops"])
def test_the_stop_is_bounded(silence):
    """From the wish to stop to the end: the grace and a margin at most, whoever is silent."""
    of = job(4, shutdown_timeout=5.0)
    world = lived(of, [silence] * 8, [("ask", "a", 20.0)])
    assert world.finish is not None
    assert world.now <= 21.0 + of.shutdown_timeout + STOP_MARGIN
    assert WAITING.count(world.machine.phase) == 0
