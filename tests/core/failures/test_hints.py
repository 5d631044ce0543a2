"""Hints about the root cause of a failure: each has its evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machine_helpers import failure, raised

from raylaunch.core.failures.failure import WorkerError
from raylaunch.core.failures.hints import hints
from raylaunch.core.failures.stack_notes import CHILD_STOPPED, IN_THE_KERNEL, NO_ANSWER, RUNNING_ON, STOPPED
from raylaunch.core.failures.stacks import StackGroup


def only_hint(unheard=(), **facts) -> str:
    """Return the only hint, or ""."""
    found = hints(failure(**({"host": "gpu-7"} | facts)), unheard)
    assert len(found) <= 1
    return found[0] if found else ""


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        (raised("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"), "expandable_segments:True"),
        (raised("DistNetworkError", "port: 29500, name: EADDRINUSE, message: address already in use"), "on gpu-7"),
        ({"exit_code": 1, "tail": "OSError: [Errno 98] Address already in use"}, "MASTER_PORT"),
        (raised("ModuleNotFoundError", "No module named 'flash_attn.ops'"), "is `flash_attn.ops` installed"),
        (raised("RuntimeError", "DataLoader worker (pid 5) is killed by signal: Killed. "), "num_workers"),
        (raised("RuntimeError", "CUDA error: invalid device ordinal"), "`nproc_per_node`"),
        (raised("AcceleratorError", "CUDA error: an illegal memory access was encountered"), "CUDA_LAUNCH_BLOCKING"),
        (raised("RuntimeError", "CUDA error: device-side assert triggered"), "CUDA_LAUNCH_BLOCKING"),
        (raised("DistBackendError", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device"), "LOCAL_RANK"),
        (raised("OSError", "[Errno 28] No space left on device"), "a disk of gpu-7 is full"),
        (raised("BdbQuit", ""), "`--debug RANK`"),
        (raised("EOFError", "EOF when reading a line"), "`--debug RANK`"),
        ({"exit_code": -7}, "/dev/shm"),
        ({"exit_code": 135, "tail": "Bus error"}, "/dev/shm"),
        ({"exit_code": -9}, "`dmesg` on gpu-7"),
        ({"exit_code": 137, "tail": "Killed"}, "`dmesg` on gpu-7"),
        ({"exit_code": -9, "host": ""}, "`dmesg` on a"),
        ({"exit_code": -9, "evidence": "out of memory: the kernel killed it"}, "less host memory"),
        ({"exit_code": -9, "evidence": "the kernel killed 2 processes"}, "if it was among these: use less host memory"),
        (
            {"exit_code": 137, "evidence": "the kernel killed 2 processes"},
            "if it was among these: use less host memory",
        ),
        ({"exit_code": -6, "evidence": "out of memory: std::bad_alloc"}, "less host memory"),
        ({"exit_code": 3}, "`sys.exit`"),
    ],
)
def test_messages_and_evidence_give_a_hint(facts, part):
    """One hint, with the name of the host if that matters."""
    assert part in only_hint(**facts)


@pytest.mark.parametrize(
    "facts",
    [
        raised("ValueError", "loss is NaN"),
        {"exit_code": -11},
        {"exit_code": -15},
        {"exit_code": -6, "tail": "free(): invalid pointer"},
        {"exit_code": 3, "tail": "usage: train.py"},
        {"exit_code": 139},
        raised("ValueError", "NaN") | {"exit_code": -9},
        raised("ValueError", "NaN") | {"tail": "CUDA out of memory was yesterday"},
    ],
)
def test_no_hint_without_evidence(facts):
    assert only_hint(**facts) == ""


def test_kill_counts_more_than_an_error_file():
    """The worker lived on after the error in the file."""
    left = WorkerError(type="RuntimeError", message="CUDA out of memory", traceback="", from_file=True)
    assert "`dmesg`" in only_hint(exit_code=-9, error=left)


def hang_hints(*groups: StackGroup, waited: bool = False, hung: str = "no step for 5.0 s") -> list[str]:
    """Return the hints for a hang of rank 1 with these stacks."""
    cause = failure(rank=1, host="gpu-7", hung=hung, waited=waited, tail="CUDA out of memory")
    return [*hints(cause, (0,), groups)]


def at(*frames: str, ranks: tuple[int, ...] = (1,), note: str = "") -> StackGroup:
    return StackGroup(ranks=ranks, frames=frames, note=note)


IN_REDUCE = ("/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py:3030 in all_reduce", "/t.py:3 in f")


@pytest.mark.parametrize(
    ("note", "part"),
    [
        (STOPPED, "somebody stopped its process on gpu-7"),
        (CHILD_STOPPED, "somebody stopped a process that it started on gpu-7"),
        (IN_THE_KERNEL, "a disk, a network file system"),
        (RUNNING_ON, "`py-spy dump --native` on gpu-7"),
        (NO_ANSWER, "no stack came from it"),
    ],
)
def test_hang_of_a_process_without_stack(note, part):
    """The state of the process gives the hint; a longer time limit would not help."""
    (hint,) = hang_hints(at(note=note), at(*IN_REDUCE, ranks=(0,)))
    assert part in hint


def test_hang_in_a_data_loader():
    own, slow = hang_hints(at("/usr/queue.py:3 in get", "/torch/utils/data/dataloader.py:9 in __next__"))
    assert "data loader" in own
    assert "gpu-7" in own
    assert "`hang_timeout`" in slow


def test_hang_in_collectives():
    """All ranks in the same collective, or in different ones."""
    (same,) = hang_hints(at(*IN_REDUCE, ranks=(0, 1)), waited=True)
    assert "all ranks wait in the same collective" in same
    (other,) = hang_hints(at(*IN_REDUCE), at(*IN_REDUCE[1:], ranks=(0,)), waited=True)
    assert "in the same order" in other


def test_hang_that_may_be_slow_work():
    """The hint names both ways to allow more time, even if the stack is unknown."""
    for groups in ((at("/job/train.py:33 in fetch"),), ()):
        (hint,) = hang_hints(*groups)
        assert "`hang_timeout`" in hint
        assert "raylaunch.worker.section" in hint


def test_hang_before_the_first_step():
    """The hint says that imports count, and what a loop without an optimizer has to do."""
    first, slow = hang_hints(at("/job/train.py:33 in fetch"), hung="no first step for 8.0 s")
    assert "raylaunch.worker.section" in slow
    assert "imports and the first step" in first
    assert "raylaunch.worker.heartbeat()" in first


PEER_LOST = raised("RuntimeError", "Connection closed by peer")


def test_collateral_failure_without_a_cause():
    """The hint names the ranks that ended with exit code 0: they may have left the others waiting."""
    assert (
        only_hint(**PEER_LOST)
        == "it lost a peer, and no other failure is known: the logs of the other ranks may say more"
    )
    assert "rank 3 ended with exit code 0: did it leave" in only_hint((3,), **PEER_LOST)
    assert "ranks 3, 5 ended with exit code 0: did they leave" in only_hint((3, 5), **PEER_LOST)
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... ended" in only_hint(tuple(range(90)), **PEER_LOST)


def test_hints_use_the_host_name():
    """Users know the host name, not raylaunch's name of the node."""
    cause = failure("node-2", exit_code=-9, host="gpu-7")
    assert "gpu-7" in hints(cause)[0]
    assert "node-2" in hints(replace(cause, host=""))[0]
