"""What a restored commit makes of tensors: where they are, how many there are at a time, and of which class."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402

from raylaunch.worker import torch_internals  # noqa: E402
from raylaunch.worker.state import elastic_state  # noqa: E402
from raylaunch.worker.state.checkpoints.resharded import Resharded  # noqa: E402
from raylaunch.worker.state.snapshots import restored  # noqa: E402
from raylaunch.worker.state.snapshots.restored import OwnMemory, Restored  # noqa: E402
from raylaunch.worker.state.snapshots.snapshot import OBJECT, Snapshot  # noqa: E402
from tests.worker.state.checkpoints.test_resharded import buffer_with, world  # noqa: E402

NAME = f"{OBJECT}model"


def shard(mesh: Any, value: float) -> Any:
    """Return a parameter's part as `fully_shard` makes it, on a device of which nothing can be read back."""
    local = torch.full((6 // mesh.size(),), value)
    return torch_internals.dtensor_of(local, mesh, [Shard(0)], torch.Size((6,)), (1,))


@pytest.mark.parametrize("size", [2, 3])
def test_parameters_are_copied_into_those_of_the_model_and_to_the_device_by_no_other_way(monkeypatch, size):
    """There may be no room for them twice. What `DTensor.from_local` takes to the mesh's device is lost here."""
    buffers = []
    for rank in range(2):
        with world(rank, 2, (2,), ("shards",)):
            state = {"weight": shard(init_device_mesh("meta", (2,)), rank + 1.0)}
            buffers.append(buffer_with(Snapshot({NAME: state}, [NAME]), rank, 2))
    with world(1, size, (size,), ("shards",)):
        model = nn.Module()
        model.weight = nn.Parameter(shard(init_device_mesh("meta", (size,)), 0.0))
        if size == 2:
            found = Restored(buffers[1], restored.meshes_of(model.parameters()))
        else:
            found = Resharded.of_parts(dict(enumerate(buffers)), 1, [*model.parameters()])
        monkeypatch.setattr(OwnMemory, "empty", lambda *_: pytest.fail("there are two of a parameter"))
        elastic_state._load(model, found, NAME)  # noqa: SLF001
        assert model.weight.to_local().tolist() == ([2.0] * 3 if size == 2 else [1.0, 2.0])


def test_the_state_of_an_optimizer_is_gone_before_what_is_restored_is_made(monkeypatch):
    """In a survivor, whose device may have no room for both."""
    model = nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    wanted = optimizer.state[model.weight]["exp_avg"].clone()
    found = Restored(buffer_with(Snapshot({NAME: optimizer.state_dict()}), 0, 1), ())
    own = [weakref.ref(one["exp_avg"]) for one in optimizer.state.values()]
    left = []
    monkeypatch.setattr(
        OwnMemory,
        "empty",
        lambda _self, dtype, shape, *_: (
            left.append(any(one() is not None for one in own)) or torch.empty(shape, dtype=dtype)
        ),
    )
    elastic_state._load(optimizer, found, NAME)  # noqa: SLF001
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], wanted)
    assert left == [False] * len(left) != []


class Named(torch.Tensor):
    """A tensor with an attribute more."""


class Scaled(torch.Tensor):
    """A tensor that is made of two, as torchao has them."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, device=data.device)  # noqa: SLF001

    def __init__(self, data, scale):
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["data_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _meta, *_):
        return cls(inner["data_"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, _types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data_, args[0].scale)
        if func is torch.ops.aten.copy_.default:
            for own, new in ((args[0].data_, args[1].data_), (args[0].scale, args[1].scale)):
                own.copy_(new)
            return args[0]
        raise NotImplementedError(func)


class Quantized(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        data, scale = torch.full((1000,), value, dtype=torch.int8), torch.tensor([value / 2])
        self.scaled = nn.Parameter(Scaled(data, scale), requires_grad=False)
        self.named = torch.full((1000,), float(value)).as_subclass(Named)
        self.named.note = f"of {value}"
        self.register_buffer("buffer", self.named)


def test_tensors_of_other_classes_are_copied_as_tensors():
    """And not pickled by torch, which waits for the device for each."""
    model = Quantized(3)
    snapshot = Snapshot({NAME: model.state_dict(), "value": model.named})
    assert (len(snapshot.tensors), len(snapshot.pickled) < 2000) == (4, True)
    found = Restored(buffer_with(snapshot, 0, 1), ())
    other = Quantized(5)
    elastic_state._load(other, found, NAME)  # noqa: SLF001
    assert (other.scaled.data_[7].item(), other.scaled.scale.item(), other.buffer[7].item()) == (3, 1.5, 3.0)
    value = found.item("value")
    assert (type(value), value.note, value[9].item()) == (Named, "of 3", 3.0)
