"""Checks of what training scripts build on collectives: DDP, device meshes, FSDP2; and the speed of an all_reduce."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from raylaunch.worker.selfcheck.bounded_check import CheckSkippedError
from raylaunch.worker.selfcheck.check_context import CheckContext

_ROWS = 2
_FEATURES = 4
_LEARNING_RATE = 0.1
_MIN_RANKS_2D = 4
_LATENCY_TRIES = 20
_SMALL, _LARGE = 256 * 1024, 64 * 1024 * 1024
"""Bytes of the all_reduces that bandwidth is measured with."""
_MAX_LARGE_SECONDS = 1.0
"""The large one is only tried if it is expected to take less than this."""


def ddp_step(ctx: CheckContext) -> None:
    """Check that gradients after `backward` are the mean over all ranks."""
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    ids = [ctx.device.index] if ctx.device.type == "cuda" else None
    model = DistributedDataParallel(_model(ctx), device_ids=ids, process_group=ctx.group)
    model(_batch(ctx, ctx.rank)).square().mean().backward()
    for got, (name, wanted) in zip(model.parameters(), _reference(ctx).named_parameters(), strict=True):
        ctx.expect_close(got.grad, wanted.grad, f"the gradient of {name}")


def mesh_1d(ctx: CheckContext) -> None:
    """Check a device mesh with all ranks in one dimension."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

    mesh = init_device_mesh(ctx.device.type, (ctx.size,), mesh_dim_names=("all",))
    got = ctx.pattern(ctx.rank)
    mesh.get_group("all").allreduce([got]).wait()
    ctx.expect_equal(got, ctx.sum_of_patterns())


def mesh_2d(ctx: CheckContext) -> None:
    """Check a device mesh of pairs: groups of neighbours, and groups of ranks with the same place in their pair."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415

    if ctx.size < _MIN_RANKS_2D or ctx.size % 2:
        raise CheckSkippedError(f"{ctx.size} ranks are no grid; an even number from 4 on is")
    mesh = init_device_mesh(ctx.device.type, (ctx.size // 2, 2), mesh_dim_names=("far", "near"))
    own_pair, own_place = divmod(ctx.rank, 2)
    members = {"near": range(2 * own_pair, 2 * own_pair + 2), "far": range(own_place, ctx.size, 2)}
    for name, ranks in members.items():
        got = ctx.pattern(ctx.rank)
        mesh.get_group(name).allreduce([got]).wait()
        ctx.expect_equal(got, sum(ctx.pattern(rank) for rank in ranks), f"over ranks {list(ranks)}")


def fsdp2_step(ctx: CheckContext) -> None:
    """Check that parameters after one step are those of the model that is not sharded."""
    import torch  # noqa: PLC0415
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    if ctx.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise CheckSkippedError("FSDP2 of this torch needs GPUs")  # such as torch 2.6
    model = _model(ctx)
    fully_shard(model, mesh=init_device_mesh(ctx.device.type, (ctx.size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    model(_batch(ctx, ctx.rank)).square().mean().backward()
    optimizer.step()
    reference = _reference(ctx)
    torch.optim.SGD(reference.parameters(), lr=_LEARNING_RATE).step()
    for got, (name, wanted) in zip(model.parameters(), reference.named_parameters(), strict=True):
        ctx.expect_close(got.full_tensor(), wanted, f"the parameter {name} after the step")


def _model(ctx: CheckContext) -> Any:
    """Return a model that is the same on all ranks. No random number is drawn."""
    import torch  # noqa: PLC0415

    model = torch.nn.Sequential(torch.nn.Linear(_FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(ctx.device)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.linspace(-0.5, 0.7, parameter.numel(), device=ctx.device)
            parameter.copy_(values.view_as(parameter))
    return model


def _batch(ctx: CheckContext, rank: int) -> Any:
    import torch  # noqa: PLC0415

    count = _ROWS * _FEATURES
    return torch.sin(torch.arange(count, device=ctx.device) + float(rank * count)).view(_ROWS, _FEATURES)


def _reference(ctx: CheckContext) -> Any:
    """Return the model with the mean gradient over all ranks' batches, which have the same size."""
    import torch  # noqa: PLC0415

    model = _model(ctx)
    model(torch.cat([_batch(ctx, rank) for rank in range(ctx.size)])).square().mean().backward()
    return model


MODELS: tuple[tuple[str, Callable[[CheckContext], None]], ...] = (
    ("DDP step", ddp_step),
    ("init_device_mesh, 1-D", mesh_1d),
    ("init_device_mesh, 2-D", mesh_2d),
    ("FSDP2 step", fsdp2_step),
)


def speed(ctx: CheckContext) -> str:
    """Measure latency and bandwidth of an all_reduce; return them as a text."""
    if ctx.size == 1:
        raise CheckSkippedError("one rank sends nothing")
    latency = statistics.median(_seconds(ctx, 4) for _ in range(_LATENCY_TRIES))
    _seconds(ctx, _SMALL)
    small = _slowest(ctx, _seconds(ctx, _SMALL))
    size, seconds = _SMALL, small
    if small * _LARGE / _SMALL < _MAX_LARGE_SECONDS:
        _seconds(ctx, _LARGE)
        size, seconds = _LARGE, _slowest(ctx, _seconds(ctx, _LARGE))
    unit = f"{size // 2**20} MB" if size >= 2**20 else f"{size // 2**10} KB"
    return f"4 B in {latency * 1e6:.0f} us, {unit} at {size / seconds / 1e9:.3g} GB/s"


def _seconds(ctx: CheckContext, size: int) -> float:
    import torch  # noqa: PLC0415

    data = torch.zeros(size // 4, device=ctx.device)
    if ctx.device.type != "cpu":
        torch.accelerator.synchronize(ctx.device)
    start = time.perf_counter()
    ctx.group.allreduce([data]).wait()
    if ctx.device.type != "cpu":
        torch.accelerator.synchronize(ctx.device)
    return time.perf_counter() - start


def _slowest(ctx: CheckContext, seconds: float) -> float:
    """Return the slowest rank's time on all ranks, so that all decide alike what to do next."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    value = torch.tensor([seconds], device=ctx.device)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    ctx.group.allreduce([value], options).wait()
    return float(value.item())
