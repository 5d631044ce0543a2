"""The words the tests are told in: facts with all that does not matter left out, and `told`, which tells them."""

from __future__ import annotations

from typing import Any

from raylaunch.core.actions import Action, AskCheckpoint, Launch, Stop, WakeAt
from raylaunch.core.events import (
    Event,
    ForwardAsked,
    NodeDraining,
    NodeGranted,
    NodeJoined,
    NodeLost,
    Progressed,
    StopAsked,
    Tick,
    WorkersCheckpointed,
    WorkersExited,
    WorkersHung,
    WorkersStarted,
    WorkersStopped,
)
from raylaunch.core.failure import Failure, WorkerError
from raylaunch.core.job import Entrypoint, Job
from raylaunch.core.machine import Machine
from raylaunch.core.phases import Phase

WAITING = (Phase.GATHERING, Phase.STARTING, Phase.STOPPING)


def job(nnodes: int | str = 2, **settings: Any) -> Job:
    """A job that runs train.py on two nodes."""
    return Job(entrypoint=Entrypoint(script="train.py"), nnodes=nnodes, **settings)


def joined(node: str, at: float = 0.0, *, nproc: int = 2, address: str = "", host: str = "") -> NodeJoined:
    """The only agent on its host, unless told otherwise."""
    address = address or f"10.0.0.{ord(node[-1])}"
    return NodeJoined(at=at, node=node, address=address, nproc=nproc, host=host or f"host-of-{node}")


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
    """One worker of the node failed; killed, unless told otherwise."""
    return exited(node, at, failure(node, at, attempt=attempt, **facts), attempt=attempt)


def forward(signal: str, at: float = 0.0) -> ForwardAsked:
    return ForwardAsked(at=at, signal=signal)


def asked(signal: str, at: float = 0.0) -> StopAsked:
    return StopAsked(at=at, signal=signal)


def tick(at: float) -> Tick:
    return Tick(at=at)


def failure(node: str = "a", at: float = 0.0, **facts: Any) -> Failure:
    """Rank 1 of attempt 1 was killed by SIGKILL, unless told otherwise."""
    known: dict[str, Any] = {"attempt": 1, "rank": 1, "local_rank": 1, "pid": 4242, "exit_code": -9}
    return Failure(node=node, at=at, **(known | facts))


def raised(kind: str, message: str = "", *, line: int = 7, hopeless: bool = False) -> dict[str, Any]:
    """For `failed` and `failure`: an exception at a line of train.py ended the worker."""
    trace = f'Traceback (most recent call last):\n  File "/job/train.py", line {line}, in <module>\n{kind}: {message}\n'
    error = WorkerError(type=kind, message=message, traceback=trace, hopeless=hopeless)
    return {"exit_code": 1, "error": error}


def begun(of: Job) -> Machine:
    """A machine that waits for nodes."""
    machine = Machine(of)
    machine.start()
    return machine


def running(*nodes: str, at: float = 1.0, **settings: Any) -> Machine:
    """A machine that runs its first attempt on these nodes."""
    machine = begun(job(**({"nnodes": len(nodes)} | settings)))
    told(machine, *(joined(node, at) for node in nodes))
    if machine.phase is Phase.GATHERING and machine.last_call is not None:
        told(machine, tick(machine.last_call))
    run_on(machine, at=machine.now)
    assert machine.phase is Phase.RUNNING
    return machine


def run_on(machine: Machine, at: float) -> None:
    """All nodes of the roster say that their workers are started."""
    told(machine, *(started(node, at, attempt=machine.attempt) for node in machine.roster))


def told(machine: Machine, *events: Event) -> list[Action]:
    """Everything the machine orders when it is told these facts, one after the other."""
    actions: list[Action] = []
    for event in events:
        actions += machine.handle(event)
        check(machine)
    return actions


def check(machine: Machine) -> None:
    """What is true of a machine at any time."""
    assert machine.phase not in WAITING or machine.deadline is not None, f"{machine.phase} may wait for ever"
    assert machine.awaited <= set(machine.roster), "waits for nodes that have no part in the attempt"
    assert machine.awaited <= set(machine.nodes), "waits for nodes that are gone"
    assert machine.phase is not Phase.STOPPING or machine.awaited, "stops, and waits for nobody"


def launch(attempt: int, *roster: str, why: str) -> Launch:
    return Launch(attempt=attempt, roster=roster, why=why)


def ask(attempt: int, *nodes: str, why: str) -> AskCheckpoint:
    return AskCheckpoint(attempt=attempt, nodes=nodes, why=why)


def stop(attempt: int, *nodes: str, grace: float, why: str, signal: str = "SIGTERM") -> Stop:
    return Stop(attempt=attempt, nodes=nodes, grace=grace, why=why, signal=signal)


def start_by(at: float) -> WakeAt:
    return WakeAt(at=at, why="all workers must be started by then")


def saved_by(at: float) -> WakeAt:
    return WakeAt(at=at, why="all workers must have saved by then")


def gone_by(at: float) -> WakeAt:
    return WakeAt(at=at, why="all workers must be gone by then")
