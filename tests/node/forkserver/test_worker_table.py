"""What torchrun does for workers besides their environment: `${local_rank}` in arguments, signals, and file timers."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from raylaunch.core.machine.events_and_actions import WorkersExited, WorkersStopped
from raylaunch.node.forkserver.server import DeferredSignals, WorkerTable
from raylaunch.node.linux import processes
from raylaunch.node.protocol.node_goal import SignalWorkers, StopWorkers
from tests.node.harness import SECONDS, MessagePipe, Node, basic_env, running, send_signal, until
from tests.private_cluster import WARM_TORCH, free_ports
from tests.warm_python import WarmPython

pytestmark = pytest.mark.timeout(300)
RETURN_SECONDS = 3.0
"""How long a survivor may take to return."""

WAITS_FOR_SIGNAL = """
    import os, signal, time
    def handle(number, frame):
        print(signal.Signals(number).name, flush=True)
        raise SystemExit({code})
    signal.signal(signal.{name}, handle)
    say(os.environ["RANK"])
    while True:
        time.sleep(0.01)  # short: a signal that arrives right before the sleep is handled only after it
"""


def test_local_rank_is_substituted_in_arguments(node: Node) -> None:
    """Anywhere in any argument, as torchrun does: other references stay, and `$$` becomes `$`."""
    script = node.script("import sys\nprint(sys.argv[1:])")
    outcome = node.run(script, "--device=cuda:${local_rank}", "${local_rank}", "${HOME}", "$$5", 7, nproc=2)
    assert outcome.stdout(0) == "['--device=cuda:0', '0', '${HOME}', '$5', '7']\n"
    assert outcome.stdout(1) == "['--device=cuda:1', '1', '${HOME}', '$5', '7']\n"


def test_titles_of_processes(either: Node) -> None:
    """`ps` shows what each process is, without the script's arguments, which may be secret."""
    script = either.script("from pathlib import Path\nprint(Path('/proc/self/cmdline').read_bytes().split(b'\\0')[-2])")
    outcome = either.run(script, "--password", "hunter2", nproc=2, name="charlm")
    assert outcome.stdout(1) == "b'raylaunch: train.py rank 1 of 2 (charlm)'\n"
    above = (either.supervisor.client.subreaper_pid, either.supervisor.client.pid)
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in above]
    assert lines == [b"raylaunch: subreaper\0", b"raylaunch: fork server\0"]


def test_the_local_rank_as_an_argument(node: Node) -> None:
    """As `torch.distributed.launch` passes it: before the script's own arguments."""
    script = node.script("import sys\nprint(sys.argv[1:])")
    outcome = node.run(script, "--lr", "3", nproc=2, pass_local_rank=True)
    assert outcome.stdout(1) == "['--local-rank=1', '--lr', '3']\n"


@pytest.mark.parametrize(
    ("name", "grace"), [("SIGTERM", 20.0), ("SIGINT", 1e9), ("SIGHUP", math.inf), ("SIGQUIT", 1e300), ("SIGUSR1", 20.0)]
)
def test_workers_are_stopped_by_the_signal_that_the_driver_got(
    node: Node, pipe: MessagePipe, name: str, grace: float
) -> None:
    """They get the same signal, and time to end by themselves; also more time than a timer of Linux can count."""
    node.launch(node.script(WAITS_FOR_SIGNAL.format(name=name, code=0)), nproc=1)
    pipe.read_lines()
    node.supervisor.handle(StopWorkers(attempt=node.attempt, grace=grace, signal=name))
    node.wait(WorkersStopped)
    assert (node.rank_folder() / "stdout.log").read_text() == f"{name}\n"


def test_a_forwarded_signal_reaches_workers_and_nothing_else(node: Node, pipe: MessagePipe) -> None:
    """The script's handler runs; its children, which have no handler, live on; and the attempt continues."""
    text = """
        import os, signal, subprocess, time
        child = subprocess.Popen(["sleep", "60"])
        received = []
        signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
        say("ready")
        while not received:
            time.sleep(0.01)
        print("child", child.poll())
        child.kill()
        child.wait()
    """
    node.launch(node.script(text))
    pipe.read_lines()
    node.supervisor.handle(SignalWorkers(attempt=node.attempt, signal="SIGUSR1"))
    assert node.wait(WorkersExited).failures == ()
    assert (node.rank_folder() / "stdout.log").read_text() == "child None\n"


def test_a_forwarded_signal_for_another_attempt_is_dropped(node: Node, pipe: MessagePipe) -> None:
    """It would kill workers that have no handler yet."""
    script = node.script("import os\nsay('up')\nopen('go').read()\nprint('lived')")
    go = node.folder / "go"
    os.mkfifo(go)
    node.launch(script)
    pipe.read_lines()
    node.supervisor.handle(SignalWorkers(attempt=node.attempt - 1, signal="SIGUSR1"))
    go.write_text("go")
    assert node.wait(WorkersExited).failures == ()


def test_a_forwarded_signal_waits_until_a_worker_has_a_handler(node: Node, pipe: MessagePipe) -> None:
    """Without one it would kill a script that is still importing. A worker with a handler gets it at once."""
    text = """
        import os, signal
        if os.environ["RANK"] == "1":
            say("up")
            open("go").read()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        signal.signal(signal.SIGUSR1, lambda *_: None)
        say("ready")
        signal.sigwait([signal.SIGUSR1])
        say("received", os.environ["RANK"])
    """
    go = node.folder / "go"
    os.mkfifo(go)
    node.launch(node.script(text), nproc=2)
    assert sorted(pipe.read_lines(2)) == ["ready", "up"]
    node.supervisor.handle(SignalWorkers(attempt=node.attempt, signal="SIGUSR1"))
    assert pipe.read_lines() == ["received 0"]
    go.write_text("go")
    assert pipe.read_lines(2) == ["ready", "received 1"]
    assert node.wait(WorkersExited).failures == ()


def test_a_forwarded_signal_to_a_command_does_not_wait() -> None:
    """It may never have a handler; without one it ends by the signal, as under a shell."""
    group = WorkerTable(lambda *_: None, other_children=set)
    with subprocess.Popen(["sleep", "60"]) as worker:
        group.add(worker.pid, SimpleNamespace(kind="command", local_rank=0), report=-1, stacks=-1)
        group.signal(group.attempt, signal.SIGUSR2)
        assert worker.wait(SECONDS) == -signal.SIGUSR2


def test_no_process_group_is_killed_whose_leader_was_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be somebody else's by then. What the leader left behind is found otherwise."""
    before = processes.children()
    group = WorkerTable(lambda *_: None, other_children=lambda: before)
    signalled: list[tuple[int, int]] = []
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]
    with subprocess.Popen(["true"], start_new_session=True) as worker:
        group.add(worker.pid, SimpleNamespace(kind="command", rank=0, local_rank=0), *files)
        until(lambda: group.reap() or not group.pids(), "the worker does not end")
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", lambda *call: signalled.append(call))
            patch.setattr(os, "killpg", lambda *call: signalled.append(call))
            group.kill()
            group.advance()
            assert group.is_gone
        assert signalled == []


def test_a_child_that_may_not_be_killed_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setuid program that a worker has left behind does not keep the next attempt from its start."""
    before = processes.children()
    group = WorkerTable(lambda *_: None, other_children=lambda: before)

    def refuse(*_: int) -> None:
        raise PermissionError

    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        group.kill()
        group.advance()
        assert not group.is_gone
        other.wait()
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as other:
        with monkeypatch.context() as patch:
            patch.setattr(os, "kill", refuse)
            patch.setattr(os, "killpg", refuse)
            group.advance()
            assert group.is_gone
        other.kill()


def with_survivor(monkeypatch: pytest.MonkeyPatch) -> tuple[WorkerTable, list[float], list[int]]:
    """Return a group with worker 12345, the time that it sees, and whom it has killed."""
    before, now, killed = processes.children(), [100.0], list[int]()
    monkeypatch.setattr("raylaunch.node.forkserver.server.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(processes, "kill_with_group", lambda pid: killed.append(pid) or True)
    group = WorkerTable(lambda *_: None, other_children=lambda: before)
    group.add(12345, SimpleNamespace(kind="script", rank=0, local_rank=0), report=-1, stacks=-1)
    return group, now, killed


def reports_forked(group: WorkerTable) -> bool:
    return group.fork(lambda *_: None, lambda *_: 0)


def begin_with_survivor(group: WorkerTable) -> None:
    """Begin an attempt whose only worker has stayed."""
    group.survivors.record_return(12345)
    group.advance()
    assert group.is_gone
    group.begin(2, (SimpleNamespace(kind="script", rank=0, local_rank=0),))


def test_a_survivor_that_does_not_return_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    group, now, killed = with_survivor(monkeypatch)
    group.kill([12345], RETURN_SECONDS, to_complete=2**29)
    now[0] += RETURN_SECONDS
    group.advance()
    assert (killed, group.survivors.pids) == ([12345], set())


@pytest.mark.parametrize(
    ("to_complete", "seconds"), [(0, 0.0), (2**28, RETURN_SECONDS + 1), (2**29, RETURN_SECONDS + 2)]
)
def test_workers_are_reported_when_the_survivor_has_completed_its_commit(
    monkeypatch: pytest.MonkeyPatch, to_complete: int, seconds: float
) -> None:
    """It has some seconds to return, and another one for each quarter of a gigabyte. It is not killed if it needs longer."""
    group, now, killed = with_survivor(monkeypatch)
    group.kill([12345], RETURN_SECONDS, to_complete=to_complete)
    begin_with_survivor(group)
    for part in (0.0, 0.5, 0.9):
        now[0] = 100 + part * seconds
        if seconds:
            assert not reports_forked(group)
            assert group.until_deadline() == pytest.approx((1 - part) * seconds)
    now[0] = 100 + seconds
    assert reports_forked(group)
    assert not reports_forked(group), "only once"
    assert (killed, group.until_deadline()) == ([], None)


@pytest.mark.parametrize("end", ["completed", "dead"])
def test_workers_are_reported_at_once_when_nothing_is_written_any_more(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    group, _, _ = with_survivor(monkeypatch)
    group.kill([12345], RETURN_SECONDS, to_complete=2**30)
    begin_with_survivor(group)
    group.survivors.record_completed(99)
    assert not reports_forked(group)
    if end == "completed":
        group.survivors.record_completed(12345)
    else:
        monkeypatch.setattr("raylaunch.node.forkserver.server._reaped", lambda: [(12345, 9)])
        monkeypatch.setattr(os, "close", lambda _: None)
        group.reap()
    assert reports_forked(group)


def test_no_commit_is_waited_for_if_the_worker_that_was_to_complete_it_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The order names it because its end was not known yet."""
    group, _, _ = with_survivor(monkeypatch)
    group.kill([12344, 12345], RETURN_SECONDS, to_complete=2**30)
    assert group.survivors.pids == {12345}
    begin_with_survivor(group)
    assert reports_forked(group)


def test_a_survivor_that_still_writes_has_more_time_to_return_for_another_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another worker has died meanwhile. There is no other file for that attempt, so nothing is said of one."""
    group, now, killed = with_survivor(monkeypatch)
    group.kill([12345], RETURN_SECONDS, to_complete=2**30)
    begin_with_survivor(group)
    group.kill([12345], RETURN_SECONDS)
    now[0] += 2 * RETURN_SECONDS + 3
    group.advance()
    assert (killed, group.survivors.pids) == ([], {12345})
    now[0] += 1
    group.advance()
    assert (killed, group.survivors.pids) == ([12345], set())


def test_children_are_listed_once_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only `advance` lists and kills what workers have left behind; nothing that is asked afterwards does."""
    before = processes.children()
    group = WorkerTable(lambda *_: None, other_children=lambda: before)
    group.kill()
    listed: list[bool] = []
    monkeypatch.setattr(processes, "children", lambda: listed.append(True) or before)
    group.advance()
    assert group.is_gone
    assert group.until_deadline() is None
    assert listed == [True]


def test_a_forwarded_signal_is_delivered_after_a_time_without_a_handler() -> None:
    """A script that installs no handler for long ends by the signal."""
    with subprocess.Popen(["sleep", "60"]) as worker:
        patient, hasty = DeferredSignals(), DeferredSignals(patience=0.0)
        patient.signal(worker.pid, signal.SIGUSR2)
        patient.deliver([worker.pid])
        assert patient.until_poll()
        assert worker.poll() is None
        hasty.signal(worker.pid, signal.SIGUSR2)
        hasty.deliver([worker.pid])
        assert hasty.until_poll() is None
        assert worker.wait() == -signal.SIGUSR2
    patient.deliver([])
    assert patient.until_poll() is None, "a process that has ended is forgotten"


def test_a_script_may_set_the_master_address_itself(torch_node: Node) -> None:
    """As in PyTorch's tutorial: the script sets MASTER_ADDR and MASTER_PORT, and its rank 0 serves the store."""
    (port,) = free_ports(1)
    text = f"""
        import os
        import torch.distributed as dist
        rank = int(os.environ["RANK"])
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "{port}"
        dist.init_process_group("gloo", rank=rank, world_size=2)
        dist.barrier()  # rank 0 must not end, and its store with it, before rank 1 has connected
        print(dist.get_world_size())
        dist.destroy_process_group()
    """
    outcome = torch_node.run(torch_node.script(text), nproc=2, port=torch_node.open_store())
    assert outcome.stdout() == "2\n", outcome.stderr()


def test_the_store_is_reached_as_localhost(torch_node: Node) -> None:
    """`tcp://localhost:$MASTER_PORT` works under torchrun, whose store listens everywhere; this one has one address."""
    torch_node.set(address="127.0.0.2")
    text = """
        import os
        import torch.distributed as dist
        url = "tcp://localhost:" + os.environ["MASTER_PORT"]
        dist.init_process_group("gloo", init_method=url, rank=int(os.environ["RANK"]), world_size=2)
        dist.barrier()
        print(dist.get_world_size())
        dist.destroy_process_group()
    """
    port = torch_node.open_store()
    outcome = torch_node.run(torch_node.script(text), nproc=2, port=port)
    assert outcome.stdout() == "2\n", outcome.stderr()


def test_an_impossible_numa_binding_ends_the_job(torch_node: Node) -> None:
    """Without a GPU there are no CPUs near it; the worker says so, and no restart is made."""
    outcome = torch_node.run(torch_node.script("print(1)"), numa_binding="node")
    assert outcome.exit_code == 1
    assert outcome.failure.error is not None
    assert outcome.failure.error.hopeless
    assert "cannot bind local rank 0 to the CPUs near its GPU" in outcome.failure.error.message


TIMED = """
    import os, sys, time
    import torch.distributed.elastic.timer as timer
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after={after}):
        time.sleep(0.3)
    print("in time")
"""


def named(node: Node, name: str) -> list[int]:
    """Return the children of the fork server that `ps -o comm` shows under this name."""
    found = []
    for pid in node.children():
        with contextlib.suppress(OSError):  # it has just ended
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                found.append(pid)
    return found


def test_the_file_timer_kills_a_worker_that_takes_too_long(
    warm_torch: WarmPython, tmp_path: Path, mark: str, pipe: MessagePipe
) -> None:
    """As under torchrun with TORCHELASTIC_ENABLE_FILE_TIMER=1. Other workers live, and no named pipe is left."""
    env = basic_env(mark) | {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", WARM_TORCH: str(warm_torch.executable())}
    with running(env=env, preload=("torch.distributed.elastic.timer",)) as node:
        timer_pipe = Path(node.supervisor.spec.env["TORCHELASTIC_TIMER_FILE"])
        node.use_for_test(tmp_path, mark, pipe)
        node.set(env=node.supervisor.spec.env | {"TORCHELASTIC_TIMER_FILE": str(timer_pipe)})
        assert node.run(node.script(TIMED.format(after=60))).stdout() == "in time\n"
        for number in (signal.SIGSTOP, signal.SIGKILL):  # it is continued, and replaced by another
            (timer,) = named(node, "rl:file timer")
            send_signal(timer, number)
        until(lambda: named(node, "rl:file timer") not in ([], [timer]), "there is no other timer")
        late = node.run(node.script(TIMED.format(after=0.01)))
        assert late.exit_code == -signal.SIGKILL
        assert node.run(node.script(TIMED.format(after=60))).stdout() == "in time\n"
    assert not timer_pipe.exists()
