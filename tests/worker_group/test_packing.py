"""Arguments and results of groups, as they are sent."""

from __future__ import annotations

import pickle
import socket
import threading

import numpy as np
import pytest
import ray
import torch

from raylaunch.worker_group.calls import (
    CallFailedError,
    GroupRestart,
    PackedArguments,
    RankRestartedError,
    scatter,
)
from raylaunch.worker_group.rank import frames, packing


def test_arrays_and_tensors_are_not_copied_into_the_pickle() -> None:
    """They are buffers, and those are the memory of the array itself."""
    array, tensor = np.arange(10_000), torch.arange(10_000, dtype=torch.bfloat16).reshape(100, 100)
    first, *buffers = packing.packed({"array": array, "tensor": tensor})
    assert len(first) < 1000
    assert [memoryview(buffer).nbytes for buffer in buffers] == [80_000, 20_000]
    array[0] = 7
    found = packing.unpacked([first, *buffers])
    assert found["array"][0] == 7
    assert found["tensor"].dtype == torch.bfloat16
    assert torch.equal(found["tensor"], tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3),
        torch.ones(100, 100).t()[:, :50],
        torch.ones(10_000, requires_grad=True),
        torch.ones(10_000).to_sparse(),
        torch.nn.Parameter(torch.ones(10_000)),
    ],
    ids=["small", "strided", "grad", "sparse", "parameter"],
)
def test_other_tensors_are_pickled_as_torch_does(tensor: torch.Tensor) -> None:
    found = packing.unpacked(packing.packed(tensor))
    assert type(found) is type(tensor)
    assert found.requires_grad == tensor.requires_grad
    assert torch.equal(found.to_dense(), tensor.to_dense())


def test_a_tensor_in_memory_that_is_read_only_is_a_copy() -> None:
    """As in Ray's store: torch would write to it, and the process would be killed."""
    first, buffer = packing.packed(torch.zeros(10_000))
    memory = bytes(memoryview(buffer))
    found = packing.unpacked([first, memoryview(memory)])
    found += 1
    assert found.sum() == 10_000
    assert not any(memory)


def test_each_rank_gets_its_own_part() -> None:
    """Wherever it is in the arguments; one that occurs twice is sent once."""
    parts = scatter([np.full(5000, 1), np.full(5000, 2)])
    arguments = PackedArguments(("same", {"part": parts}), {"again": parts})
    for rank in (0, 1):
        common, *own = arguments.of(rank)
        (word, where), kwargs = packing.unpacked(common, lambda number, own=own: packing.unpacked(own[number]))
        assert word == "same"
        assert where["part"].tolist() == [rank + 1] * 5000
        assert kwargs["again"] is where["part"]
    with pytest.raises(ValueError, match="`scatter` got 2 parts, and the group has 3 ranks"):
        arguments.check(3)


def test_no_object_of_ray_is_inside_of_another(monkeypatch) -> None:
    monkeypatch.setattr(ray, "ObjectRef", GroupRestart)
    with pytest.raises(TypeError, match="an ObjectRef inside of a part"):
        PackedArguments([scatter([[object.__new__(GroupRestart)], 2])], {})


def test_frames_are_whole() -> None:
    """Also those with more buffers than a system call takes, empty ones, and large ones."""
    left, right = socket.socketpair()
    parts = [*(bytes([number % 256]) * (number % 7) for number in range(2000)), bytes(3_000_000)]
    sender = threading.Thread(target=frames.send, args=(left, {"a": 1}, parts))
    sender.start()
    message, found = frames.receive(right)
    sender.join()
    left.close()
    assert (message, [bytes(part) for part in found]) == ({"a": 1}, parts)
    with pytest.raises(EOFError):
        frames.receive(right)
    right.close()


def test_errors_reach_other_processes_whole() -> None:
    restart = GroupRestart(
        ranks=(1, 2), why="rank 1 was killed", attempt=2, world_size=3, world_size_before=3, completed=7
    )
    error = pickle.loads(pickle.dumps(RankRestartedError(restart, interrupted=False)))
    assert (error.restart, error.interrupted) == (restart, False)
    assert str(error) == (
        "ranks 1-2 failed before this call, which was not begun (rank 1 was killed); all ranks run again, in attempt 2; "
        "`State` was restored after 7 steps\nhint: make the call again, or have it made again by `retry=True`"
    )
    assert pickle.loads(pickle.dumps(CallFailedError("it raised", rank=3))).rank == 3
