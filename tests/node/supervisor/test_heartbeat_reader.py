"""The supervisor reads from the shared page what live workers of the current attempt have written."""

from __future__ import annotations

import os
import signal
import time

import pytest

from raylaunch.core.machine.events_and_actions import WorkersExited, WorkersStarted
from raylaunch.core.machine.measured import CommitRate, NodeMemory
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.node.supervisor.supervisor import saved_step
from raylaunch.worker.heartbeats import shared_page as fields
from raylaunch.worker.heartbeats.shared_page import SharedPage
from tests.node.harness import MessagePipe, Node, send_signal, until, wait_stopped_by_signal

pytestmark = pytest.mark.timeout(300)

BEATS = """
    import os, time
    from raylaunch.worker import heartbeat
    for _ in range(int(os.environ["RANK"]) + 2):
        heartbeat()
    say(os.getpid())
    time.sleep(3600)
"""


def heartbeat_of(node: Node) -> Heartbeat:
    found = node.supervisor.heartbeat()
    assert found is not None
    return found


def progress_of(node: Node) -> dict[int, WorkerProgress]:
    return {mark.rank: mark for mark in heartbeat_of(node).marks}


def test_heartbeats_are_counted_by_rank(either: Node, pipe: MessagePipe) -> None:
    """For forked workers and for new interpreters. A loop without heartbeats has a count of 0."""
    attempt = either.launch(either.script(BEATS), nproc=3)
    pipe.read_lines(3)
    either.wait(WorkersStarted)
    assert heartbeat_of(either).attempt == attempt
    assert {rank: mark.marks for rank, mark in progress_of(either).items()} == {0: 2, 1: 3, 2: 4}
    either.launch(either.script("say('up')\nimport time\ntime.sleep(3600)", "silent.py"), nproc=2)
    pipe.read_lines(2)
    either.wait(WorkersStarted)
    assert {rank: mark.marks for rank, mark in progress_of(either).items()} == {0: 0, 1: 0}


def test_what_the_script_has_in_memory(node: Node, pipe: MessagePipe) -> None:
    """The size of its buffers, how many steps the last commit has, and how often there is one."""
    node.launch(node.script("say('up')\nimport time\ntime.sleep(3600)"))
    pipe.read_lines()
    node.wait(WorkersStarted)
    assert (heartbeat_of(node).memory, progress_of(node)[0].committed) == (None, None)
    numbers, slot = SharedPage.open(node.supervisor.spec.page).numbers, fields.slot_offset(0)
    for field, number in ((fields.COMMITTED_STATE, 8), (fields.SAVE_NS, 10**7), (fields.STEP_NS, 10**8)):
        numbers[slot + field] = number
    numbers[slot + fields.COMMIT_EVERY] = 4
    assert node.supervisor.state.files.reserve((0, 0), 1 << 20) == ""
    assert heartbeat_of(node).memory == NodeMemory(node=node.supervisor.spec.agent.node, own=1 << 20, copies=0)
    mark = progress_of(node)[0]
    assert mark.save_seconds == 0.01
    assert (mark.committed, mark.commit_rate) == (8, CommitRate(every=4, commit_seconds=0.01, step_seconds=0.1))
    node.supervisor.state.files.drop(lambda *_: True)


def test_the_age_is_that_of_the_last_heartbeat(node: Node, pipe: MessagePipe) -> None:
    """Also if the process is stopped."""
    node.launch(node.script(BEATS))
    (pid,) = map(int, pipe.read_lines())
    node.wait(WorkersStarted)
    send_signal(pid, 19)
    wait_stopped_by_signal(pid)
    began, young = time.monotonic(), progress_of(node)[0].age
    time.sleep(0.05)
    grown = progress_of(node)[0].age - young
    assert 0.05 <= grown <= time.monotonic() - began


def test_there_is_no_heartbeat_before_the_workers_are_forked(node: Node) -> None:
    """What is on the page is then not of the current attempt."""
    node.end_attempt()
    node.launch(node.script("import time\ntime.sleep(3600)"))
    assert node.supervisor.heartbeat() is None
    node.wait(WorkersStarted)
    assert len(heartbeat_of(node).marks) == 1


def test_workers_that_have_ended_are_in_one_more_heartbeat(node: Node, pipe: MessagePipe) -> None:
    """Their last steps count too, whether they failed or not. The other workers are in it as before."""
    text = """
        import os, sys, time
        from raylaunch.worker import heartbeat
        heartbeat()
        rank = int(os.environ["RANK"])
        say("up")
        if rank < 2:
            sys.exit(rank)
        time.sleep(3600)
    """
    node.launch(node.script(text), nproc=3)
    pipe.read_lines(3)
    node.wait(WorkersExited)
    until(lambda: [*node.events_within(0.01), set(progress_of(node)) == {2}][-1], "ranks 0 and 1 have ended")
    node.stop()
    assert {*progress_of(node)} == {2}
    assert heartbeat_of(node).marks == ()


def test_a_failure_has_the_last_saved_step(node: Node) -> None:
    """Also if the worker died before a heartbeat told of it."""
    text = """
        import sys
        from raylaunch.worker import checkpointed
        for step in range(int(sys.argv[1])):
            checkpointed(step)
        sys.exit(1)
    """
    assert node.run(node.script(text), "7").failure.saved == 6
    assert node.run(node.script(text), "0").failure.saved is None


def test_a_commit_of_state_is_a_saved_step() -> None:
    """The later of both counts. The page has no room for every worker of a very large node."""
    page, fd = SharedPage.create()
    os.close(fd)
    for name, completed in ((fields.COMMITTED_STATE, 8), (fields.SAVED_STEP, 3)):
        page.numbers[fields.slot_offset(1) + name] = completed
    assert [saved_step(page, rank) for rank in (0, 1, fields.MAX_WORKERS)] == [None, 7, None]


def test_steps_are_those_that_the_script_gives(node: Node, pipe: MessagePipe) -> None:
    """The last step it called `should_checkpoint` for, and the last it saved. 0 is a step like any other."""
    text = """
        import time
        from raylaunch.worker import checkpointed, should_checkpoint
        assert not should_checkpoint(0)
        say("asked")
        input_ = open("go").read()
        checkpointed(0)
        assert not should_checkpoint(41)
        say("saved")
        time.sleep(3600)
    """
    os.mkfifo(node.folder / "go")
    node.launch(node.script(text))
    pipe.read_lines()
    node.wait(WorkersStarted)
    (mark,) = heartbeat_of(node).marks
    assert (mark.step, mark.asked, mark.saved) == (0, 0, None)
    (node.folder / "go").write_text("go")
    pipe.read_lines()
    (mark,) = heartbeat_of(node).marks
    assert (mark.step, mark.asked, mark.saved) == (41, 41, 0)


def test_a_worker_is_busy_during_a_section(node: Node, pipe: MessagePipe) -> None:
    """As long as it lasts."""
    text = """
        import time
        from raylaunch.worker import section
        with section("a long checkpoint"):
            say("in")
            open("go").read()
        say("out")
        time.sleep(3600)
    """
    os.mkfifo(node.folder / "go")
    node.launch(node.script(text))
    pipe.read_lines()
    node.wait(WorkersStarted)
    assert progress_of(node)[0].busy
    (node.folder / "go").write_text("go")
    pipe.read_lines()
    assert not progress_of(node)[0].busy


def test_workers_get_the_number_of_their_attempt(node: Node) -> None:
    """It counts all attempts; torchrun's restart count counts failures."""
    node.launch(node.script("1"))
    outcome = node.run(node.script("import os\nprint(os.environ['RAYLAUNCH_ATTEMPT'])"))
    assert outcome.stdout() == f"{node.attempt}\n"


def test_more_workers_than_the_page_has_room_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers without a slot have no heartbeats, and write into no other worker's slot."""
    monkeypatch.setattr(fields, "MAX_WORKERS", 2)
    outcome = node.run(node.script("import os\nprint('RAYLAUNCH_PAGE' in os.environ)"), nproc=3)
    assert [outcome.stdout(rank) for rank in range(3)] == ["True\n", "True\n", "False\n"]
    node.launch(node.script("import time\ntime.sleep(3600)"), nproc=3)
    node.wait(WorkersStarted)
    assert set(progress_of(node)) == {0, 1}


def test_a_closed_node_has_no_heartbeat(own_node: Node) -> None:
    """And renewing its lease does nothing."""
    own_node.launch(own_node.script("import time\ntime.sleep(3600)"))
    own_node.wait(WorkersStarted)
    own_node.supervisor.close()
    assert own_node.supervisor.heartbeat() is None
    own_node.supervisor.renew_lease(1)


def test_a_stopped_process_is_reported(node: Node, pipe: MessagePipe) -> None:
    """Until it goes on. Others are not."""
    text = 'import os, time\nsay(os.environ["RANK"], os.getpid())\ntime.sleep(3600)'
    node.launch(node.script(text), nproc=2)
    pids = dict(map(int, line.split()) for line in pipe.read_lines(2))
    node.wait(WorkersStarted)
    send_signal(pids[1], signal.SIGSTOP)
    wait_stopped_by_signal(pids[1])
    assert {rank: mark.stopped for rank, mark in progress_of(node).items()} == {0: False, 1: True}
    send_signal(pids[1], signal.SIGCONT)
    until(lambda: not progress_of(node)[1].stopped, "the process goes on")
