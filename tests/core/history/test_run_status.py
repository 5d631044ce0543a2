"""The status of a run, computed from its journal alone: it is in the phase that the machine was in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import replay_files
from hypothesis import given
from hypothesis import strategies as st
from machine_helpers import (
    checkpointed,
    draining,
    failed,
    finished,
    granted,
    job,
    joined,
    lost,
    progressed,
    resize_requested,
    started,
    stop_requested,
    stopped,
)
from simulation import ClusterSimulation

from raylaunch.core.history.run_status import NodeState, NodeSummary, RunStatus, StatusBuilder
from raylaunch.core.job.job import Job
from raylaunch.core.machine.events_and_actions import Event, Progressed, Release, WorkersStarted
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.measured import NodeMemory
from raylaunch.core.machine.state import Phase
from raylaunch.core.placement.devices import GpuUse
from raylaunch.core.record import journal
from raylaunch.core.record.journal import JournalEntry
from tests.profiles import examples


def status_after(a_job: Job, *events: Event) -> RunStatus:
    """Return the status of a job after these events."""
    builder = StatusBuilder(a_job)
    for entry in journal.replay(a_job, events):
        builder.add(entry)
    return builder.status(run_dir="/job", began="2026-01-01T00:00:00+00:00")


def states(status: RunStatus) -> dict[str, str]:
    return {node.name: str(node.state) for node in status.nodes}


def assert_in_the_phases_of_the_machine(a_job: Job, events: Iterable[Event]) -> None:
    """After each event the status and a machine agree on phase, attempt, and nodes."""
    machine, builder = Machine(a_job), StatusBuilder(a_job)
    builder.add(JournalEntry(event=None, actions=tuple(machine.start())))
    for event in events:
        builder.add(JournalEntry(event=event, actions=tuple(machine.handle(event))))
        status = builder.status()
        known = {node.name for node in status.nodes if node.state is not NodeState.GRANTED}
        assert (status.phase, status.attempt, status.roster, known) == (
            *(machine.phase, machine.attempt, machine.roster, machine.nodes.keys()),
        ), event
        assert (status.waits_for == "") >= (machine.phase is Phase.DONE)


@pytest.mark.parametrize("file", replay_files.files(), ids=lambda file: file.stem)
def test_recorded_runs(file):
    """A status goes through the phases of runs that were recorded."""
    a_job, entries = journal.read(file.read_text(encoding="utf-8").splitlines())
    assert_in_the_phases_of_the_machine(a_job, [entry.event for entry in entries if entry.event is not None])


@examples(5)
@given(st.integers(0, 10**6))
def test_simulated_runs(seed):
    """A status goes through the phases of runs with any faults, late and duplicate reports."""
    a_job = job("2:6", max_restarts=1000)
    cluster = ClusterSimulation(a_job, hosts=8, seed=seed, silent=0.05, late=0.3, twice=0.3)
    handled: list[Event] = []
    handle = cluster.machine.handle
    cluster.machine.handle = lambda event: handled.append(event) or handle(event)  # type: ignore[method-assign]
    faults = ("host_dies", "host_drained", "agent_dies", "script_crashes", "workers_hang", "progress_reported")
    cluster.schedule_faults(until=40.0, every=3.0, kinds=faults)
    cluster.run(at_most=20_000)
    assert handled
    assert_in_the_phases_of_the_machine(a_job, handled)


def test_a_run_that_trains():
    """Ranks, processes, steps and rate; `a` has all ranks of the first node."""
    pids = WorkersStarted(at=2.0, attempt=1, node="a", pids=(10, 11))
    first = progressed(5.0)
    events = (joined("a"), joined("b", 1.0, nproc=3), pids, started("b", 2.0), first, replace(first, at=9.0, rate=2.5))
    status = status_after(job(2), *events)
    assert status.nodes == (
        NodeSummary(
            name="a",
            address="10.0.0.97",
            state=NodeState.RUNNING,
            draining=False,
            workers=2,
            first_rank=0,
            pids=(10, 11),
        ),
        NodeSummary(
            name="b", address="10.0.0.98", state=NodeState.RUNNING, draining=False, workers=3, first_rank=2, pids=()
        ),
    )
    assert (status.phase, status.waits_for, status.world_size) == (Phase.RUNNING, "", 5)
    assert (status.progress, status.steps_per_second) == (events[-1], 2.5)
    assert status_after(job(2), *events[:-1]).steps_per_second is None
    assert (status.result.run_dir, status.result.began) == ("/job", "2026-01-01T00:00:00+00:00")


def test_the_first_report_says_of_nobody_that_it_is_slow():
    """Its lower step is the first one of the attempt."""
    up = (granted("a"), joined("a"), started("a"))
    first = Progressed(at=3.0, attempt=1, marks=20, low=1, high=20, marked=2.0, saved=None, slowest=0, rate=0.0)
    later = replace(first, at=5.0, low=33, high=40)
    assert status_after(job(), *up).behind == 0
    assert status_after(job(), *up, first).behind == 0
    assert status_after(job(), *up, first, later).behind == 7
    assert status_after(job(), *up, first, replace(later, low=39)).behind == 0


def test_what_nodes_hold():
    """The latest that was reported of each; what is said of a node that is gone changes nothing."""
    up = (joined("a"), joined("b"), started("a"), started("b"))
    first, second = (NodeMemory(node="a", own=size, copies=0) for size in (1, 2))
    gone = NodeMemory(node="gone", own=3, copies=0)
    reports = [replace(progressed(3.0), memory=(first,)), replace(progressed(4.0), memory=(second, gone))]
    assert [node.memory for node in status_after(job(2), *up, *reports).nodes] == [second, None]


def test_gpus_of_ranks():
    """Of all nodes, by rank."""
    up = (joined("a"), joined("b"), started("a"), started("b"))
    first, second = (GpuUse(rank=rank, gpu="0", used=3, total=9) for rank in (0, 1))
    held = (NodeMemory(node="a", own=0, copies=0, gpus=(second,)), NodeMemory(node="b", own=0, copies=0, gpus=(first,)))
    assert status_after(job(2), *up, replace(progressed(3.0), memory=held)).gpus == (first, second)
    assert status_after(job(2), *up).gpus == ()


def test_before_and_between_attempts():
    """What a run waits for, from its first node to its end."""
    two = job("1:2", max_restarts=3)
    assert status_after(two).waits_for == "nodes: 0 of 1 to 2 are ready"
    assert states(status_after(two, granted("a"))) == {"a": "granted"}
    up = (joined("a"), joined("b"))
    begun = status_after(two, *up, started("a"))
    assert (begun.waits_for, states(begun)) == ("b to start workers", {"a": "running", "b": "starting"})
    runs = (*up, started("a"), started("b"))
    one_done = status_after(two, *runs, finished("a", 3.0))
    assert (one_done.waits_for, states(one_done)["a"]) == ("b to finish, as others have", "finished")
    stopping = status_after(two, *runs, stop_requested("SIGTERM", 3.0), stopped("a", 4.0))
    assert (stopping.waits_for, states(stopping)) == ("b to end workers", {"a": "idle", "b": "stopping"})
    assert (stopping.why, stopping.steps_per_second) == ("SIGTERM received", None)
    over = status_after(two, *runs, finished("a", 3.0), finished("b", 4.0))
    assert (over.phase, over.waits_for, over.result.exit_code) == (Phase.DONE, "", 0)
    assert states(over) == {"a": "idle", "b": "idle"}


def test_the_nodes_that_a_person_requested():
    """They are waited for from then on."""
    assert status_after(job("1:2"), resize_requested(3, 4)).waits_for == "nodes: 0 of 3 to 4 are ready"


def test_a_node_that_is_drained_is_left():
    """All workers save first; the drained node counts no more."""
    up = (joined("a"), joined("b"), started("a"), started("b"), joined("c", 1.0))
    saving = status_after(job(2), *up, draining("b", 2.0))
    assert (saving.phase, saving.waits_for) == (Phase.SAVING, "a, b to save")
    assert [node.draining for node in saving.nodes] == [False, True, False]
    assert [node.first_rank for node in saving.nodes] == [0, 2, None]
    assert status_after(job(2), *up, draining("b", 2.0), checkpointed("a", 3.0)).waits_for == "b to save"


def test_ranks_stay_when_a_node_is_lost():
    """The ranks of the others are those that they have, and steps of an attempt that ended have no rate."""
    up = (joined("a"), joined("b"), joined("c"), started("a"), started("b"), started("c"), progressed(1.0))
    status = status_after(job(3), *up, lost("a", 2.0))
    assert {node.name: node.first_rank for node in status.nodes} == {"b": 2, "c": 4}
    assert (status.progress.high, status.steps_per_second, status.result.restarts) == (5, None, 0)
    assert status.waits_for == "b, c to end workers"


def test_a_failed_worker_begins_another_attempt():
    """The attempts are those of the result."""
    status = status_after(job(1, max_restarts=1), joined("a"), started("a"), failed("a", 5.0))
    assert (status.phase, status.attempt) == (Phase.STARTING, 2)
    assert [attempt.number for attempt in status.result.attempts] == [1, 2]


def test_very_many_nodes_are_folded():
    """Those that are awaited are named in few words; answers of another attempt, or of nodes without name, change nothing."""
    names = [f"node-{number}" for number in range(1, 31)]
    up = [joined(name, address="10.0.0.1") for name in names]
    late = [started("node-3", attempt=7), started("gone")]
    status = status_after(job(30), *up, *late)
    assert status.waits_for == "node-[1-30] to start workers"


def test_a_node_that_is_released_is_gone():
    """As the journal of any version says: nothing is replayed."""
    builder = StatusBuilder(job(1))
    builder.add(JournalEntry(event=joined("a"), actions=(Release(node="a", why="not needed"),)))
    assert builder.status().nodes == ()
