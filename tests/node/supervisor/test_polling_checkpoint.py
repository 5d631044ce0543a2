"""On request all workers of a node save at the same step, and the node reports that once."""

from __future__ import annotations

import os
import select

import pytest

from raylaunch.core.machine.events_and_actions import WorkersCheckpointed, WorkersExited, WorkersStarted, WorkersStopped
from raylaunch.core.placement.environment import Member, assign
from raylaunch.node.protocol.node_goal import CommitCheckpoint, ProposeCheckpoint, StopWorkers
from raylaunch.node.protocol.node_status import StepProposed
from raylaunch.node.supervisor.attempt_state import AttemptState
from raylaunch.node.supervisor.supervisor import CheckpointPoll, Saved
from raylaunch.worker.heartbeats.shared_page import (
    AWAITS_COPY,
    COPIED_STEPS,
    POLLED_STEP,
    PROGRESS,
    SAVED_STEP,
    WAITING_FOR_STOP,
    SharedPage,
    slot_offset,
)
from tests.node.harness import SECONDS, MessagePipe, Node, until

pytestmark = pytest.mark.timeout(300)

TRAINS = """
    import itertools, time
    from raylaunch.worker import checkpointed, should_checkpoint
    for step in itertools.count():
        time.sleep(0.001)
        if step == 4:
            say("up")
        if should_checkpoint(step):
            print(step)
            checkpointed(step)
"""
AHEAD = 500
"""So many steps usually take the workers longer than it takes until they read the proposal."""
POLLS_ONCE = """
    import os, time
    from raylaunch.worker import checkpointed, should_checkpoint
    asks = os.environ["RANK"] == "0"
    should_checkpoint(0)
    say("up")
    if asks:
        while not should_checkpoint(1):
            time.sleep(0.001)
        say("asked")
        checkpointed(1)
    open("go").read()
"""


def start_workers(node: Node, pipe: MessagePipe, text: str, nproc: int) -> None:
    node.launch(node.script(text), nproc=nproc)
    pipe.read_lines(nproc)
    node.wait(WorkersStarted)


def propose_checkpoint(node: Node, step: int, attempt: int = 0) -> None:
    node.supervisor.handle(ProposeCheckpoint(attempt=attempt or node.attempt, step=step))


def request_checkpoint(node: Node, step: int) -> None:
    """Propose and commit a step, as the driver does if this is the only node."""
    propose_checkpoint(node, step)
    assert node.wait(StepProposed).step == step
    node.supervisor.handle(CommitCheckpoint(attempt=node.attempt, step=step))


def propose_ahead(node: Node, ahead: int = AHEAD) -> StepProposed:
    """Propose steps until one is ahead of all workers, as the driver does: on a busy machine the first may be too early."""
    while True:
        step = highest_step(node) + ahead
        propose_checkpoint(node, step)
        proposed = node.wait(StepProposed)
        assert (proposed.node, proposed.attempt, proposed.step) == ("node-0", node.attempt, step)
        if proposed.reached < step:
            return proposed
        ahead *= 2


def request_ahead(node: Node, ahead: int = AHEAD) -> int:
    """Propose and commit a step that is ahead of all workers; return it."""
    step = propose_ahead(node, ahead).step
    node.supervisor.handle(CommitCheckpoint(attempt=node.attempt, step=step))
    return step


def highest_step(node: Node) -> int:
    heartbeat = node.supervisor.heartbeat()
    assert heartbeat is not None
    return max(mark.asked or 0 for mark in heartbeat.marks)


def test_all_workers_save_at_the_committed_step(either: Node, pipe: MessagePipe) -> None:
    """Each saves there and at no step before; then they wait until they are stopped."""
    start_workers(either, pipe, TRAINS, nproc=3)
    step = request_ahead(either)
    answer = either.wait(WorkersCheckpointed)
    assert (answer.attempt, answer.node, answer.step) == (either.attempt, "node-0", step)
    assert either.events_within(0.1) == []
    stopped = either.stop(grace=100 * SECONDS)
    assert [late.signal for late in stopped.failures] == ["SIGTERM"] * 3
    assert [(either.rank_folder(rank) / "stdout.log").read_text() for rank in range(3)] == [f"{step}\n"] * 3


def test_workers_wait_at_a_proposed_step(node: Node, pipe: MessagePipe) -> None:
    """The node reports how far they were. At the step they neither save nor continue before it is committed."""
    start_workers(node, pipe, TRAINS, nproc=2)
    step = propose_ahead(node).step
    until(lambda: highest_step(node) == step, "they do not reach the step")
    assert node.events_within(0.1) == []
    assert highest_step(node) == step
    node.supervisor.handle(CommitCheckpoint(attempt=node.attempt, step=step))
    assert node.wait(WorkersCheckpointed).step == step


def test_a_later_step_replaces_one_that_was_passed(node: Node, pipe: MessagePipe) -> None:
    """Workers that wait at the first step continue to the second, and all save there."""
    start_workers(node, pipe, TRAINS, nproc=3)
    propose_checkpoint(node, highest_step(node) - 3)
    proposed = node.wait(StepProposed)
    assert proposed.reached >= proposed.step
    propose_checkpoint(node, proposed.reached + 2)
    later = node.wait(StepProposed)
    assert later.reached < later.step
    node.supervisor.handle(CommitCheckpoint(attempt=node.attempt, step=proposed.step))  # a late commit is ignored
    assert node.events_within(0.1) == []
    node.supervisor.handle(CommitCheckpoint(attempt=node.attempt, step=later.step))
    assert node.wait(WorkersCheckpointed).step == later.step
    node.stop(grace=100 * SECONDS)
    assert [(node.rank_folder(rank) / "stdout.log").read_text() for rank in range(3)] == [f"{later.step}\n"] * 3


def test_a_worker_that_waits_at_a_proposed_step_handles_a_signal(node: Node, pipe: MessagePipe) -> None:
    """A stop withdraws the proposal: a script with a handler of its own continues, and ends as it likes."""
    text = TRAINS.replace("import itertools, time", "import itertools, signal, sys, time").replace(
        "for step in", "ended = []\n    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))\n    for step in"
    )
    start_workers(
        node,
        pipe,
        text.replace("        if step == 4:", "        if ended:\n            sys.exit(3)\n        if step == 4:"),
        nproc=1,
    )
    step = propose_ahead(node).step
    until(lambda: highest_step(node) == step, "it does not reach the step")
    stopped = node.stop(grace=100 * SECONDS)
    assert [late.exit_code for late in stopped.failures] == [3]


def test_nothing_is_polled_without_a_request(node: Node, pipe: MessagePipe) -> None:
    """The supervisor sleeps until something happens."""
    start_workers(node, pipe, TRAINS, nproc=1)
    request_ahead(node)
    node.wait(WorkersCheckpointed)
    assert select.select([node.supervisor.fileno()], [], [], 0.2)[0] == []


def test_a_script_that_polls_only_some_steps(node: Node, pipe: MessagePipe) -> None:
    """It calls `should_checkpoint` at every tenth step, saves at the next of these, and that step is reported."""
    start_workers(node, pipe, TRAINS.replace("if should", "if step % 10 == 3 and should"), nproc=2)
    step = request_ahead(node, AHEAD + 4)
    answer = node.wait(WorkersCheckpointed)
    assert answer.step is not None
    assert answer.step >= step
    assert answer.step % 10 == 3


def test_a_worker_that_never_polls_is_not_waited_for(node: Node, pipe: MessagePipe) -> None:
    """It cannot be asked to save. The node reports that at once, so the others do not wait."""
    text = POLLS_ONCE.replace("should_checkpoint(0)", "should_checkpoint(0) if asks else None")
    os.mkfifo(node.folder / "go")
    start_workers(node, pipe, text, nproc=2)
    propose_checkpoint(node, 1)
    assert node.wait(WorkersCheckpointed).step is None


def test_a_proposal_before_the_workers_start_is_declined(node: Node) -> None:
    """The node answers at once, with no step."""
    node.end_attempt()
    node.launch(node.script("import time\ntime.sleep(3600)"))
    propose_checkpoint(node, 5)
    answer = node.wait(WorkersCheckpointed)
    assert (answer.attempt, answer.step) == (node.attempt, None)


def test_a_worker_that_asks_just_after_the_proposal_was_declined_is_not_waited_for() -> None:
    """It does not see the proposal. Whether it asks is looked at once, so the answer cannot depend on that moment."""
    page, fd = SharedPage.create()
    os.close(fd)
    poll = CheckpointPoll(page)
    (part,) = assign(1, [Member(node="node-0", address="127.0.0.1", nproc=1)])
    state = AttemptState(assignment=part, pids=(1,))
    assert poll.propose(ProposeCheckpoint(attempt=1, step=7), state) is None
    page.numbers[slot_offset(0) + POLLED_STEP] = 3
    answer = poll.poll(state)
    assert answer is not None
    assert (answer.attempt, answer.step) == (1, None)


def test_a_worker_that_is_expected_to_ask_is_waited_for() -> None:
    """Those of an earlier attempt did. One that has made many steps without asking is not waited for."""
    page, fd = SharedPage.create()
    os.close(fd)
    poll = CheckpointPoll(page)
    (part,) = assign(2, [Member(node="node-0", address="127.0.0.1", nproc=2)])
    state = AttemptState(assignment=part, pids=(1, 2))
    early, late = slot_offset(0), slot_offset(1)
    page.numbers[early + POLLED_STEP] = 4
    order = ProposeCheckpoint(attempt=2, step=7, expected=True)
    assert poll.propose(order, state) == 3
    assert poll.poll(state) is None
    page.numbers[early + WAITING_FOR_STOP] = 1
    page.numbers[early + SAVED_STEP] = page.numbers[late + SAVED_STEP] = 8
    assert poll.poll(state) is None
    page.numbers[late + POLLED_STEP] = 8
    page.numbers[late + WAITING_FOR_STOP] = 1
    answer = poll.poll(state)
    assert answer is not None
    assert answer.step == 7

    page.numbers[late + POLLED_STEP] = 0
    assert poll.propose(order, state) == 3
    page.numbers[late + PROGRESS] = 10
    answer = poll.poll(state)
    assert answer is not None
    assert answer.step is None
    assert poll.propose(order, state) is None


def test_workers_that_wait_for_work_are_not_waited_for() -> None:
    """They have nothing to save, and need not come to the step; what they saved before is copied where a node goes."""
    page, fd = SharedPage.create()
    os.close(fd)
    poll = CheckpointPoll(page)
    (part,) = assign(2, [Member(node="node-0", address="127.0.0.1", nproc=2)])
    state = AttemptState(assignment=part, pids=(1, 2))
    order = ProposeCheckpoint(attempt=2, step=20, expected=True)
    for slot in (slot_offset(0), slot_offset(1)):
        page.numbers[slot + POLLED_STEP] = page.numbers[slot + SAVED_STEP] = 8
        assert poll.propose(order, state) == 7
        assert poll.poll(state) is None
        page.numbers[slot + WAITING_FOR_STOP] = 1
    assert poll.poll(state) == Saved(2, 7)

    page.numbers[AWAITS_COPY] = 1
    assert poll.propose(order, state) == 7
    assert poll.poll(state) is None
    page.numbers[COPIED_STEPS] = 8
    assert poll.poll(state) == Saved(2, 7)

    page.numbers[slot_offset(0) + SAVED_STEP] = 0
    assert poll.propose(order, state) == 7
    assert poll.poll(state) == Saved(2, None)


@pytest.mark.parametrize("which", [-1, 1])
def test_a_proposal_for_another_attempt_changes_nothing(node: Node, pipe: MessagePipe, which: int) -> None:
    """The current one trains on."""
    start_workers(node, pipe, TRAINS, nproc=1)
    propose_checkpoint(node, highest_step(node) + 1, node.attempt + which)
    before = highest_step(node)
    until(lambda: highest_step(node) > before + 5, "it does not train on")
    assert node.events_within(0.1) == []


def test_a_worker_that_ends_meanwhile_is_not_waited_for(node: Node, pipe: MessagePipe) -> None:
    """There is no answer while it lives and has not saved; there is one when it has ended."""
    os.mkfifo(node.folder / "go")
    start_workers(node, pipe, POLLS_ONCE, nproc=2)
    request_checkpoint(node, 1)
    assert pipe.read_lines() == ["asked"]
    assert node.events_within(0.1) == []
    (node.folder / "go").write_text("go")
    assert node.wait(WorkersCheckpointed).step == 1


def test_a_proposal_after_the_workers_have_ended_is_declined(node: Node) -> None:
    """The node answers how far they had come, too: workers of other nodes may wait at that step, or before it."""
    node.run(node.script("from raylaunch.worker import should_checkpoint\nshould_checkpoint(5)"), nproc=2)
    propose_checkpoint(node, 1)
    assert node.wait(StepProposed).reached == 5
    assert node.wait(WorkersCheckpointed).step is None


def test_a_worker_that_has_ended_had_passed_the_step() -> None:
    """The step must be one that no worker has passed, whether or not it lives."""
    page, fd = SharedPage.create()
    os.close(fd)
    (part,) = assign(1, [Member(node="node-0", address="127.0.0.1", nproc=2)])
    state = AttemptState(assignment=part, pids=(1, 2), ends={0: 0})
    page.numbers[slot_offset(0) + POLLED_STEP] = 9
    page.numbers[slot_offset(1) + POLLED_STEP] = 8
    assert CheckpointPoll(page).propose(ProposeCheckpoint(attempt=1, step=8), state) == 8


def test_a_worker_that_fails_instead_of_saving(node: Node, pipe: MessagePipe) -> None:
    """Its failure is reported first, and then that no step was saved."""
    start_workers(node, pipe, TRAINS.replace("print(step)", "raise OSError('disk')"), nproc=1)
    request_ahead(node)
    exited = node.wait(WorkersExited)
    assert exited.failures[0].error is not None
    assert exited.failures[0].error.message == "disk"
    assert node.wait(WorkersCheckpointed).step is None


def test_a_stop_withdraws_the_request(node: Node, pipe: MessagePipe) -> None:
    """A request to one attempt is not answered in the next."""
    start_workers(node, pipe, TRAINS, nproc=1)
    request_checkpoint(node, 10**9)
    node.supervisor.handle(StopWorkers(attempt=node.attempt, grace=0.0))
    stopped = until(lambda: node.events_within(0.1), "it is not stopped")
    assert [type(event) for event in stopped + node.events_within(0.1)] == [WorkersStopped]
    start_workers(node, pipe, TRAINS, nproc=1)
    request_checkpoint(node, 10**9)
    node.launch(node.script(TRAINS))
    pipe.read_lines()
    seen = until(lambda: node.events_within(0.1), "it is not started")
    assert [type(event) for event in seen] == [WorkersStarted]


def test_a_request_does_not_reach_the_next_attempt(node: Node, pipe: MessagePipe) -> None:
    """Not even at the same step."""
    start_workers(node, pipe, TRAINS, nproc=1)
    step = request_ahead(node)
    node.wait(WorkersCheckpointed)
    start_workers(node, pipe, TRAINS, nproc=1)
    until(lambda: highest_step(node) > step + 5, "it stops where the attempt before was asked to save")
