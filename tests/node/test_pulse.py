"""What workers mark on the page of their node is seen from outside, of the present attempt and of live workers alone."""

from __future__ import annotations

import os
import time

import pytest

from raylaunch.core.events import WorkersExited, WorkersStarted
from raylaunch.core.pulse import Mark, Pulse
from raylaunch.worker import page as fields
from tests.node.harness import Ears, Node, send, until, wait_stopped_by_signal

pytestmark = pytest.mark.timeout(300)

BEATS = """
    import os, time
    from raylaunch.worker import heartbeat
    for _ in range(int(os.environ["RANK"]) + 2):
        heartbeat()
    say(os.getpid())
    time.sleep(3600)
"""


def pulse(node: Node) -> Pulse:
    found = node.supervisor.pulse()
    assert found is not None
    return found


def marks(node: Node) -> dict[int, Mark]:
    return {mark.rank: mark for mark in pulse(node).marks}


def test_heartbeats_are_counted_by_rank(either: Node, ears: Ears) -> None:
    """By forked workers and by fresh interpreters; a loop without heartbeats has no marks."""
    attempt = either.launch(either.script(BEATS), nproc=3)
    ears.hear(3)
    either.wait(WorkersStarted)
    assert pulse(either).attempt == attempt
    assert {rank: mark.marks for rank, mark in marks(either).items()} == {0: 2, 1: 3, 2: 4}
    either.launch(either.script("say('up')\nimport time\ntime.sleep(3600)", "silent.py"), nproc=2)
    ears.hear(2)
    either.wait(WorkersStarted)
    assert {rank: mark.marks for rank, mark in marks(either).items()} == {0: 0, 1: 0}


def test_a_silent_worker_grows_old(node: Node, ears: Ears) -> None:
    """The age is that of the last sign of life, also where the process is stopped."""
    node.launch(node.script(BEATS))
    (pid,) = map(int, ears.hear())
    node.wait(WorkersStarted)
    send(pid, 19)
    wait_stopped_by_signal(pid)
    began, young = time.monotonic(), marks(node)[0].age
    time.sleep(0.05)
    grown = marks(node)[0].age - young
    assert 0.05 <= grown <= time.monotonic() - began


def test_a_node_without_workers_has_no_pulse(node: Node) -> None:
    """Before the workers are forked, nothing on the page is of the attempt that is asked about."""
    node.tidy()
    node.launch(node.script("import time\ntime.sleep(3600)"))
    assert node.supervisor.pulse() is None
    node.wait(WorkersStarted)
    assert len(pulse(node).marks) == 1


def test_workers_that_ended_have_one_pulse_more(node: Node, ears: Ears) -> None:
    """Whether well or not: their last steps count too. Those of others are there as before."""
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
    ears.hear(3)
    node.wait(WorkersExited)
    until(lambda: [*node.silence(0.01), set(marks(node)) == {2}][-1], "ranks 0 and 1 have ended")
    node.stop()
    assert {*marks(node)} == {2}
    assert pulse(node).marks == ()


def test_steps_are_the_scripts_own(node: Node, ears: Ears) -> None:
    """What it asked about and what it saved, as it counts them; 0 is a step like any other."""
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
    ears.hear()
    node.wait(WorkersStarted)
    (mark,) = pulse(node).marks
    assert (mark.step, mark.asked, mark.saved) == (0, 0, None)
    (node.folder / "go").write_text("go")
    ears.hear()
    (mark,) = pulse(node).marks
    assert (mark.step, mark.asked, mark.saved) == (41, 41, 0)


def test_a_section_is_busy(node: Node, ears: Ears) -> None:
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
    ears.hear()
    node.wait(WorkersStarted)
    assert marks(node)[0].busy
    (node.folder / "go").write_text("go")
    ears.hear()
    assert not marks(node)[0].busy


def test_workers_are_told_their_attempt(node: Node) -> None:
    """It counts all attempts, unlike torchrun's restart count, which counts failures."""
    node.launch(node.script("1"))
    outcome = node.run(node.script("import os\nprint(os.environ['RAYLAUNCH_ATTEMPT'])"))
    assert outcome.stdout() == f"{node.attempt}\n"


def test_more_workers_than_the_page_has_room_for(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """The surplus goes unwatched; none of them writes into what is another's."""
    monkeypatch.setattr(fields, "MOST_WORKERS", 2)
    outcome = node.run(node.script("import os\nprint('RAYLAUNCH_PAGE' in os.environ)"), nproc=3)
    assert [outcome.stdout(rank) for rank in range(3)] == ["True\n", "True\n", "False\n"]
    node.launch(node.script("import time\ntime.sleep(3600)"), nproc=3)
    node.wait(WorkersStarted)
    assert set(marks(node)) == {0, 1}


def test_a_closed_node_has_no_pulse(own: Node) -> None:
    """And a lease of it is nobody's."""
    own.launch(own.script("import time\ntime.sleep(3600)"))
    own.wait(WorkersStarted)
    own.supervisor.close()
    assert own.supervisor.pulse() is None
    own.supervisor.renew(1)
