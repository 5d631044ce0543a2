"""The supervisor carries out orders and reports events; between two attempts nothing of the first is left."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.core.machine.events_and_actions import WorkersExited, WorkersStarted, WorkersStopped
from raylaunch.core.placement.environment import Assignment, Rendezvous
from raylaunch.node.protocol.node_goal import LaunchWorkers, SignalWorkers, StopWorkers
from tests.node.harness import (
    ADDRESS,
    SECONDS,
    MessagePipe,
    Node,
    is_listening,
    send_signal,
    until,
    wait_gone,
    wait_stopped_by_signal,
)
from tests.private_cluster import free_ports

pytestmark = pytest.mark.timeout(300)

HANGS = "import os, time\nsay(os.getpid())\ntime.sleep(3600)"
IGNORES_SIGTERM = (
    "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay(os.getpid())\ntime.sleep(3600)"
)


SAVES = """
    import os, signal, sys, time
    def save(*_):
        say("saved")
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    say(os.getpid())
    time.sleep(3600)
"""


def start_hanging(node: Node, pipe: MessagePipe, nproc: int = 1, text: str = HANGS) -> list[int]:
    """Start workers that start_hanging; return their process ids."""
    node.launch(node.script(text), nproc=nproc)
    return [int(line) for line in pipe.read_lines(nproc)]


def test_a_signal_that_does_not_exist_is_refused(node: Node) -> None:
    """The fork server would end with a traceback."""
    for order in (StopWorkers(attempt=1, grace=0.0, signal="SIGNONE"), SignalWorkers(attempt=1, signal="")):
        with pytest.raises(ValueError, match="there is no signal"):
            node.supervisor.handle(order)


@pytest.mark.parametrize("attempt", [-1, 1 << 63])
def test_an_attempt_that_the_page_cannot_hold_is_refused(node: Node, attempt: int) -> None:
    """The fork server would end with a traceback."""
    before = node.supervisor.attempt_state
    part = Assignment(attempt=attempt, node="node-0", node_rank=0, nnodes=1, base_rank=0, nproc=1, world_size=1)
    meeting = Rendezvous(master_addr=ADDRESS, master_port=0, run_id="tests", max_restarts=0, restart_count=0)
    with pytest.raises(ValueError, match=f"^there is no attempt {attempt}$"):
        node.supervisor.handle(LaunchWorkers(assignment=part, rendezvous=meeting))
    assert node.supervisor.attempt_state is before


# The events of an attempt.


def test_events_of_a_successful_attempt(node: Node) -> None:
    """`WorkersStarted`, one `WorkersExited` when all have finished, and then nothing."""
    attempt = node.launch(node.script("print('hello')"), nproc=3)
    started = node.wait(WorkersStarted)
    exited = node.wait(WorkersExited)
    assert (started.attempt, exited.attempt, exited.node, exited.failures) == (attempt, attempt, "node-0", ())
    assert started.at <= exited.at <= time.monotonic()
    assert node.events_within(0.1) == []
    assert [(node.rank_folder(rank) / "stdout.log").read_text() for rank in range(3)] == ["hello\n"] * 3


def test_events_of_a_failed_attempt(node: Node, pipe: MessagePipe) -> None:
    """A failure is reported at once while the others run on; these are reported as stopped when they are."""
    script = node.script("""
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(7)
        say("up")
        time.sleep(3600)
    """)
    attempt = node.launch(script, nproc=3)
    (failure,) = node.wait(WorkersExited).failures
    assert (failure.attempt, failure.node, failure.rank, failure.local_rank) == (attempt, "node-0", 1, 1)
    assert (failure.exit_code, failure.stopped, failure.error) == (7, False, None)
    assert failure.pid
    pipe.read_lines(2)
    stopped = node.stop()
    assert sorted((late.rank, late.signal, late.stopped) for late in stopped.failures) == [
        (0, "SIGKILL", True),
        (2, "SIGKILL", True),
    ]
    assert node.events_within(0.1) == []


def test_a_killed_worker_is_reported_with_its_signal(node: Node, pipe: MessagePipe) -> None:
    """It has no report, and the negative signal number as exit code."""
    (pid,) = start_hanging(node, pipe)
    send_signal(pid, signal.SIGKILL)
    (failure,) = node.wait(WorkersExited).failures
    assert (failure.pid, failure.exit_code, failure.signal, failure.error) == (pid, -9, "SIGKILL", None)


def test_a_crash_leaves_a_python_stack(node: Node) -> None:
    """After a segmentation fault the end of stderr shows where the program was."""
    outcome = node.run(
        node.script("import os, signal\ndef inner():\n    os.kill(os.getpid(), signal.SIGSEGV)\ninner()")
    )
    assert outcome.failure.signal == "SIGSEGV"
    assert "in inner" in outcome.failure.tail


def test_only_the_user_may_read_the_files_of_a_worker(node: Node) -> None:
    """Its folder, its logs and the error file, whatever the umask is: they may hold secrets."""
    outcome = node.run(node.script("import os\nos.umask(0)\nprint('secret')\nraise ValueError"))
    folder = outcome.folders[0]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"stdout.log": 0o600, "stderr.log": 0o600, "error.json": 0o600}


# Stopping.


def test_a_worker_can_save_during_the_grace_period(node: Node, pipe: MessagePipe) -> None:
    """It gets SIGTERM first: its handler saves and exits. Exit code 0 is no failure."""
    start_hanging(node, pipe, text=SAVES)
    stopped = node.stop(grace=100 * SECONDS)
    assert pipe.read_lines() == ["saved"]
    assert stopped.failures == ()


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_period(node: Node, pipe: MessagePipe) -> None:
    """Not before."""
    start_hanging(node, pipe, text=IGNORES_SIGTERM)
    began = time.monotonic()
    stopped = node.stop(grace=0.3)
    assert time.monotonic() - began >= 0.3
    assert [late.signal for late in stopped.failures] == ["SIGKILL"]


def test_a_stop_ends_when_all_workers_have_ended(node: Node, pipe: MessagePipe) -> None:
    """Also before the end of the grace period."""
    start_hanging(node, pipe, nproc=2)
    stopped = node.stop(grace=100 * SECONDS)
    assert [late.signal for late in stopped.failures] == ["SIGTERM"] * 2


def test_a_stopped_worker_gets_the_signal(node: Node, pipe: MessagePipe) -> None:
    """It is continued, so that its handler can save."""
    (pid,) = start_hanging(node, pipe, text=SAVES)
    os.kill(pid, signal.SIGSTOP)
    node.supervisor.handle(StopWorkers(attempt=node.attempt, grace=100 * SECONDS))
    assert pipe.read_lines() == ["saved"]
    assert node.wait(WorkersStopped).failures == ()


def test_a_second_stop_may_shorten_the_grace_period(node: Node, pipe: MessagePipe) -> None:
    """The earlier deadline of the two counts."""
    start_hanging(node, pipe, text=IGNORES_SIGTERM)
    node.supervisor.handle(StopWorkers(attempt=node.attempt, grace=100 * SECONDS))
    node.supervisor.handle(StopWorkers(attempt=node.attempt, grace=0.0))
    assert [late.signal for late in node.wait(WorkersStopped).failures] == ["SIGKILL"]
    assert node.events_within(0.1) == []


def test_a_stop_of_an_attempt_that_does_not_run_is_answered(node: Node) -> None:
    """One that has finished, an earlier one, and one that never was."""
    node.run(node.script("print(1)"))
    assert node.stop(grace=100 * SECONDS).failures == ()
    assert node.stop(grace=100 * SECONDS).failures == ()
    assert node.stop(attempt=node.attempt - 1).failures == ()
    node.attempt += 5
    assert node.stop().failures == ()


def test_a_stop_kills_processes_that_workers_left_behind(node: Node, pipe: MessagePipe) -> None:
    """A worker may finish and leave processes; when `WorkersStopped` arrives, these are gone too."""
    script = node.script("""
        import subprocess
        for session in (False, True):
            say(subprocess.Popen(["sleep", "3600"], start_new_session=session).pid)
    """)
    assert node.run(script).exit_code == 0
    left = [int(line) for line in pipe.read_lines(2)]
    node.stop()
    assert not any(Path(f"/proc/{pid}").exists() for pid in left)


def test_orders_before_the_node_is_ready_are_kept(tmp_path: Path, mark: str, pipe: MessagePipe) -> None:
    """They are carried out after the imports."""
    node = Node(preload=())
    node.use_for_test(tmp_path, mark, pipe)
    node.supervisor.start()
    assert node.run(node.script("print('ran')")).stdout() == "ran\n"
    assert node.stop().failures == ()
    node.supervisor.close()


# Successive attempts.


def test_a_launch_ends_the_previous_attempt(node: Node, pipe: MessagePipe) -> None:
    """Its processes are gone when the next attempt starts, and their end is reported as no failure."""
    old = start_hanging(node, pipe, nproc=2, text=IGNORES_SIGTERM)
    text = f"import os\nprint([os.path.exists(f'/proc/{{pid}}') for pid in {old}])"
    outcome = node.run(node.script(text, "next.py"))
    assert outcome.stdout() == "[False, False]\n"
    assert node.events_within(0.05) == []


def test_a_launch_after_a_crash_ends_the_survivors(node: Node, pipe: MessagePipe) -> None:
    """One worker is dead, one ignores SIGTERM and one is stopped: the next attempt starts all the same."""
    pids = start_hanging(node, pipe, nproc=3, text=IGNORES_SIGTERM)
    send_signal(pids[1], signal.SIGSTOP)
    wait_stopped_by_signal(pids[1])
    send_signal(pids[0], signal.SIGKILL)
    assert node.wait(WorkersExited).failures[0].pid == pids[0]
    assert node.run(node.script("print('next')", "next.py")).stdout() == "next\n"
    for pid in pids:
        wait_gone(pid)


def test_a_launch_kills_stopped_grandchildren(node: Node, pipe: MessagePipe) -> None:
    """Also one in a session of its own, whose parent is gone."""
    text = """
        import subprocess, time
        child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        say(child.pid)
        time.sleep(3600)
    """
    (grandchild,) = start_hanging(node, pipe, text=text)
    send_signal(grandchild, signal.SIGSTOP)
    wait_stopped_by_signal(grandchild)
    text = f"import os\nprint(os.path.exists('/proc/{grandchild}'))"
    assert node.run(node.script(text, "next.py")).stdout() == "False\n"


def test_only_the_last_of_many_launches_runs(node: Node) -> None:
    """Earlier ones report no failures."""
    script = node.script("import os, time\nprint(os.environ['TORCHELASTIC_RESTART_COUNT'])")
    for _ in range(5):
        node.launch(script, nproc=2)
    exited = node.wait(WorkersExited, lambda event: event.attempt == node.attempt)
    assert exited.failures == ()
    assert (node.rank_folder() / "stdout.log").read_text() == f"{node.attempt - 1}\n"


def test_fifty_restarts_leave_nothing_in_the_fork_server(node: Node) -> None:
    """No open files, no zombies and no threads."""
    script = node.script("import os\nos._exit(int(os.environ['RANK']) * 3)")

    def state() -> tuple[int, int, int]:
        pid = node.supervisor.client.pid
        return len(os.listdir(f"/proc/{pid}/fd")), len(node.children()), len(os.listdir(f"/proc/{pid}/task"))

    def once() -> None:
        port = node.open_store()
        node.launch(script, nproc=2, port=port)
        node.wait(WorkersExited)

    once()
    node.stop()
    until(lambda: len(node.children()) == 1, "more children than the store are left")
    before = state()
    for _ in range(50):
        once()
    node.stop()
    until(lambda: state() == before, f"{before} became {state()}")


# The store.

GROUP = """
    import os
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo", {how})
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    print(total.item(), dist.get_world_size())
    dist.destroy_process_group()
"""
RANKED = 'rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])'


def test_a_store_listens_before_it_is_reported(node: Node) -> None:
    """Each attempt has another port; the store of a past attempt is closed."""
    ports = []
    for _ in range(3):
        ports.append(node.open_store())
        assert is_listening(ports[-1])
        assert node.run(node.script("print(1)"), port=ports[-1]).exit_code == 0
    assert len(set(ports)) == 3
    until(lambda: [is_listening(port) for port in ports] == [False, False, True], "an old store listens")


def test_the_store_of_the_next_attempt_survives_a_launch(torch_node: Node) -> None:
    """It is opened while the current attempt runs, and used by the workers of the next."""
    first = torch_node.open_store()
    torch_node.launch(torch_node.script("print(1)"), port=first)
    second = torch_node.open_store()
    torch_node.wait(WorkersExited)
    outcome = torch_node.run(torch_node.script(GROUP.format(how="")), port=second, nproc=2)
    assert outcome.stdout() == "3.0 2\n"


def test_three_ranks_meet_by_env(torch_node: Node) -> None:
    """With `env://`, as most scripts do, in several attempts with a new store each."""
    script = torch_node.script(GROUP.format(how=""))
    for _ in range(2):
        outcome = torch_node.run(script, nproc=3, port=torch_node.open_store())
        assert [outcome.stdout(rank) for rank in range(3)] == ["6.0 3\n"] * 3, outcome.stderr()


def test_ranks_of_either_start_method_meet_by_env(torch_either: Node) -> None:
    """Also with a group that the script makes at an address of its own before."""
    (port,) = free_ports(1)
    nproc = 1 if torch_either.supervisor.spec.agent.job.start_method == "spawn" else 2  # which import torch each
    text = f"""
        import os
        import torch.distributed as dist
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{port}", rank=rank, world_size={nproc})
        dist.barrier()  # rank 0, which may serve the store, must not end before rank 1 has connected
        print(dist.get_world_size())
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        dist.barrier()  # rank 0, which may serve the store, must not end before rank 1 has connected
        print(dist.get_world_size())
        dist.destroy_process_group()
    """
    outcome = torch_either.run(torch_either.script(text), nproc=nproc, port=torch_either.open_store())
    assert outcome.stdout() == f"{nproc}\n{nproc}\n", outcome.stderr()


@pytest.mark.parametrize(
    "how",
    [
        f'init_method="file://" + os.path.abspath("meeting"), {RANKED}',
        f'init_method="tcp://{ADDRESS}:" + os.environ["MASTER_PORT"], {RANKED}',
    ],
    ids=["file", "tcp"],
)
def test_ranks_meet_by_other_init_methods(torch_node: Node, how: str) -> None:
    """`file://`, and `tcp://` to the store that is open already, as under torchrun."""
    outcome = torch_node.run(torch_node.script(GROUP.format(how=how)), nproc=2, port=torch_node.open_store())
    assert [outcome.stdout(rank) for rank in (0, 1)] == ["3.0 2\n"] * 2, outcome.stderr()


# A full disk.


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this root may not mount file systems")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_an_error_is_reported_though_the_disk_is_full(own_node: Node, full_disk: Path) -> None:
    """The report of a worker travels in memory, so its error is known though no byte of it can be written."""
    own_node.set(run_dir=str(full_disk / "run"))
    outcome = own_node.run(own_node.script("while True:\n    print('x' * 1000)"))
    assert outcome.exit_code == 1
    assert outcome.failure.error is not None
    assert outcome.failure.error.type == "OSError"
    assert "No space left on device" in outcome.failure.error.message
    assert not (outcome.folders[0] / "error.json").exists() or (outcome.folders[0] / "error.json").stat().st_size == 0
    own_node.supervisor.close()
