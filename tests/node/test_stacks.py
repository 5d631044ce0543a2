"""Every worker of a node says what it is doing when asked, whatever it is doing; and who cannot does not hold others up."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from raylaunch.core import evidence
from raylaunch.core.events import WorkersExited, WorkersStarted
from raylaunch.core.stacks import Stack
from raylaunch.node import proc, stacks, wire
from raylaunch.node.messages import WorkersStacks
from tests.node.harness import Ears, Node, send, until, wait_stopped_by_signal

pytestmark = pytest.mark.timeout(300)

SLEEPS = "import os, time\ndef nap():\n    say(os.getpid())\n    time.sleep(3600)\nnap()"
BUSY = "import os\ndef spin():\n    say(os.getpid())\n    while True:\n        pass\nspin()"
HOLDS = """
    import ctypes, os
    def hold():
        say(os.getpid())
        while True:
            ctypes.PyDLL(None).sleep(3600)  # with the interpreter's lock
    hold()
"""
BLOCKS = f"import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [{int(stacks.SIGNAL)}])\n" + SLEEPS


def begin(node: Node, ears: Ears, text: str, nproc: int = 1) -> list[int]:
    node.launch(node.script(text), nproc=nproc)
    pids = [int(line) for line in ears.hear(nproc)]
    node.wait(WorkersStarted)
    return pids


def dump(node: Node) -> dict[int, Stack]:
    node.supervisor.dump_stacks(node.attempt)
    return answer(node)


def answer(node: Node) -> dict[int, Stack]:
    word = node.wait(WorkersStacks)
    assert (word.node, word.attempt) == ("node-0", node.attempt)
    return {stack.rank: stack for stack in word.stacks}


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes at all comes because all who can have answered."""
    monkeypatch.setattr(stacks, "_MOST_SECONDS", 3600.0)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(
    ("text", "state", "where"), [(SLEEPS, "S", "in nap"), (BUSY, "R", "in spin"), (HOLDS, "S", "in hold")]
)
def test_a_worker_says_where_it_is(either: Node, ears: Ears, text: str, state: str, where: str) -> None:
    """Asleep, in a loop, in a call that holds the interpreter's lock."""
    begin(either, ears, text, nproc=2)
    found = dump(either)
    assert set(found) == {0, 1}
    for stack in found.values():
        assert where in stack.text
        assert stack.text.endswith("in <module>\n")
    assert {stack.state for stack in found.values()} <= {state, "R"}
    assert either.silence(0.1) == []


@pytest.mark.usefixtures("patience")
def test_all_threads_are_told(node: Node, ears: Ears) -> None:
    """The main thread last."""
    begin(
        node,
        ears,
        "import threading, time\nthreading.Thread(target=lambda: time.sleep(9), name='t').start()\n" + SLEEPS,
    )
    text = dump(node)[0].text
    assert text.count("hread 0x") == 2
    assert "in nap" in text
    assert "in <lambda>" in text


@pytest.mark.usefixtures("patience")
def test_a_second_question_has_an_answer_of_its_own(node: Node, ears: Ears) -> None:
    """The text is what was written since the question; and the question alone wakes it, once."""
    begin(node, ears, SLEEPS)
    wakes = []
    for _ in range(3):
        stack = dump(node)[0]
        assert (stack.text.count("Current thread"), stack.text.count("in nap")) == (1, 1)
        wakes.append(stack.effort.wakes)
    assert wakes[2] - wakes[1] <= evidence._WAKES


@pytest.mark.usefixtures("patience")
def test_a_stopped_worker_is_told_by_its_state(node: Node, ears: Ears) -> None:
    """It cannot answer, and the others' answers do not wait for it."""
    pids = begin(node, ears, SLEEPS, nproc=3)
    send(pids[1], signal.SIGSTOP)
    wait_stopped_by_signal(pids[1])
    found = dump(node)
    by_pid = dict(zip(node.supervisor._present.pids, found.values(), strict=True))  # type: ignore[union-attr]
    assert (by_pid[pids[1]].state, by_pid[pids[1]].text) == ("T", "")
    assert ["in nap" in by_pid[pid].text for pid in (pids[0], pids[2])] == [True, True]


def test_a_worker_that_does_not_listen_is_waited_for_only_so_long(node: Node, ears: Ears) -> None:
    """It blocks the signal: there is an answer without it."""
    begin(node, ears, BLOCKS)
    found = dump(node)
    assert (found[0].state, found[0].text) == ("S", "")


@pytest.mark.usefixtures("patience")
def test_other_programs_are_left_alone(node: Node, ears: Ears) -> None:
    """The signal would be the end of a command, or of what a script has become."""
    node.launch("sleep", "3600", kind="command")
    (pid,) = node.wait(WorkersStarted).pids
    assert dump(node)[0].text == ""
    assert node.silence(0.1) == []
    assert Path(f"/proc/{pid}").exists()
    pids = begin(node, ears, "import os\nsay(os.getpid())\nos.execvp('sleep', ['sleep', '3600'])")
    until(lambda: Path(f"/proc/{pids[0]}/comm").read_text() == "sleep\n", "it is still Python")
    assert dump(node)[0].text == ""
    assert node.silence(0.1) == []
    assert Path(f"/proc/{pids[0]}").exists()


@pytest.mark.usefixtures("patience")
def test_workers_that_only_just_began_survive_the_question(either: Node) -> None:
    """Whether they listen already or not."""
    for _ in range(5):
        either.launch(either.script(SLEEPS), nproc=2)
        pids = either.wait(WorkersStarted).pids
        assert set(dump(either)) == {0, 1}
        either.silence(0.05)
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.usefixtures("patience")
def test_only_live_workers_of_the_present_attempt_are_asked(node: Node, ears: Ears) -> None:
    """One that has ended is not among them; of another attempt there are none."""
    text = "import os, sys\nif os.environ['RANK'] == '0':\n    say(0)\n    sys.exit(1)\n" + SLEEPS
    begin(node, ears, text, nproc=2)
    node.wait(WorkersExited)
    assert set(dump(node)) == {1}
    for other in (node.attempt - 1, node.attempt + 1):
        node.supervisor.dump_stacks(other)
        word = node.wait(WorkersStacks)
        assert (word.attempt, word.stacks) == (other, ())


@pytest.mark.usefixtures("patience")
def test_a_worker_that_dies_of_something_else_meanwhile(node: Node, ears: Ears) -> None:
    """Nobody waits for its answer."""
    (pid,) = begin(node, ears, BLOCKS)
    node.supervisor.dump_stacks(node.attempt)
    assert node.silence(0.1) == []
    send(pid)
    assert answer(node)[0].text == ""


def test_an_answer_is_taken_when_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while it grows, and not while the worker is still in the handler, however long that pauses."""
    in_handler = True
    monkeypatch.setattr(proc, "state", lambda _: "S")
    monkeypatch.setattr(proc, "holds_back", lambda *_: in_handler)
    asked = stacks._Asked(rank=0, pid=os.getpid(), fd=wire.memory_file("answer", b"of before"), start=9)

    def is_done(more: bytes = b"") -> bool:
        os.pwrite(asked.fd, more, os.fstat(asked.fd).st_size)
        asked.look()
        return asked.done

    assert [is_done(), is_done(), is_done(b"one"), is_done(), is_done()] == [False] * 5
    in_handler = False
    assert [is_done(b"two"), is_done()] == [False, True]
    assert asked.stack().text == "onetwo"
    asked.close()


def test_of_a_very_long_answer_the_end_is_told() -> None:
    """There the main thread is."""
    asked = stacks._Asked(rank=0, pid=0, fd=wire.memory_file("answer", b"x" * 10**6 + b"main"), start=2)
    assert len(asked.stack().text) < 10**5
    assert asked.stack().text.endswith("xmain")
    asked.close()


def test_a_stopped_fork_server_holds_nobody_up(own: Node, ears: Ears) -> None:
    """The states are told without it. What it passes on later is for nobody, and leaves no file open."""
    begin(own, ears, SLEEPS, nproc=2)
    send(own.supervisor.server_pid, signal.SIGSTOP)
    found = dump(own)
    assert [(stack.state, stack.text) for stack in found.values()] == [("S", ""), ("S", "")]
    before = len(os.listdir("/proc/self/fd"))
    send(own.supervisor.server_pid, signal.SIGCONT)
    own.silence(0.2)
    assert len(os.listdir("/proc/self/fd")) == before
    assert "in nap" in dump(own)[0].text


def test_a_question_that_nobody_waits_for_leaves_no_files(own: Node, ears: Ears) -> None:
    """Closed in the midst of it."""
    begin(own, ears, BLOCKS, nproc=2)
    own.supervisor.dump_stacks(own.attempt)
    assert own.silence(0.1) == []
    own.supervisor.close()
