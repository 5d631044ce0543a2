"""The phases of a run: each transition of the table is possible, and no other occurs."""

from __future__ import annotations

import pytest
import replay_files
from machine_helpers import (
    checkpointed,
    failed,
    finished,
    gathering_machine,
    job,
    joined,
    lost,
    raised,
    running_machine,
    started,
    stop_requested,
    stopped,
)

from raylaunch.core.machine.events_and_actions import WorkersElastic
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.run_state import Run
from raylaunch.core.machine.state import TRANSITIONS, Phase
from raylaunch.core.record import journal

HOPELESS = raised("TypeError", hopeless=True)


def starting(*nodes: str) -> Machine:
    """Return a machine in STARTING."""
    machine = gathering_machine(job(len(nodes), max_restarts=1))
    for node in nodes:
        machine.handle(joined(node))
    return machine


def saving() -> Machine:
    """Return a machine in SAVING, since b joined."""
    machine = running_machine("a", nnodes="1:2")
    machine.handle(joined("b", 5.0))
    return machine


def saving_with_survivors() -> Machine:
    """Return such a machine, whose workers can stay."""
    machine = running_machine("a", nnodes="1:2")
    machine.handle(WorkersElastic(at=2.0, attempt=1, node="a"))
    machine.handle(joined("b", 5.0))
    return machine


def failing() -> Machine:
    """Return a machine in STOPPING that ends the run."""
    machine = running_machine("a", "b")
    machine.handle(failed("a", 5.0, **HOPELESS))
    return machine


def resizing() -> Machine:
    """Return a machine in STOPPING that launches another attempt."""
    machine = saving()
    machine.handle(checkpointed("a", 6.0))
    return machine


def stopping_after_loss() -> Machine:
    """Return a machine in STOPPING with too few nodes for another attempt."""
    machine = running_machine("a", "b")
    machine.handle(lost("b", 5.0))
    return machine


EXAMPLES = {
    (Phase.GATHERING, Phase.STARTING): (lambda: gathering_machine(job(1)), joined("a")),
    (Phase.GATHERING, Phase.DONE): (lambda: gathering_machine(job(1)), stop_requested("SIGINT")),
    (Phase.STARTING, Phase.STARTING): (lambda: starting("a", "b"), failed("a")),
    (Phase.STARTING, Phase.RUNNING): (lambda: starting("a"), started("a")),
    (Phase.STARTING, Phase.STOPPING): (lambda: starting("a"), stop_requested("SIGINT")),
    (Phase.STARTING, Phase.DONE): (lambda: starting("a"), finished("a")),
    (Phase.RUNNING, Phase.STARTING): (lambda: running_machine("a", max_restarts=1), failed("a", 9.0)),
    (Phase.RUNNING, Phase.SAVING): (lambda: running_machine("a", nnodes="1:2"), joined("b", 9.0)),
    (Phase.RUNNING, Phase.STOPPING): (lambda: running_machine("a"), stop_requested("SIGINT", 9.0)),
    (Phase.RUNNING, Phase.DONE): (lambda: running_machine("a"), finished("a", 9.0)),
    (Phase.SAVING, Phase.STARTING): (saving_with_survivors, checkpointed("a", 9.0)),
    (Phase.SAVING, Phase.STOPPING): (saving, checkpointed("a", 9.0)),
    (Phase.SAVING, Phase.DONE): (saving, finished("a", 9.0)),
    (Phase.STOPPING, Phase.STARTING): (resizing, stopped("a", 9.0)),
    (Phase.STOPPING, Phase.GATHERING): (stopping_after_loss, stopped("a", 9.0)),
    (Phase.STOPPING, Phase.DONE): (failing, stop_requested("SIGINT", 9.0)),
}


@pytest.mark.parametrize("transition", EXAMPLES, ids="-".join)
def test_each_transition_is_possible(transition):
    """One event leads from the first phase to the second."""
    make, event = EXAMPLES[transition]
    machine = make()
    assert machine.phase is transition[0]
    attempt = machine.attempt
    machine.handle(event)
    assert machine.phase is transition[1]
    assert machine.attempt == attempt + (transition[1] is Phase.STARTING)


def test_every_transition_has_an_example():
    """The table of transitions contains exactly the pairs that have an example."""
    assert {(before, after) for before, then in TRANSITIONS.items() for after in then} == set(EXAMPLES)


@pytest.mark.parametrize("path", replay_files.files(), ids=lambda path: path.stem)
def test_replays_use_only_transitions_of_the_table(path, monkeypatch):
    """Each transition counts, also where one event leads to several."""
    seen: set[tuple[Phase, Phase]] = set()
    enter = Run.enter

    def recorded(run, state):
        seen.add((run.phase, state.phase))
        enter(run, state)

    monkeypatch.setattr(Run, "enter", recorded)
    a_job, entries = journal.read(path.read_text(encoding="utf-8").splitlines())
    machine = Machine(a_job)
    machine.start()
    for entry in entries:
        if entry.event is not None:
            machine.handle(entry.event)
    assert {(Phase.GATHERING, Phase.STARTING)} <= seen <= set(EXAMPLES)


def test_other_transitions_raise_an_error(monkeypatch):
    """The machine checks the table at each transition."""
    monkeypatch.setitem(TRANSITIONS, Phase.GATHERING, frozenset({Phase.DONE}))
    with pytest.raises(AssertionError, match="starting cannot follow gathering"):
        gathering_machine(job(1)).handle(joined("a"))


def test_progress_is_needed_before_an_attempt_ends():
    """It is needed before the exit of the last node and before any failure, but not in STARTING."""
    machine = running_machine("a", "b")
    assert not machine.needs_progress(finished("a", 9.0))
    assert machine.needs_progress(failed("a", 9.0))
    machine.handle(finished("a", 9.0))
    assert machine.needs_progress(finished("b", 9.0))
    assert not machine.needs_progress(started("b", 9.0))
    assert not starting("a", "b").needs_progress(failed("a", 9.0))


def test_progress_is_needed_before_the_last_answer():
    """In SAVING and STOPPING only the last answer needs it, because computing progress looks at all workers."""
    machine = running_machine("a", "b", nnodes="2:3")
    machine.handle(joined("c", 5.0))
    assert not machine.needs_progress(checkpointed("a", 9.0))
    assert machine.needs_progress(checkpointed("a", 9.0, step=None))
    machine.handle(checkpointed("a", 9.0))
    assert machine.needs_progress(checkpointed("b", 9.0))
    machine.handle(checkpointed("b", 9.0))
    assert not machine.needs_progress(stopped("a", 9.0))
    machine.handle(stopped("a", 9.0))
    assert machine.needs_progress(stopped("b", 9.0))
