"""All workers of a node dump their stacks on request. A worker that cannot does not delay the others."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from raylaunch.core.failures.stack_notes import AFTER_END
from raylaunch.core.failures.stacks import Stack, grouped
from raylaunch.core.machine.events_and_actions import WorkersExited, WorkersStarted
from raylaunch.core.monitoring import hang_policy
from raylaunch.node.linux import procfs
from raylaunch.node.protocol import wire
from raylaunch.node.protocol.node_goal import DumpStacks
from raylaunch.node.protocol.node_status import StacksDumped
from raylaunch.node.supervisor import stack_dumps
from raylaunch.node.supervisor.stack_dumps import FlightRecorder
from raylaunch.worker.runtime import stack_signal
from tests.node.harness import MessagePipe, Node, send_signal, until, wait_stopped_by_signal

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
BLOCKS = f"import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [{int(stack_signal.STACK_SIGNAL)}])\n" + SLEEPS


def start_workers(node: Node, pipe: MessagePipe, text: str, nproc: int = 1) -> list[int]:
    node.launch(node.script(text), nproc=nproc)
    pids = [int(line) for line in pipe.read_lines(nproc)]
    node.wait(WorkersStarted)
    return pids


def request_stacks(node: Node, *in_full: int) -> dict[int, Stack]:
    node.supervisor.handle(DumpStacks(attempt=node.attempt, in_full=in_full))
    return wait_for_stacks(node)


def wait_for_stacks(node: Node) -> dict[int, Stack]:
    dumped = node.wait(StacksDumped)
    assert (dumped.node, dumped.attempt) == ("node-0", node.attempt)
    return {stack.rank: stack for stack in dumped.stacks}


@pytest.fixture
def no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time limit: an answer comes only when all workers that can have dumped their stacks."""
    monkeypatch.setattr(stack_dumps, "MOST_STACKS_SECONDS", 3600.0)


@pytest.mark.usefixtures("no_time_limit")
@pytest.mark.parametrize(
    ("text", "state", "where"), [(SLEEPS, "S", "in nap"), (BUSY, "R", "in spin"), (HOLDS, "S", "in hold")]
)
def test_a_worker_dumps_its_stack(either: Node, pipe: MessagePipe, text: str, state: str, where: str) -> None:
    """Asleep, in a loop, and in a call that holds the interpreter's lock."""
    start_workers(either, pipe, text, nproc=2)
    found = request_stacks(either)
    assert set(found) == {0, 1}
    for stack in found.values():
        assert where in stack.text
        assert stack.text.endswith("in <module>\n")
    assert {stack.state for stack in found.values()} <= {state, "R"}
    assert either.events_within(0.1) == []


CLOSES = """
    import os, time
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    files = [open(f"checkpoint-{number}", "w+b") for number in range(8)]
    FREED
    with open(os.environ["SAY"], "w") as file:
        print(os.getpid(), file=file)
    time.sleep(3600)
"""


@pytest.mark.usefixtures("no_time_limit")
@pytest.mark.parametrize("freed", ["", "del files"])
def test_no_stack_is_written_to_a_file_of_the_script(either: Node, pipe: MessagePipe, freed: str) -> None:
    """The script has closed all descriptors, and its own files have their numbers, or nothing has."""
    start_workers(either, pipe, CLOSES.replace("FREED", freed))
    (stack,) = request_stacks(either).values()
    assert (stack.text, stack.file_closed) == ("", True)
    assert [file.read_bytes() for file in sorted(either.folder.glob("checkpoint-*"))] == [b""] * 8


ENDS = """
    import ctypes
    api = ctypes.pythonapi
    api.PyCapsule_New.restype = ctypes.py_object
    api.PyCapsule_New.argtypes = (ctypes.c_void_p,) * 3
    waits_when_freed = api.PyCapsule_New(1, None, ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))
    import os
    say(os.getpid())
"""


@pytest.mark.usefixtures("no_time_limit")
def test_a_worker_that_does_not_get_past_the_end_of_its_script(either: Node, pipe: MessagePipe) -> None:
    """The interpreter frees what the script has left, with its lock held, and no code of Python runs any more."""
    start_workers(either, pipe, ENDS)
    until(lambda: grouped(request_stacks(either).values(), (0,))[0].note == AFTER_END, "it is not seen at its end")


@pytest.mark.usefixtures("no_time_limit")
def test_all_threads_of_a_rank_that_is_asked_in_full(node: Node, pipe: MessagePipe) -> None:
    """The main thread comes last. The other rank writes that one alone."""
    start_workers(
        node,
        pipe,
        "import threading, time\nthreading.Thread(target=lambda: time.sleep(99), daemon=True).start()\n" + SLEEPS,
        nproc=2,
    )
    until(lambda: len(grouped(request_stacks(node, 1).values(), (0, 1))) == 1, "they do not sleep at one place")
    stacks = request_stacks(node, 1)
    assert stacks[1].text.count("hread 0x") == 2
    assert stacks[0].text.startswith("Stack (most recent call first):\n")
    assert ["in <lambda>" in stacks[rank].text for rank in range(2)] == [False, True]
    ((first, frames),) = [(group.ranks, group.frames) for group in grouped(stacks.values(), (0, 1))]
    assert (first, "in nap" in " ".join(frames)) == ((0, 1), True)


@pytest.mark.usefixtures("no_time_limit")
def test_each_request_has_an_answer_of_its_own(node: Node, pipe: MessagePipe) -> None:
    """The text is what was written since the request, and the request wakes the worker only once."""
    start_workers(node, pipe, SLEEPS)
    wakes = []
    for _ in range(3):
        stack = request_stacks(node)[0]
        assert (stack.text.count("most recent call first"), stack.text.count("in nap")) == (1, 1)
        wakes.append(stack.effort.wakes)
    assert wakes[2] - wakes[1] <= hang_policy.IDLE_WAKES


@pytest.mark.usefixtures("no_time_limit")
def test_a_stopped_worker_is_reported_by_its_state(node: Node, pipe: MessagePipe) -> None:
    """It has no stack, and the other workers' stacks do not wait for it."""
    pids = start_workers(node, pipe, SLEEPS, nproc=3)
    send_signal(pids[1], signal.SIGSTOP)
    wait_stopped_by_signal(pids[1])
    found = request_stacks(node)
    by_pid = dict(zip(node.supervisor.attempt_state.pids, found.values(), strict=True))  # type: ignore[union-attr]
    assert (by_pid[pids[1]].state, by_pid[pids[1]].text) == ("T", "")
    assert ["in nap" in by_pid[pid].text for pid in (pids[0], pids[2])] == [True, True]


def test_a_worker_that_blocks_the_signal_is_waited_for_up_to_a_limit(node: Node, pipe: MessagePipe) -> None:
    """Then the answer comes without its stack."""
    start_workers(node, pipe, BLOCKS)
    found = request_stacks(node)
    assert (found[0].state, found[0].text) == ("S", "")


@pytest.mark.usefixtures("no_time_limit")
def test_other_programs_get_no_signal(node: Node, pipe: MessagePipe) -> None:
    """It would kill a command, or the program that a script has become by exec."""
    node.launch("sleep", "3600", kind="command")
    (pid,) = node.wait(WorkersStarted).pids
    assert request_stacks(node)[0].text == ""
    assert node.events_within(0.1) == []
    assert Path(f"/proc/{pid}").exists()
    pids = start_workers(node, pipe, "import os\nsay(os.getpid())\nos.execvp('sleep', ['sleep', '3600'])")
    until(lambda: Path(f"/proc/{pids[0]}/comm").read_text() == "sleep\n", "exec has not happened")
    assert request_stacks(node)[0].text == ""
    assert node.events_within(0.1) == []
    assert Path(f"/proc/{pids[0]}").exists()


@pytest.mark.usefixtures("no_time_limit")
def test_a_request_does_not_kill_workers_that_have_just_started(either: Node) -> None:
    """Whether they have their signal handler already or not."""
    for _ in range(5):
        either.launch(either.script(SLEEPS), nproc=2)
        pids = either.wait(WorkersStarted).pids
        assert set(request_stacks(either)) == {0, 1}
        either.events_within(0.05)
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.usefixtures("no_time_limit")
def test_only_live_workers_of_the_current_attempt_are_dumped(node: Node, pipe: MessagePipe) -> None:
    """A worker that has ended is not in the answer; for another attempt the answer is empty."""
    text = "import os, sys\nif os.environ['RANK'] == '0':\n    say(0)\n    sys.exit(1)\n" + SLEEPS
    start_workers(node, pipe, text, nproc=2)
    node.wait(WorkersExited)
    assert set(request_stacks(node)) == {1}
    for other in (node.attempt - 1, node.attempt + 1):
        node.supervisor.handle(DumpStacks(attempt=other))
        dumped = node.wait(StacksDumped)
        assert (dumped.attempt, dumped.stacks) == (other, ())


@pytest.mark.usefixtures("no_time_limit")
def test_a_worker_that_dies_meanwhile_is_not_waited_for(node: Node, pipe: MessagePipe) -> None:
    """It blocks the signal, and is killed. The answer comes without its stack."""
    (pid,) = start_workers(node, pipe, BLOCKS)
    node.supervisor.handle(DumpStacks(attempt=node.attempt))
    assert node.events_within(0.1) == []
    send_signal(pid)
    assert wait_for_stacks(node)[0].text == ""


def test_a_dump_is_done_when_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while it grows, nor while the worker is still in the signal handler, however long that pauses."""
    in_handler = True
    monkeypatch.setattr(procfs, "process_state", lambda _: "S")
    monkeypatch.setattr(procfs, "blocks", lambda *_: in_handler)
    dump = stack_dumps.PendingDump(
        rank=0, pid=os.getpid(), recorder=FlightRecorder("", ""), fd=wire.memory_file("answer", b"of before"), start=9
    )

    def is_done(more: bytes = b"") -> bool:
        os.pwrite(dump.fd, more, os.fstat(dump.fd).st_size)
        dump.poll()
        return dump.done

    assert [is_done(), is_done(), is_done(b"one"), is_done(), is_done()] == [False] * 5
    in_handler = False
    assert [is_done(b"two"), is_done()] == [False, True]
    assert dump.stack().text == "onetwo"
    dump.close()


def test_a_very_long_dump_is_cut_to_its_end() -> None:
    """The main thread is there."""
    dump = stack_dumps.PendingDump(
        rank=0, pid=0, recorder=FlightRecorder("", ""), fd=wire.memory_file("answer", b"x" * 10**6 + b"main"), start=2
    )
    assert len(dump.stack().text) < 10**5
    assert dump.stack().text.endswith("xmain")
    dump.close()


def test_a_stopped_fork_server_does_not_delay_the_answer(own_node: Node, pipe: MessagePipe) -> None:
    """States are reported without it. Stacks that arrive later are dropped, and no file stays open."""
    start_workers(own_node, pipe, SLEEPS, nproc=2)
    send_signal(own_node.supervisor.client.pid, signal.SIGSTOP)
    found = request_stacks(own_node)
    assert [(stack.state, stack.text) for stack in found.values()] == [("S", ""), ("S", "")]
    before = len(os.listdir("/proc/self/fd"))
    send_signal(own_node.supervisor.client.pid, signal.SIGCONT)
    own_node.events_within(0.2)
    assert len(os.listdir("/proc/self/fd")) == before
    assert "in nap" in request_stacks(own_node)[0].text


def test_a_close_during_a_request_leaves_no_files(own_node: Node, pipe: MessagePipe) -> None:
    """The supervisor is closed before the workers answer."""
    start_workers(own_node, pipe, BLOCKS, nproc=2)
    own_node.supervisor.handle(DumpStacks(attempt=own_node.attempt))
    assert own_node.events_within(0.1) == []
    own_node.supervisor.close()
