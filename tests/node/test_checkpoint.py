"""All workers of a node save at one step when they are asked, and the node says so once."""

from __future__ import annotations

import os
import select

import pytest

from raylaunch.core.events import WorkersCheckpointed, WorkersExited, WorkersStarted, WorkersStopped
from raylaunch.node.messages import Proposed
from tests.node.harness import SECONDS, Ears, Node, until

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
"""Steps that take the workers longer than it may take until they know what they are asked."""
ASKS_ONCE = """
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


def begin(node: Node, ears: Ears, text: str, nproc: int) -> None:
    node.launch(node.script(text), nproc=nproc)
    ears.hear(nproc)
    node.wait(WorkersStarted)


def propose(node: Node, step: int, attempt: int = 0) -> None:
    node.supervisor.ask_checkpoint(attempt or node.attempt, step)


def ask(node: Node, step: int) -> None:
    """As the driver does when this is the only node."""
    propose(node, step)
    assert node.wait(Proposed).step == step
    node.supervisor.settle(node.attempt, step)


def furthest(node: Node) -> int:
    pulse = node.supervisor.pulse()
    assert pulse is not None
    return max(mark.asked or 0 for mark in pulse.marks)


def test_all_workers_save_at_the_step_that_was_asked_for(either: Node, ears: Ears) -> None:
    """Each at that step and none before; then they wait, until they are stopped."""
    begin(either, ears, TRAINS, nproc=3)
    step = furthest(either) + AHEAD
    ask(either, step)
    answer = either.wait(WorkersCheckpointed)
    assert (answer.attempt, answer.node, answer.step) == (either.attempt, "node-0", step)
    assert either.silence(0.1) == []
    stopped = either.stop(grace=100 * SECONDS)
    assert [late.signal for late in stopped.failures] == ["SIGTERM"] * 3
    assert [(either.rank_folder(rank) / "stdout.log").read_text() for rank in range(3)] == [f"{step}\n"] * 3


def test_a_proposed_step_is_waited_at_until_it_is_settled(node: Node, ears: Ears) -> None:
    """The node says how far its workers were; those that come to the step neither save there nor pass it."""
    begin(node, ears, TRAINS, nproc=2)
    step = furthest(node) + AHEAD
    propose(node, step)
    word = node.wait(Proposed)
    assert (word.node, word.attempt, word.step) == ("node-0", node.attempt, step)
    assert word.reached < step
    until(lambda: furthest(node) == step, "they do not come to it")
    assert node.silence(0.1) == []
    assert furthest(node) == step
    node.supervisor.settle(node.attempt, step)
    assert node.wait(WorkersCheckpointed).step == step


def test_a_step_that_some_have_passed_is_given_up_for_a_later_one(node: Node, ears: Ears) -> None:
    """Those that waited at the first go on to the second, and all save there."""
    begin(node, ears, TRAINS, nproc=3)
    propose(node, furthest(node) - 3)
    word = node.wait(Proposed)
    assert word.reached >= word.step
    propose(node, word.reached + 2)
    later = node.wait(Proposed)
    assert later.reached < later.step
    node.supervisor.settle(node.attempt, word.step)  # a word that comes too late changes nothing
    assert node.silence(0.1) == []
    node.supervisor.settle(node.attempt, later.step)
    assert node.wait(WorkersCheckpointed).step == later.step
    node.stop(grace=100 * SECONDS)
    assert [(node.rank_folder(rank) / "stdout.log").read_text() for rank in range(3)] == [f"{later.step}\n"] * 3


def test_who_waits_at_a_proposed_step_hears_a_signal(node: Node, ears: Ears) -> None:
    """A stop takes the proposal back: a script with a handler of its own goes on, and ends as it likes."""
    text = TRAINS.replace("import itertools, time", "import itertools, signal, sys, time").replace(
        "for step in", "ended = []\n    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))\n    for step in"
    )
    begin(
        node,
        ears,
        text.replace("        if step == 4:", "        if ended:\n            sys.exit(3)\n        if step == 4:"),
        nproc=1,
    )
    step = furthest(node) + AHEAD
    propose(node, step)
    until(lambda: furthest(node) == step, "it does not come to it")
    stopped = node.stop(grace=100 * SECONDS)
    assert [late.exit_code for late in stopped.failures] == [3]


def test_nothing_is_looked_at_when_nothing_is_asked(node: Node, ears: Ears) -> None:
    """The owner sleeps until something happens."""
    begin(node, ears, TRAINS, nproc=1)
    ask(node, furthest(node) + AHEAD)
    node.wait(WorkersCheckpointed)
    assert select.select([node.supervisor.fileno()], [], [], 0.2)[0] == []


def test_a_script_that_asks_in_steps_of_its_own(node: Node, ears: Ears) -> None:
    """One that asks only every tenth step saves at the next tenth; that is the step which is told."""
    begin(node, ears, TRAINS.replace("if should", "if step % 10 == 3 and should"), nproc=2)
    step = furthest(node) + AHEAD + 4
    ask(node, step)
    answer = node.wait(WorkersCheckpointed)
    assert answer.step is not None
    assert answer.step >= step
    assert answer.step % 10 == 3


def test_a_worker_that_never_asks_is_not_waited_for(node: Node, ears: Ears) -> None:
    """Nothing can be said to it but a signal, and that is known at once; the others are not made to wait."""
    text = ASKS_ONCE.replace("should_checkpoint(0)", "should_checkpoint(0) if asks else None")
    os.mkfifo(node.folder / "go")
    begin(node, ears, text, nproc=2)
    propose(node, 1)
    assert node.wait(WorkersCheckpointed).step is None


def test_workers_that_are_not_started_cannot_be_asked(node: Node) -> None:
    """The answer comes all the same, whatever they will do when they are."""
    node.tidy()
    node.launch(node.script("import time\ntime.sleep(3600)"))
    propose(node, 5)
    answer = node.wait(WorkersCheckpointed)
    assert (answer.attempt, answer.step) == (node.attempt, None)


@pytest.mark.parametrize("which", [-1, 1])
def test_another_attempt_cannot_be_asked(node: Node, ears: Ears, which: int) -> None:
    """The present one trains on, unasked."""
    begin(node, ears, TRAINS, nproc=1)
    propose(node, furthest(node) + 1, node.attempt + which)
    answer = node.wait(WorkersCheckpointed)
    assert (answer.attempt, answer.step) == (node.attempt + which, None)
    before = furthest(node)
    until(lambda: furthest(node) > before + 5, "it does not train on")


def test_a_worker_that_ends_meanwhile_is_not_waited_for(node: Node, ears: Ears) -> None:
    """There is no answer while it lives and has not saved; there is one when it is gone."""
    os.mkfifo(node.folder / "go")
    begin(node, ears, ASKS_ONCE, nproc=2)
    ask(node, 1)
    assert ears.hear() == ["asked"]
    assert node.silence(0.1) == []
    (node.folder / "go").write_text("go")
    assert node.wait(WorkersCheckpointed).step == 1


def test_workers_that_have_all_ended_cannot_be_asked(node: Node) -> None:
    """The answer comes all the same: nobody is to wait for it."""
    node.run(node.script("from raylaunch.worker import should_checkpoint\nshould_checkpoint(0)"), nproc=2)
    propose(node, 1)
    assert node.wait(WorkersCheckpointed).step is None


def test_a_worker_that_fails_instead_of_saving(node: Node, ears: Ears) -> None:
    """Its failure is told first, and no step as saved that is saved nowhere."""
    begin(node, ears, TRAINS.replace("print(step)", "raise OSError('disk')"), nproc=1)
    ask(node, furthest(node) + AHEAD)
    exited = node.wait(WorkersExited)
    assert exited.failures[0].error is not None
    assert exited.failures[0].error.message == "disk"
    assert node.wait(WorkersCheckpointed).step is None


def test_a_stop_takes_the_question_back(node: Node, ears: Ears) -> None:
    """What was asked of an attempt is not answered in the next."""
    begin(node, ears, TRAINS, nproc=1)
    ask(node, 10**9)
    node.supervisor.stop(node.attempt, 0.0)
    stopped = until(lambda: node.silence(0.1), "it is not stopped")
    assert [type(event) for event in stopped + node.silence(0.1)] == [WorkersStopped]
    begin(node, ears, TRAINS, nproc=1)
    ask(node, 10**9)
    node.launch(node.script(TRAINS))
    ears.hear()
    assert [type(event) for event in node.silence(0.1)] == [WorkersStarted]


def test_the_next_attempt_is_not_asked(node: Node, ears: Ears) -> None:
    """A question that one attempt has answered is none for the next, also at the same step."""
    begin(node, ears, TRAINS, nproc=1)
    step = furthest(node) + AHEAD
    ask(node, step)
    node.wait(WorkersCheckpointed)
    begin(node, ears, TRAINS, nproc=1)
    until(lambda: furthest(node) > step + 5, "it stops where the attempt before had been asked to")
