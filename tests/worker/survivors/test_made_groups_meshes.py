"""Device meshes of a process whose rank changes: DTensor must not take what it knows of the mesh before."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from raylaunch.worker import torch_internals
from raylaunch.worker.survivors.made_groups import MadeGroups


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[MadeGroups]:
    """As if this process was a worker that has called its elastic function."""
    made = MadeGroups()
    assert sys.modules[device_mesh.__name__] is device_mesh
    monkeypatch.setattr(device_mesh.DeviceMesh, "__init__", device_mesh.DeviceMesh.__init__)
    torch_internals.watch_meshes(device_mesh, made._mesh_made)  # noqa: SLF001
    made.end_preparation()
    yield made
    dist.destroy_process_group()


def doubled(rank: int) -> torch.Tensor:
    """Compute with a DTensor of a mesh of three ranks, of which this process is one, without communication."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    mesh = device_mesh.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    found = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)], src_data_rank=None) * 2
    assert found.device_mesh is mesh
    assert tuple(found.device_mesh["dp"].get_coordinate() or ()) == (rank,)
    return found.to_local()


def test_a_process_that_has_another_rank_has_the_mesh_of_that_rank(made):
    """Torch holds meshes of the same ranks to be equal, and remembers one for all."""
    assert doubled(2).tolist() == [12.0]
    made.forget()
    assert doubled(1).tolist() == [6.0, 8.0, 10.0]


def test_a_mesh_that_is_made_before_the_function_is_named(made):
    """What is sharded by it would be of the world before."""
    before = MadeGroups()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    torch_internals.watch_meshes(device_mesh, before._mesh_made)  # noqa: SLF001
    device_mesh.init_device_mesh("cpu", (1,))
    before.options = {"backend": "fake"}
    assert "makes a device mesh before it calls the elastic function" in before.end_preparation()
