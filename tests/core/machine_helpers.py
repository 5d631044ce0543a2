"""Short constructors of events, actions and machines with default values, and checks at every event."""

from __future__ import annotations

import copy
import math
from dataclasses import fields
from typing import Any

from raylaunch.core.failures.failure import Failure, WorkerError
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import (
    Action,
    DriverReplaced,
    Event,
    ForwardRequested,
    Launch,
    NodeDraining,
    NodeGranted,
    NodeJoined,
    NodeLost,
    Progressed,
    ReportUnsaved,
    RequestCheckpoint,
    ResizeRequested,
    RestartRequested,
    SetTimer,
    Stop,
    StopRequested,
    Tick,
    Uncordon,
    WorkersCheckpointed,
    WorkersExited,
    WorkersHung,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.save_time import DeadlineSet
from raylaunch.core.machine.state import AwaitingNodes, Gathering, Phase, ResizeTimes

BY = "ada@login-1"
WAITING = (Phase.GATHERING, Phase.STARTING, Phase.SAVING, Phase.STOPPING)


def job(nnodes: int | str = 2, **settings: Any) -> Job:
    """Return a job that runs train.py on two nodes."""
    return Job(entrypoint=Entrypoint(script="train.py"), nnodes=nnodes, **settings)


def joined(node: str, at: float = 0.0, *, nproc: int = 2, address: str = "", host: str = "") -> NodeJoined:
    """By default each node has a host of its own."""
    address = address or f"10.0.0.{ord(node[-1])}"
    return NodeJoined(at=at, node=node, address=address, nproc=nproc, host=host or f"host-of-{node}")


def uncordon(node: str) -> Uncordon:
    """Return the action by which the host of this node, which was excluded for some time, may be used again."""
    return Uncordon(host=f"host-of-{node}", why=f"{joined(node).address} may be used again: its time is over")


def granted(node: str, at: float = 0.0) -> NodeGranted:
    return NodeGranted(at=at, node=node, address="10.0.0.1")


def lost(node: str, at: float = 0.0) -> NodeLost:
    return NodeLost(at=at, node=node, why="its agent died")


def draining(node: str, at: float = 0.0, *, deadline: float = 1e6) -> NodeDraining:
    return NodeDraining(at=at, node=node, deadline=deadline, why="spot")


def started(node: str, at: float = 0.0, *, attempt: int = 1) -> WorkersStarted:
    return WorkersStarted(at=at, attempt=attempt, node=node)


def exited(node: str, at: float = 0.0, *failures: Failure, attempt: int = 1) -> WorkersExited:
    return WorkersExited(at=at, attempt=attempt, node=node, failures=failures)


def finished(node: str, at: float = 0.0, *, attempt: int = 1) -> WorkersExited:
    return exited(node, at, attempt=attempt)


def stopped(node: str, at: float = 0.0, *failures: Failure, attempt: int = 1) -> WorkersStopped:
    return WorkersStopped(at=at, attempt=attempt, node=node, failures=failures)


def checkpointed(node: str, at: float = 0.0, *, step: int | None = 7, attempt: int = 1) -> WorkersCheckpointed:
    return WorkersCheckpointed(at=at, attempt=attempt, node=node, step=step)


def hung(node: str, at: float = 0.0, *, attempt: int = 1, **facts: Any) -> WorkersHung:
    return WorkersHung(at=at, attempt=attempt, failures=(failure(node, at, attempt=attempt, **facts),))


def progressed(at: float = 0.0, *, attempt: int = 1) -> Progressed:
    return Progressed(at=at, attempt=attempt, marks=5, low=5, high=5, marked=at)


def failed(node: str, at: float = 0.0, *, attempt: int = 1, **facts: Any) -> WorkersExited:
    """Return the exit of one worker with a failure; by default it was killed."""
    return exited(node, at, failure(node, at, attempt=attempt, **facts), attempt=attempt)


def forward_requested(signal: str, at: float = 0.0) -> ForwardRequested:
    return ForwardRequested(at=at, signal=signal)


def stop_requested(signal: str, at: float = 0.0) -> StopRequested:
    return StopRequested(at=at, signal=signal)


def stop_command(at: float = 0.0, *, save_seconds: float = 600.0, now: bool = False) -> StopRequested:
    """A person requested the stop by a command."""
    return StopRequested(at=at, signal="SIGTERM", by=BY, save_seconds=save_seconds, now=now)


def deadline_set(deadline: float, at: float = 0.0, why: str = "Slurm ends job 7") -> DeadlineSet:
    return DeadlineSet(at=at, deadline=deadline, why=why)


def signalled(signal: str, at: float, grace: float = 60.0) -> list[Event]:
    """Return the events of a signal to the driver of a job that has a `grace`."""
    limit = deadline_set(at + grace, at, why=f"{signal} leaves {grace:g} s")
    return [limit, StopRequested(at=at, signal=signal, save_seconds=grace)]


def restart_requested(at: float = 0.0, *, save_seconds: float = 600.0) -> RestartRequested:
    return RestartRequested(at=at, by=BY, save_seconds=save_seconds)


def resize_requested(low: int, high: int, at: float = 0.0) -> ResizeRequested:
    return ResizeRequested(at=at, by=BY, min_nodes=low, max_nodes=high)


def drain_requested(node: str, at: float = 0.0) -> NodeDraining:
    return NodeDraining(at=at, node=node, deadline=at + 1e9, why=f"{BY} requested it", by=BY)


def replaced(at: float, driver: int = 2, attempt: int = 0) -> DriverReplaced:
    return DriverReplaced(
        at=at,
        driver=driver,
        process_seconds=0.9,
        state_seconds=0.1,
        prepare_seconds=0.2,
        agents_seconds=0.05,
        attempt=attempt,
    )


def tick(at: float) -> Tick:
    return Tick(at=at)


def failure(node: str = "a", at: float = 0.0, **facts: Any) -> Failure:
    """By default rank 1 of attempt 1 was killed by SIGKILL."""
    state_fields: dict[str, Any] = {"attempt": 1, "rank": 1, "local_rank": 1, "pid": 4242, "exit_code": -9}
    return Failure(node=node, at=at, **(state_fields | facts))


def raised(kind: str, message: str = "", *, line: int = 7, hopeless: bool = False) -> dict[str, Any]:
    """Return facts for `failed` and `failure`: an exception at a line of train.py ended the worker."""
    trace = f'Traceback (most recent call last):\n  File "/job/train.py", line {line}, in <module>\n{kind}: {message}\n'
    error = WorkerError(type=kind, message=message, traceback=trace, hopeless=hopeless)
    return {"exit_code": 1, "error": error}


def gathering_machine(a_job: Job) -> Machine:
    """Return a machine in GATHERING, without nodes."""
    machine = Machine(a_job)
    machine.start()
    return machine


def running_machine(*nodes: str, at: float = 1.0, **settings: Any) -> Machine:
    """Return a machine that runs its first attempt on these nodes."""
    machine = gathering_machine(job(**({"nnodes": len(nodes)} | settings)))
    handle_all(machine, *(joined(node, at) for node in nodes))
    if isinstance(machine.state, Gathering) and machine.state.last_call is not None:
        handle_all(machine, tick(machine.state.last_call))
    start_all_workers(machine, at=machine.now)
    assert machine.phase is Phase.RUNNING
    return machine


def start_all_workers(machine: Machine, at: float) -> None:
    """Report that all nodes of the roster have started their workers."""
    handle_all(machine, *(started(node, at, attempt=machine.attempt) for node in machine.roster))


def handle_all(machine: Machine, *events: Event) -> list[Action]:
    """Hand these events to the machine one after the other, and return all actions."""
    return [action for event in events for action in handle_checked(machine, event)]


def handle_checked(machine: Machine, event: Event) -> list[Action]:
    """Hand one event to the machine, check the invariants, and return the actions."""
    before, reported = machine.phase, machine.needs_progress(event)
    actions = machine.handle(event)
    check_invariants(machine)
    ended = before is Phase.RUNNING and machine.phase not in (Phase.RUNNING, Phase.SAVING)
    ended |= before is Phase.SAVING and machine.phase is not Phase.SAVING
    assert reported or not ended, "an attempt that may have made steps ended, but `needs_progress` was False before"
    return actions


def check_invariants(machine: Machine) -> None:
    """Assert the invariants of a machine: deadlines are finite, and only present nodes are awaited."""
    state = machine.state
    assert machine.phase not in WAITING or math.isfinite(state.deadline), f"{machine.phase} has no finite deadline"
    if isinstance(state, AwaitingNodes):
        assert state.awaited <= set(machine.roster), "waits for nodes outside the attempt"
        assert state.awaited <= set(machine.nodes), "waits for nodes that are not members"
        assert len(state.awaited) > 0, f"{machine.phase} waits for no node"


def state_fields(machine: Machine) -> dict[str, Any]:
    """Return a copy of all data of the phase and the world. Fields that the phase lacks are None or empty.

    Both may have a deadline: it is the phase's.
    """
    phase = copy_fields(machine.state)
    resize = copy_fields(phase.pop("resize", ResizeTimes()))
    absent = {"deadline": None, "awaited": set(), "backoff_until": None, "ending": None}
    return copy_fields(machine.world) | absent | resize | phase | {"phase": machine.phase}


def copy_fields(data: object) -> dict[str, Any]:
    return {field.name: copy.copy(getattr(data, field.name)) for field in fields(data)}


def launch(attempt: int, *roster: str, why: str) -> Launch:
    return Launch(attempt=attempt, roster=roster, why=why)


def request_checkpoint(attempt: int, *nodes: str, why: str) -> RequestCheckpoint:
    return RequestCheckpoint(attempt=attempt, nodes=nodes, why=why)


def stop(attempt: int, *nodes: str, grace: float, why: str, signal: str = "SIGTERM") -> Stop:
    return Stop(attempt=attempt, nodes=nodes, grace=grace, why=why, signal=signal)


def report_unsaved(*nodes: str, attempt: int = 1) -> ReportUnsaved:
    return ReportUnsaved(attempt=attempt, why=f"{', '.join(nodes)} did not save in time")


def start_timer(at: float) -> SetTimer:
    return SetTimer(at=at, why="all workers must be started by then")


def saving_timer(at: float) -> SetTimer:
    return SetTimer(at=at, why="all workers must have saved by then")


def stopping_timer(at: float) -> SetTimer:
    return SetTimer(at=at, why="all workers must be gone by then")
