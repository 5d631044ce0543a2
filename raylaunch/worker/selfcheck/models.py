"""What training scripts build on the operations: DDP, device meshes, FSDP2; and how fast an all_reduce is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from raylaunch.worker.selfcheck.attempt import SkippedError
from raylaunch.worker.selfcheck.bench import Bench

_ROWS = 2
_FEATURES = 4
_RATE = 0.1
_LEAST_FOR_2D = 4
_LATENCY_TRIES = 20
_SMALL, _LARGE = 256 * 1024, 64 * 1024 * 1024
_PATIENCE = 1.0


def ddp_step(on: Bench) -> None:
    """Gradients after `backward` are the mean of all ranks'."""
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    ids = [on.device.index] if on.device.type == "cuda" else None
    model = DistributedDataParallel(_model(on), device_ids=ids, process_group=on.group)
    model(_batch(on, on.rank)).square().mean().backward()
    for got, (name, wanted) in zip(model.parameters(), _reference(on).named_parameters(), strict=True):
        on.expect_close(got.grad, wanted.grad, f"the gradient of {name}")


def mesh_1d(on: Bench) -> None:
    """All ranks in one dimension."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

    mesh = init_device_mesh(on.device.type, (on.size,), mesh_dim_names=("all",))
    got = on.mark(on.rank)
    mesh.get_group("all").allreduce([got]).wait()
    on.expect(got, on.total())


def mesh_2d(on: Bench) -> None:
    """Pairs of neighbours, and the ranks that have the same place in their pair."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

    if on.size < _LEAST_FOR_2D or on.size % 2:
        raise SkippedError(f"{on.size} ranks are no grid; an even number from 4 on is")
    mesh = init_device_mesh(on.device.type, (on.size // 2, 2), mesh_dim_names=("far", "near"))
    own_pair, own_place = divmod(on.rank, 2)
    members = {"near": range(2 * own_pair, 2 * own_pair + 2), "far": range(own_place, on.size, 2)}
    for name, ranks in members.items():
        got = on.mark(on.rank)
        mesh.get_group(name).allreduce([got]).wait()
        on.expect(got, sum(on.mark(rank) for rank in ranks), f"over ranks {list(ranks)}")


def fsdp2_step(on: Bench) -> None:
    """Parameters after one step are those of the model that is not sharded."""
    import torch  # noqa: PLC0415
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    model = _model(on)
    fully_shard(model, mesh=init_device_mesh(on.device.type, (on.size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    model(_batch(on, on.rank)).square().mean().backward()
    optimizer.step()
    reference = _reference(on)
    torch.optim.SGD(reference.parameters(), lr=_RATE).step()
    for got, (name, wanted) in zip(model.parameters(), reference.named_parameters(), strict=True):
        on.expect_close(got.full_tensor(), wanted, f"the parameter {name} after the step")


def _model(on: Bench) -> Any:
    """The same on all ranks, and no random number drawn."""
    import torch  # noqa: PLC0415

    model = torch.nn.Sequential(torch.nn.Linear(_FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(on.device)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.linspace(-0.5, 0.7, parameter.numel(), device=on.device)
            parameter.copy_(values.view_as(parameter))
    return model


def _batch(on: Bench, rank: int) -> Any:
    import torch  # noqa: PLC0415

    count = _ROWS * _FEATURES
    return torch.sin(torch.arange(count, device=on.device) + float(rank * count)).view(_ROWS, _FEATURES)


def _reference(on: Bench) -> Any:
    """The model with the gradients of all ranks' batches; those are of one size, so their mean is the whole's."""
    import torch  # noqa: PLC0415

    model = _model(on)
    model(torch.cat([_batch(on, rank) for rank in range(on.size)])).square().mean().backward()
    return model


MODELS: tuple[tuple[str, Callable[[Bench], None]], ...] = (
    ("DDP step", ddp_step),
    ("init_device_mesh, 1-D", mesh_1d),
    ("init_device_mesh, 2-D", mesh_2d),
    ("FSDP2 step", fsdp2_step),
)


def speed(on: Bench) -> str:
    """Latency and bandwidth of an all_reduce; the large one only where the small one lets it end soon."""
    if on.size == 1:
        raise SkippedError("one rank sends nothing")
    latency = statistics.median(_seconds(on, 4) for _ in range(_LATENCY_TRIES))
    _seconds(on, _SMALL)
    small = _slowest(on, _seconds(on, _SMALL))
    size, seconds = _SMALL, small
    if small * _LARGE / _SMALL < _PATIENCE:
        _seconds(on, _LARGE)
        size, seconds = _LARGE, _slowest(on, _seconds(on, _LARGE))
    unit = f"{size // 2**20} MB" if size >= 2**20 else f"{size // 2**10} KB"
    return f"4 B in {latency * 1e6:.0f} us, {unit} at {size / seconds / 1e9:.3g} GB/s"


def _seconds(on: Bench, size: int) -> float:
    import torch  # noqa: PLC0415

    data = torch.zeros(size // 4, device=on.device)
    if on.device.type != "cpu":
        torch.accelerator.synchronize(on.device)
    start = time.perf_counter()
    on.group.allreduce([data]).wait()
    if on.device.type != "cpu":
        torch.accelerator.synchronize(on.device)
    return time.perf_counter() - start


def _slowest(on: Bench, seconds: float) -> float:
    """The same number on all ranks, since what comes next depends on it."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    value = torch.tensor([seconds], device=on.device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    on.group.allreduce([value], options).wait()
    return float(value.item())
