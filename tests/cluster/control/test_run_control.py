"""What people request of a run, with a fake fleet: from any thread, answered when the driver has handled it."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from raylaunch.cluster.control.control_messages import (
    Accepted,
    DrainNode,
    GetStacks,
    RefusedError,
    ResizeRun,
    RestartRun,
    RunChange,
    StacksCollected,
    StopRun,
)
from raylaunch.cluster.control.run_control import RunControl
from raylaunch.cluster.driver.driver import Driver
from raylaunch.cluster.local import local_machine
from raylaunch.core.failures.stacks import Stack
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import (
    NodeDraining,
    ResizeRequested,
)
from raylaunch.core.machine.state import Phase
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.record.journal import replay
from raylaunch.node.protocol.node_goal import DumpStacks
from tests.fakes import FakeFleet, RunRecorder

BY = "ada@login-1"
NO_OTHER_HOST = "the cluster has no other host that could take the place of"
FETCH = 'Current thread 0x1 (most recent call first):\n  File "/job/train.py", line 33 in fetch\n'


class Run:
    """A run that is pretended, and what is asked of it."""

    def __init__(self, fleet: FakeFleet, hosts: frozenset[str] | None = None, **job) -> None:
        self.recorder = RunRecorder()
        asked = Job(**({"entrypoint": Entrypoint(script="train.py"), "nnodes": len(fleet.names)} | job))
        self.driver = Driver(asked, "run", fleet, self.recorder, self.recorder, time.monotonic())
        self.control = RunControl(self.driver, FakeFolder(), "raylaunch", fleet, lambda: hosts, lambda _: "")
        self.answers: list[Future[Accepted]] = []

    def change(self, request: RunChange) -> None:
        self.answers.append(self.control.change(request))

    def refusal(self, index: int = 0) -> str:
        with pytest.raises(RefusedError) as refused:
            self.answers[index].result(timeout=100)
        return str(refused.value)


class FakeFolder:
    recorded = SimpleNamespace(status=lambda: None)


RESTART = RestartRun(by=BY, save_seconds=60.0)
STOP = StopRun(by=BY, save_seconds=60.0)


def resize(low: int, high: int) -> ResizeRun:
    return ResizeRun(by=BY, min_nodes=low, max_nodes=high)


def drain(node: str) -> DrainNode:
    return DrainNode(by=BY, node=node)


def test_a_run_that_is_restarted_resized_drained_and_stopped():
    """Each change saves first, and no restart is spent. The journal replays to the same decisions."""
    fleet = FakeFleet(3)
    run = Run(fleet, nnodes="1:3", max_restarts=0)
    fleet.on_launched = {
        1: lambda: run.change(RESTART),
        2: lambda: run.change(resize(1, 2)),
        3: lambda: run.change(drain("node-2")),
        4: lambda: run.change(STOP),
    }
    assert run.driver.run().exit_code == 143
    assert [answer.result(timeout=100) for answer in run.answers] == [
        Accepted(attempt=1, phase=Phase.SAVING, status=f"{BY} requested a restart", can_save=False),
        Accepted(attempt=2, phase=Phase.SAVING, status=f"{BY} requested 1 to 2 nodes", can_save=False),
        Accepted(attempt=3, phase=Phase.SAVING, status=f"node-2 is being drained: {BY} requested it", can_save=False),
        Accepted(attempt=4, phase=Phase.SAVING, status=f"{BY} requested the stop", can_save=False),
    ]
    assert [order[:3] for order in fleet.sent if order[0] == "launch"] == [
        *[("launch", f"node-{index}", attempt) for attempt in (1, 2) for index in (1, 2, 3)],
        *[("launch", "node-1", 3), ("launch", "node-2", 3), ("launch", "node-1", 4)],
    ]
    assert [order for order in fleet.sent if order[0] in ("scale", "release", "cordon")] == [
        *[("scale", 2), ("release", "node-3"), ("cordon", "id-node-2"), ("release", "node-2")],
    ]
    assert sum(order[0] == "commit" for order in fleet.sent) == 3 + 3 + 2 + 1
    assert run.driver.machine.restarts == 0
    assert run.recorder.entries == replay(
        Job(entrypoint=Entrypoint(script="train.py"), nnodes="1:3", max_restarts=0),
        [entry.event for entry in run.recorder.entries if entry.event is not None],
    )


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (2, f"requesting a checkpoint: {BY} requested the stop"),
        (
            None,
            (
                f"{BY} requested the stop; the workers have not called `should_checkpoint`, and may be stopped without "
                "a checkpoint"
            ),
        ),
    ],
)
def test_whether_the_workers_can_save(asked, told):
    """They can if they have called `should_checkpoint`, as their heartbeats tell. The run's terminal says it, too."""
    fleet = FakeFleet(1, nproc=1)
    run = Run(fleet)
    one = WorkerProgress(rank=0, marks=3, age=0.0, first_age=0.0, step=2, asked=asked)

    def train() -> None:
        fleet.report("node-1", heartbeat=Heartbeat(attempt=1, marks=(one,)))
        run.change(STOP)

    fleet.on_launched[1] = train
    run.driver.run()
    assert run.answers[0].result(timeout=100).can_save is (asked is not None)
    assert told in run.recorder.lines


def test_a_request_that_is_refused_is_not_recorded():
    """Whoever requested it hears why."""
    fleet = FakeFleet(2)
    run = Run(fleet, nprocs=4)
    fleet.on_launched[1] = lambda: (run.change(resize(1, 2)), fleet.finish())
    assert run.driver.run().exit_code == 0
    assert run.refusal() == "the job asks for a number of workers (`nprocs`), not of nodes"
    assert not any(isinstance(entry.event, ResizeRequested) for entry in run.recorder.entries)


def test_a_request_that_comes_too_late():
    """One that is in the inbox when the run ends, and one while nothing is handled yet that ends it."""
    fleet = FakeFleet(1)
    run = Run(fleet)
    fleet.on_launched[1] = lambda: (fleet.finish(), run.change(RESTART))
    assert run.driver.run().exit_code == 0
    assert run.answers[0].cancelled()
    run.control.over()
    for request in (RESTART, GetStacks()):
        with pytest.raises(RefusedError, match="the run has ended: all 2 workers finished"):
            run.control.answer(request)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("node-9", "the run has no node node-9: there are node-1 (10.0.0.1), node-2 (10.0.0.1)"),
        ("\x1b[2Jx" * 50, "the run has no node "),
    ],
)
def test_a_node_that_is_not_there_cannot_be_drained(name, why):
    """The answer names those that are."""
    fleet = FakeFleet(2)
    run = Run(fleet)
    fleet.on_launched[1] = lambda: (run.change(drain(name)), fleet.finish())
    run.driver.run()
    assert run.refusal().startswith(why)
    assert len(run.refusal()) < 300


def test_a_node_is_drained_once():
    """By its address too, which all nodes of a host have. The second request is refused."""
    fleet = FakeFleet(1)
    run = Run(fleet)
    fleet.on_launched[1] = lambda: (run.change(drain("10.0.0.1")), run.change(drain("node-1")), fleet.finish())
    run.driver.run()
    assert run.answers[0].result(timeout=100).phase is Phase.RUNNING
    assert run.refusal(1) == "node-1 is being drained already"
    assert [entry.event.by for entry in run.recorder.entries if isinstance(entry.event, NodeDraining)] == [BY]


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        (
            frozenset({"a"}),
            f"{NO_OTHER_HOST} node-2, and node-1 is on the same host: `raylaunch resize 1` gives up a node",
        ),
        (frozenset({"a", "b"}), ""),
        (None, ""),
    ],
)
def test_a_host_with_several_nodes(hosts, why):
    """All of them leave it, which is said; or none, if there is no other host and the run needs one."""
    fleet = FakeFleet(2)
    fleet.hosts = dict.fromkeys(fleet.names, "a")
    run = Run(fleet, hosts, nnodes="1:2")
    fleet.on_launched[1] = lambda: (run.change(drain("node-2")), fleet.finish())
    run.driver.run()
    drained = [entry.event.node for entry in run.recorder.entries if isinstance(entry.event, NodeDraining)]
    if why:
        assert (run.refusal(), drained) == (why, [])
    else:
        assert "; on that host are node-1, node-2, which are all drained" in run.answers[0].result(timeout=100).status
        assert drained == ["node-1", "node-2"]


def test_a_host_that_others_can_do_without():
    """There is no other host for a new node, but enough nodes are left on that of another one."""
    fleet = FakeFleet(2)
    run = Run(fleet, frozenset({"id-node-1", "id-node-2"}), nnodes="1:2")
    fleet.on_launched[1] = lambda: (run.change(drain("node-2")), fleet.finish())
    run.driver.run()
    assert run.answers[0].result(timeout=100).status.startswith("node-2 is being drained")


def test_this_machine_cannot_be_drained(monkeypatch):
    """If all nodes are on it, there is nowhere to go."""
    monkeypatch.setattr(local_machine, "HOST_ID", "id-node-1")
    fleet = FakeFleet(1)
    run = Run(fleet)
    fleet.on_launched[1] = lambda: (run.change(drain("node-1")), fleet.finish())
    run.driver.run()
    assert run.refusal() == "the run is on this machine alone, and cannot leave it"


# Stacks.


def stacks_of(run: Run, fleet: FakeFleet, clients: int = 1) -> list[StacksCollected]:
    """Return what several who ask at the same time are told, while all workers run."""
    running = threading.Event()
    fleet.on_launched[1] = running.set
    thread = threading.Thread(target=run.driver.run, daemon=True)
    thread.start()
    assert running.wait(100)
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(lambda _: run.control.answer(GetStacks(ranks=(3, 0))), range(clients)))
    fleet.finish()
    thread.join(100)
    return found


def test_the_stacks_of_a_healthy_run():
    """Of all ranks, the largest group first, and whole where that was asked for. Several may ask at the same time."""
    fleet = FakeFleet(2)
    run = Run(fleet)
    for node, ranks in (("node-1", (0, 1)), ("node-2", (3,))):  # rank 2 has ended
        fleet.stacks[node] = tuple(Stack(rank=rank, state="S", text=FETCH) for rank in ranks)
    orders = []
    fleet.overrides[DumpStacks] = lambda node, order: (orders.append((node, order.in_full)), fleet.obey(node, order))
    for found in stacks_of(run, fleet, clients=2):
        assert (found.attempt, [stack.rank for stack in found.stacks]) == (1, [0, 3])
        assert [str(group) for group in found.groups] == ["3 ranks at train.py:33 in fetch: 0-1, 3"]
    assert {*orders} == {("node-1", (0,)), ("node-2", (3,))}


def test_the_stacks_of_a_node_that_does_not_answer():
    """It is named in the group of those that did not."""
    fleet = FakeFleet(2)
    run = Run(fleet)
    fleet.stacks["node-1"] = (Stack(rank=0, state="S", text=FETCH), Stack(rank=1, state="S", text=FETCH))
    fleet.overrides[DumpStacks] = lambda node, order: fleet.obey(node, order) if node == "node-1" else None
    (found,) = stacks_of(run, fleet)
    assert [str(group) for group in found.groups] == [
        "2 ranks at train.py:33 in fetch: 0-1",
        "2 ranks, did not answer: 2-3",
    ]


def test_no_stacks_without_workers():
    """While the run waits for nodes."""
    fleet = FakeFleet(1)
    fleet.start = lambda tell: None
    run = Run(fleet, placement_timeout=1.0)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(run.control.answer, GetStacks())
        assert run.driver.run().exit_code == 3
        with pytest.raises(RefusedError, match="no workers run: waiting for nodes"):
            asked.result(timeout=100)
