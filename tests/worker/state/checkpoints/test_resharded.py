"""Parts of a commit, put together for a world of another size by the planner of `torch.distributed.checkpoint`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from raylaunch.core.machine.commits import Commit, HeldCommit  # noqa: E402
from raylaunch.worker.state.checkpoints.resharded import Resharded  # noqa: E402
from raylaunch.worker.state.commit_buffer import CommitBuffer, bytes_needed  # noqa: E402
from raylaunch.worker.state.shared_tensors import PartMemory  # noqa: E402
from raylaunch.worker.state.snapshots.restored import Restored  # noqa: E402
from raylaunch.worker.state.snapshots.snapshot import OBJECT, Snapshot  # noqa: E402

WHOLE = {
    "even": torch.arange(24.0).reshape(12, 2),
    "uneven": torch.arange(35.0).reshape(5, 7) / 3,
    "short": torch.arange(2.0),
    "columns": torch.arange(12.0).reshape(2, 6).to(torch.bfloat16),
}
"""Tensors of which each rank has a part. Of the third one, most ranks have nothing."""
PLACEMENTS = {"even": Shard(0), "uneven": Shard(0), "short": Shard(0), "columns": Shard(1)}


@contextmanager
def world(rank: int, size: int, shape: tuple[int, ...], names: tuple[str, ...]) -> Iterator[object]:
    """Be one rank of a world that does not exist. Yields its mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def sharded(mesh, name: str, plus: int = 0) -> DTensor:
    """Return the DTensor of this rank: sharded over the last dimension of the mesh, and replicated over the others."""
    shard, whole, parts, index = (
        PLACEMENTS[name],
        WHOLE[name] + plus,
        mesh.size(mesh.ndim - 1),
        mesh.get_coordinate()[-1],
    )
    chunks = whole.chunk(parts, shard.dim)
    local = chunks[index] if index < len(chunks) else whole.narrow(shard.dim, 0, 0)
    placements = [Replicate()] * (mesh.ndim - 1) + [shard]
    return DTensor.from_local(
        local.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def buffer_with(found: Snapshot, rank: int, size: int) -> CommitBuffer:
    """Write a snapshot as a rank does."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, bytes_needed(found.tensor_bytes, len(found.pickled)))
    buffer = CommitBuffer(fd)
    buffer.write_pickle(found.pickled, tensors=found.tensor_bytes)
    for target, source in PartMemory(buffer).pairs(found.tensors):
        target.copy_(source)
    held = HeldCommit(rank=rank, world_size=size, commit=Commit(1, 8), replicated=found.is_replicated)
    buffer.header.seal(held, tensors=found.tensor_bytes, pickled=len(found.pickled))
    return buffer


def state(rank: int, mesh) -> dict[str, object]:
    """Return the items of a rank: a model and an optimizer in part, and what is its own."""
    tensors = {name: sharded(mesh, name) for name in WHOLE}
    moments = {
        number: {"step": torch.tensor(8.0), "exp_avg": sharded(mesh, name, plus=1), "number": number}
        for number, name in enumerate(WHOLE)
    }
    groups = [{"lr": 0.5, "betas": (0.9, 0.99), "params": [0, 1, 2, 3]}]
    return {
        f"{OBJECT}model": tensors | {"running_mean": torch.full((3,), float(rank))},
        f"{OBJECT}optimizer": {"state": moments, "param_groups": groups},
        f"{OBJECT}sampler": {"position": torch.tensor([rank]), "epoch": 3},
        "values": {"rank": rank, "nested": [{1: torch.ones(2) * rank}]},
    }


def committed(size: int, shape: tuple[int, ...], names: tuple[str, ...]) -> list[CommitBuffer]:
    """Return the parts of a commit of a whole world."""
    found = []
    for rank in range(size):
        with world(rank, size, shape, names) as mesh:
            found.append(buffer_with(Snapshot(state(rank, mesh), [f"{OBJECT}model", f"{OBJECT}optimizer"]), rank, size))
    return found


def restored(buffers: list[CommitBuffer], rank: int, mesh) -> Resharded:
    return Resharded.of_parts(dict(enumerate(buffers)), rank % len(buffers), [sharded(mesh, name) for name in WHOLE])


def same(found, wanted) -> bool:
    """Return whether two DTensors have the same place, and are bitwise equal in this rank."""
    assert (found.placements, found.shape, found.dtype) == (wanted.placements, wanted.shape, wanted.dtype)
    assert found.device_mesh == wanted.device_mesh
    return torch.equal(found.to_local(), wanted.to_local())


FSDP, HSDP = ("shards",), ("replicas", "shards")


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [((2,), (3,), FSDP), ((4,), (2,), FSDP), ((3,), (1,), FSDP), ((1,), (2,), FSDP), ((2, 2), (3, 2), HSDP)],
)
def test_shards_are_put_together_for_another_world(old, new, names):
    """Bitwise, and in a structure that is the same: integers stay keys, and tuples tuples."""
    size = torch.Size(new).numel()
    buffers = committed(torch.Size(old).numel(), old, names)
    for rank in range(size):
        with world(rank, size, new, names) as mesh:
            found = restored(buffers, rank, mesh)
            model, optimizer = found.item(f"{OBJECT}model"), found.item(f"{OBJECT}optimizer")
            for number, name in enumerate(WHOLE):
                assert same(model[name], sharded(mesh, name))
                moments = optimizer["state"][number]
                assert same(moments["exp_avg"], sharded(mesh, name, plus=1))
                assert (moments["step"], moments["number"]) == (torch.tensor(8.0), number)
            assert optimizer["param_groups"] == [{"lr": 0.5, "betas": (0.9, 0.99), "params": [0, 1, 2, 3]}]


def test_what_is_a_ranks_own_comes_from_the_rank_that_it_follows():
    buffers = committed(2, (2,), FSDP)
    for rank in range(3):
        with world(rank, 3, (3,), FSDP) as mesh:
            found = restored(buffers, rank, mesh)
            assert found.item("values")["rank"] == rank % 2
            assert found.item("values")["nested"][0][1].tolist() == [rank % 2] * 2
            assert found.item(f"{OBJECT}sampler")["position"].tolist() == [rank % 2]


def test_a_script_without_dtensors_gets_whole_tensors():
    """As that of one worker, which does not shard."""
    buffers = committed(3, (3,), FSDP)
    model = Resharded.of_parts(dict(enumerate(buffers)), 0, []).item(f"{OBJECT}model")
    assert all(torch.equal(model[name], whole) for name, whole in WHOLE.items())


def test_a_script_that_has_not_imported_torch_restores_tensors(monkeypatch):
    """Those of random states: `State` imports torch itself where ranks agree. To unpickle the first tensor imports it."""
    buffer = buffer_with(Snapshot({"x": torch.arange(3)}, []), 0, 2)
    with monkeypatch.context() as without:
        without.delitem(sys.modules, "torch")
        found = Restored(buffer, [])
    assert found.item("x").tolist() == [0, 1, 2]


def test_a_part_says_whether_one_is_enough():
    with world(0, 2, (2,), FSDP) as mesh:
        shard = sharded(mesh, "even")
        copy = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
        found = [Snapshot({"x": {"a": torch.ones(1), "b": one}}) for one in (1, copy, shard)]
    assert [one.is_replicated for one in found] == [True, True, False]


def test_summands_are_only_for_the_world_that_has_committed_them():
    with world(0, 1, (1,), FSDP) as mesh:
        buffer = buffer_with(
            Snapshot({"x": DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)}), 0, 1
        )
        assert Restored(buffer, [mesh]).item("x").to_local().tolist() == [1, 1]
        with pytest.raises(ValueError, match=r"placements .*Partial.* can only be restored by the world that"):
            Resharded.of_parts({0: buffer}, 0, [])


def test_a_mesh_that_the_script_does_not_have_is_named():
    buffers = committed(2, (2,), FSDP)
    with world(0, 2, (1, 2), HSDP) as mesh, pytest.raises(ValueError, match="dimensions shards, and the script has 0"):
        restored(buffers, 0, mesh).item(f"{OBJECT}model")
