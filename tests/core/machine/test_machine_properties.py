"""Properties of the machine that hold for every sequence of events.

Random scripts of events are handled, and all safety properties are checked at every step: what must never happen. Then
simulated nodes, some of them silent, carry out the actions: every run comes to an end (liveness).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_helpers import (
    WAITING,
    checkpointed,
    drain_requested,
    draining,
    failed,
    finished,
    forward_requested,
    gathering_machine,
    handle_checked,
    hung,
    job,
    joined,
    lost,
    progressed,
    raised,
    resize_requested,
    restart_requested,
    started,
    state_fields,
    stop_command,
    stop_requested,
    stopped,
    tick,
)
from simulation import Simulation

from raylaunch.core.job.job import Job
from raylaunch.core.machine.events_and_actions import (
    Action,
    Cordon,
    Event,
    Finish,
    ForwardRequested,
    ForwardSignal,
    Launch,
    NodeDraining,
    NodeJoined,
    NodeLost,
    Release,
    RequestCheckpoint,
    ResizeRequested,
    RestartRequested,
    SetTimer,
    Stop,
    StopRequested,
    Tick,
    Uncordon,
    WorkerEvent,
    WorkersCheckpointed,
    WorkersExited,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.state import Phase
from raylaunch.core.machine.transitions import STOP_MARGIN
from raylaunch.core.record import journal
from tests.profiles import examples

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


# Random scripts. Each move makes sense in every state of a machine.

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
    "signal": 1,
    "restart": 1,
    "resize": 1,
    "drain by a person": 1,
    "stop by a person": 1,
}
"""The possible moves and their relative frequency. "answer": a report that the machine waits for."""

moves = st.sampled_from(
    [
        (move, choice, pause)
        for move, often in MOVES.items()
        for choice in range(9)
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
    """One event, the actions, and the machine before and after. `usable` are the nodes that the events allow to use."""

    event: Event
    actions: list[Action]
    before: dict[str, Any]
    after: dict[str, Any]
    usable: set[str]
    hosts: dict[str, str]
    """The host of each node that ever joined."""
    most: int
    """The most nodes that may take part, as requested last."""


def play_script(a_job: Job, script: Script) -> list[Step]:
    """Hand the events of the script to a new machine, up to three of them after the end of the run."""
    machine = gathering_machine(a_job)
    fresh = machine_snapshot(machine)
    names = iter(f"node-{number}" for number in range(1, 100))
    usable: set[str] = set()
    hosts: dict[str, str] = {}
    steps: list[Step] = []
    most = a_job.max_nodes
    for move, choice, pause in script:
        if len(steps) > 3 and steps[-3].before["phase"] is Phase.DONE:
            break
        event = _event(machine, move, choice, machine.now + pause, names)
        if event is None:
            continue
        match event:
            case NodeJoined():
                usable.add(event.node)
                hosts[event.node] = event.host
            case NodeLost() | NodeDraining():
                usable.discard(event.node)
            case ResizeRequested() if not machine.refusal(event):
                most = event.max_nodes
        actions = handle_checked(machine, event)
        usable -= {action.node for action in actions if isinstance(action, Release)}
        before = steps[-1].after if steps else fresh
        steps.append(Step(event, actions, before, machine_snapshot(machine), set(usable), hosts, most))
    return steps


def _event(machine: Machine, move: str, choice: int, at: float, names: Iterator[str]) -> Event | None:
    """Return the event of a move, None if it is not possible now. `choice` selects the node and other details."""
    here = list(machine.nodes)
    match move:
        case "signal":
            return stop_requested("SIGINT", at) if choice < 3 else forward_requested(f"SIGUSR{1 + choice % 2}", at)
        case "tick":
            return tick(state_fields(machine)["last_call"] or at)
        case "late tick":
            deadline = state_fields(machine)["deadline"] or at
            return tick(deadline + 1) if choice < 5 else tick(deadline)
        case "join":
            return (
                joined(next(names), at, address=f"10.0.0.{10 - choice}", host=f"h{choice % 4}")
                if len(here) < 6
                else None
            )
        case "lose":
            return lost(here[choice % len(here)], at) if here else None
        case "drain":
            return draining(here[choice % len(here)], at, deadline=at + (10, 100, 0)[choice % 3]) if here else None
        case "drain by a person":
            return drain_requested(here[choice % len(here)], at) if here else None
    return _request(move, choice, at) or _report(machine, move, choice, at)


def _request(move: str, choice: int, at: float) -> Event | None:
    """Return what a person requests of the whole run."""
    match move:
        case "restart":
            return restart_requested(at, save_seconds=(600.0, 5.0, 0.0)[choice % 3])
        case "resize":
            return resize_requested(1 + choice % 3, choice // 2, at)
        case "stop by a person":
            return stop_command(at, save_seconds=(600.0, 5.0, 0.0)[choice % 3], now=choice > 6)
    return None


def _report(machine: Machine, move: str, choice: int, at: float) -> Event | None:
    """Return a report of a node of the roster; now and then one of the attempt before."""
    nodes = sorted(state_fields(machine)["awaited"]) or machine.roster
    if not nodes:
        return None
    node, attempt = nodes[choice % len(nodes)], machine.attempt - (choice == 8)
    if move == "fail":
        return failed(node, at, attempt=attempt, **HOW_WORKERS_FAIL[choice % len(HOW_WORKERS_FAIL)])
    if move == "hang":
        return hung(node, at, attempt=attempt, **HOW_WORKERS_FAIL[choice % 2])
    if move == "progress":
        return progressed(at, attempt=attempt)
    if move == "save" or (move == "answer" and machine.phase is Phase.SAVING):
        return checkpointed(node, at, attempt=attempt, step=None if choice % 3 == 0 else 7)
    if move == "answer":
        move = {Phase.STARTING: "start", Phase.STOPPING: "stop"}.get(machine.phase, "start")
    return {"start": started, "finish": finished, "stop": stopped}[move](node, at, attempt=attempt)


def machine_snapshot(machine: Machine) -> dict[str, Any]:
    """Return a copy of all data of the machine."""
    parts = ("members", "health", "budget", "crashes")
    kept = {name: copy.deepcopy(vars(getattr(machine.run, name))) for name in parts}
    own = {
        name: copy.copy(value) for name, value in vars(machine.run).items() if name not in ("state", "world", *parts)
    }
    return own | state_fields(machine) | kept | {"members now": dict(machine.nodes), "restarts": machine.restarts}


def actions_of(steps: Sequence[Step], kind: type[Any]) -> list[Any]:
    """Return all actions of this class, in order."""
    return [action for step in steps for action in step.actions if isinstance(action, kind)]


# Safety properties.


def attempts_are_numbered_without_gaps(a_job: Job, steps: Sequence[Step]) -> None:
    """Attempts are numbered 1, 2, 3, ..."""
    attempts = [order.attempt for order in actions_of(steps, Launch)]
    assert attempts == list(range(1, len(attempts) + 1))


def rosters_are_valid(a_job: Job, steps: Sequence[Step]) -> None:
    """A roster has MIN to MAX nodes, each once; all are members, and none is drained."""
    for step in steps:
        for order in actions_of([step], Launch):
            assert len(order.roster) <= step.most
            assert step.after["job"].min_nodes <= len(order.roster) <= step.after["job"].max_nodes
            assert len(set(order.roster)) == len(order.roster)
            assert set(order.roster) <= step.usable
            assert step.after["size"] == 2 * len(order.roster)
            assert step.after["size"] % a_job.multiple_of == 0


def remaining_nodes_keep_their_order(a_job: Job, steps: Sequence[Step]) -> None:
    """Nodes of two consecutive attempts keep their order, and come before new nodes, except for one that is in the
    place of a lost node of its host."""
    hosts = steps[-1].hosts if steps else {}
    for before, after in pairwise(actions_of(steps, Launch)):
        both = [node for node in before.roster if node in after.roster]
        assert [node for node in after.roster if node in both] == both
        gone = Counter(hosts[node] for node in before.roster if node not in both)
        last = max((after.roster.index(node) for node in both), default=0)
        early = Counter(hosts[node] for node in after.roster[:last] if node not in both)
        assert early <= gone


def each_attempt_is_stopped_before_the_next(a_job: Job, steps: Sequence[Step]) -> None:
    """A `Stop` comes between two launches. `Stop` and `RequestCheckpoint` name only nodes of the attempt's roster."""
    rosters: dict[int, tuple[str, ...]] = {}
    ended = set()
    for order in (action for step in steps for action in step.actions):
        match order:
            case Stop():
                assert set(order.nodes) <= set(rosters[order.attempt])
                ended.add(order.attempt)
            case RequestCheckpoint():
                assert order.attempt not in ended
                assert order.attempt == max(rosters)
                assert set(order.nodes) <= set(rosters[order.attempt])
            case Launch():
                assert order.attempt == 1 or order.attempt - 1 in ended
                rosters[order.attempt] = order.roster


def forwarding_does_not_change_the_state(a_job: Job, steps: Sequence[Step]) -> None:
    """A signal to forward changes nothing, except that it is held in STARTING."""
    for step in steps:
        if isinstance(step.event, ForwardRequested):
            assert step.after | {"now": 0.0, "held_signals": []} == step.before | {"now": 0.0, "held_signals": []}
            assert all(isinstance(action, ForwardSignal) for action in step.actions)
            assert step.after["held_signals"] == step.before["held_signals"] or step.before["phase"] is Phase.STARTING


def signals_are_forwarded_only_while_running(a_job: Job, steps: Sequence[Step]) -> None:
    """Signals go to members while RUNNING; those that come in STARTING are held until all workers are started."""
    waiting: set[str] = set()
    for step in steps:
        forwarded = actions_of([step], ForwardSignal)
        assert all(step.after["phase"] is Phase.RUNNING for _ in forwarded)
        assert all(set(order.nodes) <= set(step.before["members now"]) for order in forwarded)
        if isinstance(step.event, ForwardRequested) and step.before["phase"] is Phase.STARTING:
            waiting.add(step.event.signal)
        elif step.before["phase"] is Phase.STARTING and step.after["phase"] is Phase.RUNNING:
            assert sorted(order.signal for order in forwarded) == sorted(waiting)
            waiting.clear()


def nothing_follows_finish(a_job: Job, steps: Sequence[Step]) -> None:
    """There is at most one `Finish`, and no action after it."""
    flat = [action for step in steps for action in step.actions]
    ends = [index for index, action in enumerate(flat) if isinstance(action, Finish)]
    assert ends in ([], [len(flat) - 1])


def done_comes_with_finish(a_job: Job, steps: Sequence[Step]) -> None:
    """The phase is DONE if and only if `Finish` was ordered."""
    assert bool(actions_of(steps, Finish)) == (bool(steps) and steps[-1].after["phase"] is Phase.DONE)


def restarts_stay_within_the_budget(a_job: Job, steps: Sequence[Step]) -> None:
    """Only failures of workers spend restarts, one each; only lost nodes give restarts back."""
    for step in steps:
        assert 0 <= step.after["restarts"] <= a_job.max_restarts
        spent = step.after["restarts"] - step.before["restarts"]
        assert spent <= 1
        assert spent <= 0 or getattr(step.event, "failures", ())
        assert spent >= 0 or isinstance(step.event, NodeLost)


def runs_that_a_person_stops_get_no_further_attempt(a_job: Job, steps: Sequence[Step]) -> None:
    """Whatever happens after the request."""
    is_stopped = False
    for step in steps:
        is_stopped |= isinstance(step.event, StopRequested)
        assert not is_stopped or not actions_of([step], Launch)


def refused_requests_change_nothing(a_job: Job, steps: Sequence[Step]) -> None:
    """A request to restart or to resize a run that ends."""
    for step in steps:
        if isinstance(step.event, RestartRequested | ResizeRequested) and step.before["ending"] is not None:
            assert step.actions == []
            assert step.after == step.before | {"now": step.after["now"]}


def running_workers_save_before_a_planned_stop(a_job: Job, steps: Sequence[Step]) -> None:
    """In RUNNING, joins, drains, ticks and requests do not stop the workers before these could save."""
    planned = NodeJoined | NodeDraining | Tick | ResizeRequested
    for step in steps:
        may_save = isinstance(step.event, planned) or getattr(step.event, "save_seconds", 0.0) > 0
        if step.before["phase"] is Phase.RUNNING and may_save:
            assert not actions_of([step], Stop)
            assert not actions_of([step], Launch)


def saving_ends_only_for_a_reason(a_job: Job, steps: Sequence[Step]) -> None:
    """Workers in SAVING get the signal when all have saved or cannot, after the deadline, or by a stop request."""
    for step in steps:
        if step.before["phase"] is not Phase.SAVING or not any(order.grace for order in actions_of([step], Stop)):
            continue
        match step.event:
            case WorkersCheckpointed(step=int()) | WorkersExited(failures=()):
                assert step.before["awaited"] <= {step.event.node}
            case Tick():
                assert step.event.at >= step.before["deadline"]
            case _:
                assert isinstance(step.event, WorkersCheckpointed | StopRequested)


def unused_drained_nodes_are_released(a_job: Job, steps: Sequence[Step]) -> None:
    """Only drained nodes of the present attempt stay members, and none in GATHERING."""
    for step in steps:
        going = {node for node, member in step.after["members now"].items() if member.draining}
        if step.after["phase"] is not Phase.DONE:
            assert going <= (set() if step.after["phase"] is Phase.GATHERING else set(step.after["roster"]))


def excluded_hosts_are_not_used(a_job: Job, steps: Sequence[Step]) -> None:
    """From `Cordon` to `Uncordon` no roster has a node of the host."""
    out: set[str] = set()
    for step in steps:
        for order in step.actions:
            match order:
                case Cordon():
                    assert a_job.exclude_after > 0 or getattr(step.event, "by", "")
                    out.add(order.host)
                case Uncordon():
                    out.remove(order.host)
                case Launch():
                    assert out.isdisjoint(step.hosts[node] for node in order.roster)


def timer_is_never_in_the_past(a_job: Job, steps: Sequence[Step]) -> None:
    """A timer is never set before the present time."""
    for step in steps:
        assert all(order.at >= step.after["now"] for order in actions_of([step], SetTimer))


def timer_covers_all_deadlines(a_job: Job, steps: Sequence[Step]) -> None:
    """The timer is never later than a time at which the machine or an exclusion needs a tick."""
    alarm: float | None = a_job.placement_timeout
    for step in steps:
        alarm = None if isinstance(step.event, Tick) else alarm
        for order in actions_of([step], SetTimer):
            alarm = order.at
        names = {
            Phase.GATHERING: ("deadline", "last_call", "backoff_until"),
            Phase.RUNNING: ("last_call", "evacuate_at"),
        }.get(step.after["phase"], ("deadline",))
        times = [step.after[name] for name in names if step.after[name] is not None]
        times += [] if step.after["phase"] is Phase.DONE else step.after["health"]["_until"].values()
        if times:
            assert alarm is not None
            assert alarm <= max(min(times), step.after["now"])


def reports_of_other_attempts_change_nothing(a_job: Job, steps: Sequence[Step]) -> None:
    """A report of another attempt changes nothing except the time."""
    for step in steps:
        if isinstance(step.event, WorkerEvent) and step.event.attempt != step.before["attempt"]:
            assert step.actions == []
            assert step.after == step.before | {"now": step.after["now"]}


SAFETY_PROPERTIES: tuple[Callable[[Job, Sequence[Step]], None], ...] = (
    attempts_are_numbered_without_gaps,
    rosters_are_valid,
    saving_ends_only_for_a_reason,
    unused_drained_nodes_are_released,
    remaining_nodes_keep_their_order,
    each_attempt_is_stopped_before_the_next,
    forwarding_does_not_change_the_state,
    signals_are_forwarded_only_while_running,
    nothing_follows_finish,
    done_comes_with_finish,
    restarts_stay_within_the_budget,
    runs_that_a_person_stops_get_no_further_attempt,
    refused_requests_change_nothing,
    running_workers_save_before_a_planned_stop,
    excluded_hosts_are_not_used,
    timer_is_never_in_the_past,
    timer_covers_all_deadlines,
    reports_of_other_attempts_change_nothing,
)


@examples(150)
@given(jobs, scripts)
def test_safety_properties(a_job, script):
    """All safety properties hold for every script (`check_invariants` adds those of the machine's state)."""
    steps = play_script(a_job, script)
    for check in SAFETY_PROPERTIES:
        check(a_job, steps)


@examples(40)
@given(jobs, scripts)
def test_stale_reports_change_nothing(a_job, script):
    """In any state, reports of other attempts, of nodes outside the attempt and of unknown nodes change nothing."""
    machine = gathering_machine(a_job)
    for step in play_script(a_job, script):
        machine.handle(step.event)
    before = machine_snapshot(machine)
    now, attempt = machine.now, machine.attempt
    outside = [*(set(machine.nodes) - set(machine.roster)), "unknown"]
    stale: list[Event] = [lost("unknown", now), draining("unknown", now)]
    for report in (started, finished, failed, stopped, checkpointed):
        stale += [report(node, now, attempt=attempt) for node in outside]
        stale += [report(node, now, attempt=n) for node in machine.roster for n in (attempt - 1, attempt + 1)]
        if machine.phase is Phase.GATHERING:  # there is no attempt
            stale += [report(node, now, attempt=attempt) for node in machine.roster]
    stale += [hung("a", now, attempt=n) for n in (attempt - 1, attempt + 1)]
    stale += [progressed(now, attempt=n) for n in (attempt - 1, attempt + 1)]
    for event in stale:
        assert machine.handle(event) == []
        assert machine_snapshot(machine) == before


@examples(60)
@given(jobs, scripts)
def test_journal_replays_to_the_same_actions(a_job, script):
    """Events that are written to a journal, read and replayed lead to the same actions."""
    written = [
        journal.JournalEntry(event=step.event, actions=tuple(step.actions)) for step in play_script(a_job, script)
    ]
    first = journal.JournalEntry(event=None, actions=tuple(Machine(a_job).start()))
    lines = [journal.header(a_job, "2026-01-01T00:00:00"), *map(journal.line, [first, *written])]
    found, entries = journal.read(lines)
    assert (found, entries) == (a_job, [first, *written])
    assert journal.replay(found, [entry.event for entry in entries if entry.event is not None]) == entries


# Liveness, with nodes that may be silent.

SILENT_NODES = ("", "", "", "never starts", "never stops", "never starts, never stops", "never saves")


NODES = tuple("abcdefgh")
disasters = st.lists(
    st.tuples(
        st.sampled_from(("crash", "join", "lose", "drain", "stop request", "restart", "resize", "leave", "stop")),
        st.sampled_from(NODES),
        st.sampled_from((0.05, 8.0, 30.0, 70.0, 700.0)),
    ),
    max_size=10,
)


def disaster(kind: str, node: str, at: float) -> Sequence[Event]:
    """Return the events of a disaster, or of what a person requests."""
    index = NODES.index(node)
    match kind:
        case "crash":  # only that of the attempt that runs then has an effect
            return [failed(node, at, attempt=attempt) for attempt in range(1, 10)]
        case "lose":
            return [lost(node, at)]
        case "drain":
            return [draining(node, at, deadline=at + 20), lost(node, at + 20)]
        case "stop request" if node == "a":
            return [stop_requested("SIGINT", at)]
        case "restart":
            return [restart_requested(at, save_seconds=0.0 if node < "c" else 60.0)]
        case "resize":
            return [resize_requested(1 + index // 3, 1 + index // 2, at)]
        case "leave":
            return [drain_requested(node, at)]
        case "stop" if node == "b":
            return [stop_command(at)]
    return []


def simulate(a_job: Job, silences: Sequence[str], script: Sequence[tuple[str, str, float]]) -> Simulation:
    """Run a machine with four nodes, up to four more that join later, and these disasters."""
    simulation = Simulation(Machine(a_job), silent=dict(zip(NODES, silences, strict=False)))
    for node in NODES[:4]:
        simulation.schedule_event(joined(node, 1.0))
    came = set(NODES[:4])
    at = 1.0
    for kind, node, pause in script:
        at += pause
        if kind == "join" and node not in came:
            came.add(node)
            simulation.schedule_event(joined(node, at))
        else:
            for event in disaster(kind, node, at):
                simulation.schedule_event(event)
    simulation.run(at_most=2000)
    return simulation


@examples(120)
@given(jobs, disasters)
def test_run_ends_if_all_nodes_answer(a_job, script):
    """If every order is carried out in time, the run ends with a known exit code."""
    simulation = simulate(a_job, [], script)
    assert simulation.finish is not None, (
        f"waits in {simulation.machine.phase} for {state_fields(simulation.machine)['awaited']}"
    )
    assert simulation.finish.exit_code in (0, 1, 3, 130, 143)


@examples(120)
@given(jobs, disasters, st.lists(st.sampled_from(SILENT_NODES), min_size=8, max_size=8))
def test_run_ends_despite_silent_nodes(a_job, script, silences):
    """Nodes that never start or never stop are released, and the run ends without them."""
    simulation = simulate(a_job, silences, script)
    assert simulation.finish is not None, (
        f"waits in {simulation.machine.phase} for {state_fields(simulation.machine)['awaited']}"
    )


def test_all_nodes_are_silent():
    """All nodes are released at the start timeout; then there are too few, and the run ends with exit code 3."""
    simulation = simulate(job("2:3"), ["never starts, never stops"] * 8, [])
    assert simulation.finish == Finish(exit_code=3, why="1 of 2 nodes after 600 s")
    assert simulation.now == 1 + 120 + 600


def test_simulation_without_faults():
    """The simulation itself works: four nodes, one attempt, exit code 0."""
    simulation = simulate(job(4), [], [])
    assert simulation.finish == Finish(exit_code=0, why="all 8 workers finished")
    assert (simulation.machine.attempt, simulation.machine.status) == (1, "all 8 workers finished")


@pytest.mark.parametrize("silence", ["", "never stops"])
def test_stop_takes_at_most_grace_and_margin(silence):
    """After a stop request the run ends within the grace and a margin, even if all nodes are silent."""
    a_job = job(4, shutdown_timeout=5.0)
    simulation = simulate(a_job, [silence] * 8, [("stop request", "a", 20.0)])
    assert simulation.finish is not None
    assert simulation.now <= 21.0 + a_job.shutdown_timeout + STOP_MARGIN
    assert WAITING.count(simulation.machine.phase) == 0
