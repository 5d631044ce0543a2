"""Orders become processes and their ends become events; attempts follow each other with nothing left between them."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.core.events import WorkersExited, WorkersStarted, WorkersStopped
from tests.node.harness import (
    ADDRESS,
    SECONDS,
    Ears,
    Node,
    is_listening,
    send,
    until,
    wait_gone,
    wait_stopped_by_signal,
)

pytestmark = pytest.mark.timeout(300)

HANGS = "import os, time\nsay(os.getpid())\ntime.sleep(3600)"
DEAF = "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay(os.getpid())\ntime.sleep(3600)"


SAVES = """
    import os, signal, sys, time
    def save(*_):
        say("saved")
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    say(os.getpid())
    time.sleep(3600)
"""


def hang(node: Node, ears: Ears, nproc: int = 1, text: str = HANGS) -> list[int]:
    """Start workers that hang; their process ids."""
    node.launch(node.script(text), nproc=nproc)
    return [int(line) for line in ears.hear(nproc)]


# The events of an attempt.


def test_words_of_a_good_attempt(node: Node) -> None:
    """Started, then one word that all have finished, then silence."""
    attempt = node.launch(node.script("print('hello')"), nproc=3)
    started = node.wait(WorkersStarted)
    exited = node.wait(WorkersExited)
    assert (started.attempt, exited.attempt, exited.node, exited.failures) == (attempt, attempt, "node-0", ())
    assert started.at <= exited.at <= time.monotonic()
    assert node.silence(0.1) == []
    assert [(node.rank_folder(rank) / "stdout.log").read_text() for rank in range(3)] == ["hello\n"] * 3


def test_words_of_a_bad_attempt(node: Node, ears: Ears) -> None:
    """A failure comes at once, while the others run on; they are told as stopped when they are."""
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
    ears.hear(2)
    stopped = node.stop()
    assert sorted((late.rank, late.signal, late.stopped) for late in stopped.failures) == [
        (0, "SIGKILL", True),
        (2, "SIGKILL", True),
    ]
    assert node.silence(0.1) == []


def test_a_worker_that_is_killed_is_known_by_its_signal(node: Node, ears: Ears) -> None:
    """A kill from outside has no report, and its signal as exit code."""
    (pid,) = hang(node, ears)
    send(pid, signal.SIGKILL)
    (failure,) = node.wait(WorkersExited).failures
    assert (failure.pid, failure.exit_code, failure.signal, failure.error) == (pid, -9, "SIGKILL", None)


def test_a_crash_leaves_its_python_stack(node: Node) -> None:
    """A segmentation fault says where the program was."""
    outcome = node.run(
        node.script("import os, signal\ndef inner():\n    os.kill(os.getpid(), signal.SIGSEGV)\ninner()")
    )
    assert outcome.failure.signal == "SIGSEGV"
    assert "in inner" in outcome.failure.tail


def test_the_files_of_a_worker_are_for_its_user_alone(node: Node) -> None:
    """Its folder, its logs and the error file that we write, whatever the umask is: they may hold anything."""
    outcome = node.run(node.script("import os\nos.umask(0)\nprint('secret')\nraise ValueError"))
    folder = outcome.folders[0]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {"stdout.log": 0o600, "stderr.log": 0o600, "error.json": 0o600}


# Stopping.


def test_a_grace_lets_a_worker_save(node: Node, ears: Ears) -> None:
    """SIGTERM first: a handler saves and exits; its exit code is not a failure where it is 0."""
    hang(node, ears, text=SAVES)
    stopped = node.stop(grace=100 * SECONDS)
    assert ears.hear() == ["saved"]
    assert stopped.failures == ()


def test_the_deaf_are_killed_after_the_grace(node: Node, ears: Ears) -> None:
    """A worker that ignores SIGTERM gets SIGKILL when the time is over, not before."""
    hang(node, ears, text=DEAF)
    began = time.monotonic()
    stopped = node.stop(grace=0.3)
    assert time.monotonic() - began >= 0.3
    assert [late.signal for late in stopped.failures] == ["SIGKILL"]


def test_the_polite_need_not_wait_for_the_grace(node: Node, ears: Ears) -> None:
    """Where all end of SIGTERM, the answer comes at once."""
    hang(node, ears, nproc=2)
    stopped = node.stop(grace=100 * SECONDS)
    assert [late.signal for late in stopped.failures] == ["SIGTERM"] * 2


def test_a_stopped_worker_hears_the_signal_too(node: Node, ears: Ears) -> None:
    """It is continued for it, so that its handler may save."""
    (pid,) = hang(node, ears, text=SAVES)
    os.kill(pid, signal.SIGSTOP)
    node.supervisor.stop(node.attempt, 100 * SECONDS)
    assert ears.hear() == ["saved"]
    assert node.wait(WorkersStopped).failures == ()


def test_a_second_stop_may_shorten_the_grace(node: Node, ears: Ears) -> None:
    """Stopping twice is one stop with the earlier deadline, and never a later one."""
    hang(node, ears, text=DEAF)
    node.supervisor.stop(node.attempt, 100 * SECONDS)
    node.supervisor.stop(node.attempt, 0.0)
    assert [late.signal for late in node.wait(WorkersStopped).failures] == ["SIGKILL"]
    assert node.silence(0.1) == []


def test_stopping_what_has_ended_is_answered(node: Node) -> None:
    """Finished attempts, old ones and those that never were: the answer comes in any case."""
    node.run(node.script("print(1)"))
    assert node.stop(grace=100 * SECONDS).failures == ()
    assert node.stop(grace=100 * SECONDS).failures == ()
    assert node.stop(attempt=node.attempt - 1).failures == ()
    assert node.stop(attempt=node.attempt + 5).failures == ()


def test_a_stop_ends_what_workers_left_behind(node: Node, ears: Ears) -> None:
    """A worker that finished well may have left a process; `Stopped` means that this is gone too."""
    script = node.script("""
        import subprocess
        for session in (False, True):
            say(subprocess.Popen(["sleep", "3600"], start_new_session=session).pid)
    """)
    assert node.run(script).exit_code == 0
    left = [int(line) for line in ears.hear(2)]
    node.stop()
    assert not any(Path(f"/proc/{pid}").exists() for pid in left)


def test_orders_before_the_node_is_ready_are_kept(tmp_path: Path, mark: str, ears: Ears) -> None:
    """Nobody needs to wait for the imports before giving orders."""
    node = Node(preload=())
    node.move_to(tmp_path, mark, ears)
    node.supervisor.start()
    assert node.run(node.script("print('ran')")).stdout() == "ran\n"
    assert node.stop().failures == ()
    node.supervisor.close()


# One attempt after the other.


def test_a_launch_ends_the_attempt_before(node: Node, ears: Ears) -> None:
    """Nothing of it runs when the next begins, and its end is no failure of anybody's."""
    old = hang(node, ears, nproc=2, text=DEAF)
    text = f"import os\nprint([os.path.exists(f'/proc/{{pid}}') for pid in {old}])"
    outcome = node.run(node.script(text, "next.py"))
    assert outcome.stdout() == "[False, False]\n"
    assert node.silence(0.05) == []


def test_a_launch_after_a_crash_ends_the_survivors(node: Node, ears: Ears) -> None:
    """One dies, one hangs in a collective, one is frozen by SIGSTOP: the next attempt starts all the same."""
    pids = hang(node, ears, nproc=3, text=DEAF)
    send(pids[1], signal.SIGSTOP)
    wait_stopped_by_signal(pids[1])
    send(pids[0], signal.SIGKILL)
    assert node.wait(WorkersExited).failures[0].pid == pids[0]
    assert node.run(node.script("print('next')", "next.py")).stdout() == "next\n"
    for pid in pids:
        wait_gone(pid)


def test_a_launch_ends_frozen_grandchildren(node: Node, ears: Ears) -> None:
    """Also one in a session of its own, frozen by SIGSTOP, whose parent is gone."""
    text = """
        import subprocess, time
        child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        say(child.pid)
        time.sleep(3600)
    """
    (grandchild,) = hang(node, ears, text=text)
    send(grandchild, signal.SIGSTOP)
    wait_stopped_by_signal(grandchild)
    text = f"import os\nprint(os.path.exists('/proc/{grandchild}'))"
    assert node.run(node.script(text, "next.py")).stdout() == "False\n"


def test_only_the_last_of_many_launches_runs(node: Node) -> None:
    """Orders in quick succession: the last one counts, and earlier ones tell no failures."""
    script = node.script("import os, time\nprint(os.environ['TORCHELASTIC_RESTART_COUNT'])")
    for _ in range(5):
        node.launch(script, nproc=2)
    exited = node.wait(WorkersExited, lambda event: event.attempt == node.attempt)
    assert exited.failures == ()
    assert (node.rank_folder() / "stdout.log").read_text() == f"{node.attempt - 1}\n"


def test_fifty_restarts_leave_nothing_in_the_fork_server(node: Node) -> None:
    """No open files, no zombies, no threads: what an hour of restarts would pile up."""
    script = node.script("import os\nos._exit(int(os.environ['RANK']) * 3)")

    def state() -> tuple[int, int, int]:
        pid = node.supervisor.server_pid
        return len(os.listdir(f"/proc/{pid}/fd")), len(node.children()), len(os.listdir(f"/proc/{pid}/task"))

    def once() -> None:
        port = node.open_store()
        node.launch(script, nproc=2, port=port)
        node.wait(WorkersExited)

    once()
    node.stop()
    until(lambda: len(node.children()) == 1, "more than the store is left")
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


def test_a_store_listens_before_it_is_told(node: Node) -> None:
    """The port is another for each attempt, and open at once; the store of a past attempt is closed."""
    ports = []
    for _ in range(3):
        ports.append(node.open_store())
        assert is_listening(ports[-1])
        assert node.run(node.script("print(1)"), port=ports[-1]).exit_code == 0
    assert len(set(ports)) == 3
    until(lambda: [is_listening(port) for port in ports] == [False, False, True], "an old store listens")


def test_a_store_for_the_next_attempt_survives_the_launch_of_this(node: Node) -> None:
    """The next one is bound while the present one runs, and is the one that its workers meet at."""
    first = node.open_store()
    node.launch(node.script("print(1)"), port=first)
    second = node.open_store()
    node.wait(WorkersExited)
    outcome = node.run(node.script(GROUP.format(how="")), port=second, nproc=2)
    assert outcome.stdout() == "3.0 2\n"


def test_four_ranks_meet_by_environment(node: Node) -> None:
    """`env://`, the way of most scripts, several attempts in a row on fresh stores."""
    script = node.script(GROUP.format(how=""))
    for _ in range(3):
        outcome = node.run(script, nproc=4, port=node.open_store())
        assert [outcome.stdout(rank) for rank in range(4)] == ["10.0 4\n"] * 4, outcome.stderr()


def test_fresh_interpreters_meet_by_environment(either: Node) -> None:
    """The same with workers that are not forked, and with a private group of the script's own."""
    text = """
        import os
        import torch.distributed as dist
        rank = int(os.environ["RANK"])
        url = "tcp://127.0.0.1:" + own_port(rank)
        dist.init_process_group("gloo", init_method=url, rank=rank, world_size=2)
        print(dist.get_world_size())
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        print(dist.get_world_size())
        dist.destroy_process_group()
    """
    outcome = either.run(either.script(text), nproc=2, port=either.open_store())
    assert outcome.stdout() == "2\n2\n", outcome.stderr()


@pytest.mark.parametrize(
    "how",
    [
        f'init_method="file://" + os.path.abspath("meeting"), {RANKED}',
        f'init_method="tcp://{ADDRESS}:" + os.environ["MASTER_PORT"], {RANKED}',
    ],
    ids=["file", "tcp"],
)
def test_ranks_meet_in_other_ways(node: Node, how: str) -> None:
    """`file://`, and `tcp://` to the store that is there already, as under torchrun."""
    outcome = node.run(node.script(GROUP.format(how=how)), nproc=2, port=node.open_store())
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


def test_a_full_disk_does_not_swallow_the_report(own: Node, full_disk: Path) -> None:
    """The worker's last words travel in memory: its error is known though not a byte of it can be written."""
    own.set(run_dir=str(full_disk / "run"))
    outcome = own.run(own.script("while True:\n    print('x' * 1000)"))
    assert outcome.exit_code == 1
    assert outcome.failure.error is not None
    assert outcome.failure.error.type == "OSError"
    assert "No space left on device" in outcome.failure.error.message
    assert not (outcome.folders[0] / "error.json").exists() or (outcome.folders[0] / "error.json").stat().st_size == 0
    own.supervisor.close()
