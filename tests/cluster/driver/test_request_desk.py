"""What people request of the driver, with a fake fleet: from any thread, answered when it was handled."""

from __future__ import annotations

import threading
import time

import pytest

from raylaunch.cluster.driver.driver import Driver
from raylaunch.cluster.driver.request_desk import RequestAccepted, RequestRefusedError
from raylaunch.cluster.local import local_machine
from raylaunch.core.failures.stacks import Stack
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.machine.events_and_actions import (
    NodeDraining,
    ResizeRequested,
    RestartRequested,
    StopRequested,
)
from raylaunch.core.machine.state import Phase
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.record.journal import replay
from raylaunch.node.protocol.messages import DumpStacks
from tests.fakes import FakeFleet, RunRecorder

BY = "ada@login-1"
NO_OTHER_HOST = "the cluster has no other host that could take the place of"
FETCH = 'Current thread 0x1 (most recent call first):\n  File "/job/train.py", line 33 in fetch\n'


def driver_of(fleet: FakeFleet, **job) -> tuple[Driver, RunRecorder]:
    recorder = RunRecorder()
    asked = Job(**({"entrypoint": Entrypoint(script="train.py"), "nnodes": len(fleet.names)} | job))
    return Driver(asked, "run", fleet, recorder, recorder, time.monotonic()), recorder


def restart(driver: Driver):
    return driver.requests.event(lambda at: RestartRequested(at=at, by=BY, save_seconds=60.0))


def resize(driver: Driver, low: int, high: int):
    return driver.requests.event(lambda at: ResizeRequested(at=at, by=BY, min_nodes=low, max_nodes=high))


def stop(driver: Driver):
    return driver.requests.event(lambda at: StopRequested(at=at, signal="SIGTERM", by=BY, save_seconds=60.0))


def refusal(answer) -> str:
    with pytest.raises(RequestRefusedError) as refused:
        answer.result(timeout=100)
    return str(refused.value)


def test_a_run_that_is_restarted_resized_drained_and_stopped():
    """Each change saves first, and no restart is spent. The journal replays to the same decisions."""
    fleet = FakeFleet(3)
    driver, recorder = driver_of(fleet, nnodes="1:3", max_restarts=0)
    answers = []
    fleet.on_launched = {
        1: lambda: answers.append(restart(driver)),
        2: lambda: answers.append(resize(driver, 1, 2)),
        3: lambda: answers.append(driver.requests.drain("node-2", BY)),
        4: lambda: answers.append(stop(driver)),
    }
    assert driver.run().exit_code == 143
    assert [answer.result(timeout=100) for answer in answers] == [
        RequestAccepted(attempt=1, phase=Phase.SAVING, status=f"{BY} requested a restart", can_save=False),
        RequestAccepted(attempt=2, phase=Phase.SAVING, status=f"{BY} requested 1 to 2 nodes", can_save=False),
        RequestAccepted(
            attempt=3, phase=Phase.SAVING, status=f"node-2 is being drained: {BY} requested it", can_save=False
        ),
        RequestAccepted(attempt=4, phase=Phase.SAVING, status=f"{BY} requested the stop", can_save=False),
    ]
    assert [order[:3] for order in fleet.sent if order[0] == "launch"] == [
        *[("launch", f"node-{index}", attempt) for attempt in (1, 2) for index in (1, 2, 3)],
        *[("launch", "node-1", 3), ("launch", "node-2", 3), ("launch", "node-1", 4)],
    ]
    assert [order for order in fleet.sent if order[0] in ("scale", "release", "cordon")] == [
        *[("scale", 2), ("release", "node-3"), ("cordon", "id-node-2"), ("release", "node-2")],
    ]
    assert sum(order[0] == "commit" for order in fleet.sent) == 3 + 3 + 2 + 1
    assert driver.machine.restarts == 0
    assert recorder.entries == replay(
        Job(entrypoint=Entrypoint(script="train.py"), nnodes="1:3", max_restarts=0),
        [entry.event for entry in recorder.entries if entry.event is not None],
    )


def test_whether_the_workers_can_save():
    """They can if they have called `should_checkpoint`, as their heartbeats tell."""
    fleet = FakeFleet(1, nproc=1)
    driver, _ = driver_of(fleet)
    answers = []
    one = WorkerProgress(rank=0, marks=3, age=0.0, first_age=0.0, step=2, asked=2)

    def train() -> None:
        fleet.report("node-1", heartbeat=Heartbeat(attempt=1, marks=(one,)))
        answers.append(stop(driver))

    fleet.on_launched[1] = train
    driver.run()
    assert answers[0].result(timeout=100).can_save


def test_a_request_that_is_refused_is_not_recorded():
    """Whoever requested it hears why."""
    fleet = FakeFleet(2)
    driver, recorder = driver_of(fleet, nprocs=4)
    answers = []
    fleet.on_launched[1] = lambda: (answers.append(resize(driver, 1, 2)), fleet.finish())
    assert driver.run().exit_code == 0
    assert refusal(answers[0]) == "the job asks for a number of workers (`nprocs`), not of nodes"
    assert not any(isinstance(entry.event, ResizeRequested) for entry in recorder.entries)


def test_a_request_that_comes_too_late():
    """One that is in the inbox when the run ends, and one while nothing is handled yet that ends it."""
    fleet = FakeFleet(1)
    driver, _ = driver_of(fleet)
    answers = []
    fleet.on_launched[1] = lambda: (fleet.finish(), answers.extend([restart(driver), driver.requests.stacks()]))
    assert driver.run().exit_code == 0
    assert [refusal(answer) for answer in answers] == ["the run has ended: all 2 workers finished"] * 2


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
    driver, _ = driver_of(fleet)
    answers = []
    fleet.on_launched[1] = lambda: (answers.append(driver.requests.drain(name, BY)), fleet.finish())
    driver.run()
    assert refusal(answers[0]).startswith(why)
    assert len(refusal(answers[0])) < 300


def test_a_node_is_drained_once():
    """By its address too, which all nodes of a host have. The second request is refused."""
    fleet = FakeFleet(1)
    driver, recorder = driver_of(fleet)
    answers = []
    fleet.on_launched[1] = lambda: (
        answers.extend([driver.requests.drain("10.0.0.1", BY), driver.requests.drain("node-1", BY)]),
        fleet.finish(),
    )
    driver.run()
    assert answers[0].result(timeout=100).phase is Phase.RUNNING
    assert refusal(answers[1]) == "node-1 is being drained already"
    assert [entry.event.by for entry in recorder.entries if isinstance(entry.event, NodeDraining)] == [BY]


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
    driver, recorder = driver_of(fleet, nnodes="1:2")
    answers = []
    fleet.on_launched[1] = lambda: (answers.append(driver.requests.drain("node-2", BY, hosts)), fleet.finish())
    driver.run()
    drained = [entry.event.node for entry in recorder.entries if isinstance(entry.event, NodeDraining)]
    if why:
        assert (refusal(answers[0]), drained) == (why, [])
    else:
        assert "; on that host are node-1, node-2, which are all drained" in answers[0].result(timeout=100).status
        assert drained == ["node-1", "node-2"]


def test_a_host_that_others_can_do_without():
    """There is no other host for a new node, but enough nodes are left on that of another one."""
    fleet = FakeFleet(2)
    driver, _ = driver_of(fleet, nnodes="1:2")
    answers, hosts = [], frozenset({"id-node-1", "id-node-2"})
    fleet.on_launched[1] = lambda: (answers.append(driver.requests.drain("node-2", BY, hosts)), fleet.finish())
    driver.run()
    assert answers[0].result(timeout=100).status.startswith("node-2 is being drained")


def test_this_machine_cannot_be_drained(monkeypatch):
    """If all nodes are on it, there is nowhere to go."""
    monkeypatch.setattr(local_machine, "HOST_ID", "id-node-1")
    fleet = FakeFleet(1)
    driver, _ = driver_of(fleet)
    answers = []
    fleet.on_launched[1] = lambda: (answers.append(driver.requests.drain("node-1", BY)), fleet.finish())
    driver.run()
    assert refusal(answers[0]) == "the run is on this machine alone, and cannot leave it"


# Stacks.


def test_the_stacks_of_a_healthy_run():
    """Of all ranks, the largest group first. Two who ask at the same time get one sample."""
    fleet = FakeFleet(2)
    driver, _ = driver_of(fleet)
    for node, ranks in (("node-1", (0, 1)), ("node-2", (3,))):  # rank 2 has ended
        fleet.stacks[node] = tuple(Stack(rank=rank, state="S", text=FETCH) for rank in ranks)
    answers = []
    fleet.on_launched[1] = lambda: answers.extend([driver.requests.stacks(), driver.requests.stacks()])
    thread = threading.Thread(target=driver.run, daemon=True)
    thread.start()
    until = time.monotonic() + 100
    while len(answers) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    found = answers[0].result(timeout=100)
    assert answers[1].result(timeout=100) is found
    assert (found.attempt, [stack.rank for stack in found.stacks]) == (1, [0, 1, 3])
    assert [str(group) for group in found.groups] == ["3 ranks at train.py:33 in fetch: 0-1, 3"]
    fleet.finish()
    thread.join(100)
    assert [order for order in fleet.sent if order[0] == "stacks"] == [("stacks", "node-1", 1), ("stacks", "node-2", 1)]


def test_the_stacks_of_a_node_that_does_not_answer():
    """It is named in the group of those that did not."""
    fleet = FakeFleet(2)
    driver, _ = driver_of(fleet)
    fleet.stacks["node-1"] = (Stack(rank=0, state="S", text=FETCH), Stack(rank=1, state="S", text=FETCH))
    fleet.overrides[DumpStacks] = lambda node, order: fleet.obey(node, order) if node == "node-1" else None
    answers = []

    def ask() -> None:
        answers.append(driver.requests.stacks())
        answers[0].add_done_callback(lambda _: fleet.finish())

    fleet.on_launched[1] = ask
    driver.run()
    texts = [str(group) for group in answers[0].result(timeout=100).groups]
    assert texts == ["2 ranks at train.py:33 in fetch: 0-1", "2 ranks, did not answer: 2-3"]


def test_no_stacks_without_workers():
    """While the run waits for nodes."""
    fleet = FakeFleet(1)
    fleet.start = lambda tell: None
    driver, _ = driver_of(fleet, placement_timeout=0.2)
    answer = driver.requests.stacks()
    assert driver.run().exit_code == 3
    assert refusal(answer) == "no workers run: waiting for nodes"
