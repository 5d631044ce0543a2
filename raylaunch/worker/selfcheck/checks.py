"""The table of checks: what each one does in a process group of all ranks. Start at the end, with `CHECKS`.

Only ranks import this module: it imports torch.

Each value depends on its sender and its receiver, so that a wrong peer or order is noticed.
"""

from __future__ import annotations

import os
import re
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from raylaunch.worker.selfcheck.findings import CheckOutcome, CheckStatus

_SENDER_FACTOR = 1000.0
_BARRIER_DELAY = 0.05
"""Seconds by which the last rank comes later to the barrier."""
_MIN_RANKS_2D = 4
_LATENCY_TRIES = 20
_SMALL, _LARGE = 256 * 1024, 64 * 1024 * 1024
"""Bytes of the all_reduces that bandwidth is measured with."""
_MAX_LARGE_SECONDS = 1.0
"""The large one is only tried if it is expected to take less than this."""


_MAX_TEXT = 300
"""Characters of an error's text that a row shows."""
_TIMED_OUT = re.compile(r"time(d)?[ -]?out", re.IGNORECASE)
_UNSUPPORTED = re.compile(
    r"^Backend \S+ does not (yet )?(support|implement) "  # torch/csrc/distributed/c10d/Backend.hpp
    r"|^Could not run 'c10d::"  # the dispatcher: no kernel of this operation for the device
    r"|^No backend type associated with device type "
    r"|^ProcessGroup\w+ does not support "
)
"""How torch says that a backend lacks an operation. It says so before anything is sent."""


class WrongResultError(Exception):
    """An operation returned another value than expected."""


class CheckSkippedError(Exception):
    """The check does not apply here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckContext:
    """One backend on one rank."""

    backend: str
    rank: int
    size: int
    device: Any
    timeout: timedelta
    store: Any
    """The launch's store, with a prefix of the self-check."""

    def pattern(self, sender: int, receiver: int = 0) -> Any:
        """Return the tensor that `sender` sends to `receiver`; no other pair of ranks has the same."""
        values = [_SENDER_FACTOR * sender + receiver, float(sender), float(receiver)]
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def unfilled(self, *shape: int) -> Any:
        """Return a tensor to receive into, filled with a value that no rank sends."""
        return torch.full(shape or (3,), -1.0, dtype=torch.float32, device=self.device)

    def sent(self, receiver: int) -> list[Any]:
        """Return what all ranks send to `receiver`, by sender."""
        return [self.pattern(sender, receiver) for sender in range(self.size)]

    def given(self, sender: int) -> list[Any]:
        """Return what `sender` sends to all ranks, by receiver."""
        return [self.pattern(sender, receiver) for receiver in range(self.size)]

    @property
    def roots(self) -> list[int]:
        """The first and the last rank: with two different roots, an ignored `src` or `dst` is noticed."""
        return sorted({0, self.size - 1})

    @property
    def neighbours(self) -> tuple[int, int]:
        """The next rank and the one before. Raises CheckSkippedError if there is no other rank."""
        if self.size == 1:
            raise CheckSkippedError("one rank has no peer")
        return (self.rank + 1) % self.size, (self.rank - 1) % self.size


def device_of(backend: str) -> Any:
    """Return the device of this rank's tensors for a backend, which becomes the current one."""
    kind = {"nccl": "cuda", "xccl": "xpu"}.get(backend)
    if kind is None:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


# The group.


def _init_env(ctx: CheckContext) -> None:
    dist.init_process_group(ctx.backend, rank=ctx.rank, world_size=ctx.size, timeout=ctx.timeout)


def _init_tcp(ctx: CheckContext) -> Iterator[tuple[Any, Any]]:
    """Replace the group by one of a second store, on a free port of rank 0's node. It is destroyed at the end.

    Under TORCHELASTIC_USE_AGENT_STORE torch would wait for a server that nobody starts (pytorch#192113).
    """
    port = [free_port()]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    host = os.environ["MASTER_ADDR"]
    dist.init_process_group(
        ctx.backend,
        init_method=f"tcp://[{host}]:{port[0]}" if ":" in host else f"tcp://{host}:{port[0]}",
        rank=ctx.rank,
        world_size=ctx.size,
        timeout=ctx.timeout,
    )
    yield from _all_reduce(ctx)
    dist.destroy_process_group()


def free_port() -> int:
    """Return a port that no socket of this machine is bound to now."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


# Collectives and messages. Each yields pairs: what this rank got, and what it must be.


def _wait(work: Any) -> None:
    """Wait for a collective, which raises an error if that takes too long. None: this rank has no part in it.

    A call without `async_op` does not wait with NCCL since torch 2.8, and knows no timeout.
    """
    if work is not None:
        work.wait()


def _broadcast(ctx: CheckContext) -> Iterator[tuple[Any, Any]]:
    for root in ctx.roots:
        got = ctx.pattern(root) if ctx.rank == root else ctx.unfilled()
        _wait(dist.broadcast(got, src=root, async_op=True))
        yield got, ctx.pattern(root)


def _reduce(ctx: CheckContext) -> Iterator[tuple[Any, Any]]:
    for root in ctx.roots:
        got = ctx.pattern(ctx.rank)
        _wait(dist.reduce(got, dst=root, async_op=True))
        if ctx.rank == root:
            yield got, sum(ctx.sent(0))


def _all_reduce(ctx: CheckContext) -> Iterator[tuple[Any, Any]]:
    for operation, wanted in ((dist.ReduceOp.SUM, sum(ctx.sent(0))), (dist.ReduceOp.MAX, ctx.pattern(ctx.size - 1))):
        got = ctx.pattern(ctx.rank)
        _wait(dist.all_reduce(got, op=operation, async_op=True))
        yield got, wanted


def _gather(ctx: CheckContext) -> Iterator[tuple[Any, Any]]:
    for root in ctx.roots:
        got = [ctx.unfilled() for _ in range(ctx.size)] if ctx.rank == root else None
        _wait(dist.gather(ctx.pattern(ctx.rank, root), got, dst=root, async_op=True))
        if got is not None:
            yield got, ctx.sent(root)


def _all_gather_into_tensor(ctx: CheckContext) -> Iterator[tuple[Any, Any]]:
    got = ctx.unfilled(ctx.size, 3)
    _wait(dist.all_gather_into_tensor(got, ctx.pattern(ctx.rank).unsqueeze(0), async_op=True))
    yield list(got), ctx.sent(0)


def _all_gather_object(ctx: CheckContext) -> Iterator[tuple[Any, Any]]:
    got: list[Any] = [None] * ctx.size
    dist.all_gather_object(got, {"from": ctx.rank})
    yield got, [{"from": sender} for sender in range(ctx.size)]


def _scatter(ctx: CheckContext) -> Iterator[tuple[Any, Any]]:
    for root in ctx.roots:
        got = ctx.unfilled()
        _wait(dist.scatter(got, ctx.given(root) if ctx.rank == root else None, src=root, async_op=True))
        yield got, ctx.pattern(root, ctx.rank)


def _reduce_scatter_tensor(ctx: CheckContext) -> Iterator[tuple[Any, Any]]:
    got = ctx.unfilled(1, 3)
    _wait(dist.reduce_scatter_tensor(got, torch.stack(ctx.given(ctx.rank)), async_op=True))
    yield got[0], sum(ctx.sent(ctx.rank))


def _all_to_all_single(ctx: CheckContext) -> Iterator[tuple[Any, Any]]:
    got = ctx.unfilled(ctx.size, 3)
    _wait(dist.all_to_all_single(got, torch.stack(ctx.given(ctx.rank)), async_op=True))
    yield list(got), ctx.sent(ctx.rank)


def _barrier(ctx: CheckContext) -> None:
    """Check that no rank passes before the last rank has come, which is late on purpose."""
    key = f"barrier/{ctx.backend}"
    if ctx.rank == ctx.size - 1:
        time.sleep(_BARRIER_DELAY)
    ctx.store.add(key, 1)
    _wait(dist.barrier(device_ids=[ctx.device.index] if ctx.device.type == "cuda" else None, async_op=True))
    came = ctx.store.add(key, 0)
    if came != ctx.size:
        raise WrongResultError(f"expected all {ctx.size} ranks to have come, but {came} had")


def _send_recv(ctx: CheckContext) -> Iterator[tuple[Any, Any]]:
    """Send from each rank to the next, one after the other."""
    after, before = ctx.neighbours
    for sender in range(ctx.size):
        if ctx.rank == sender:
            dist.send(ctx.pattern(sender, after), dst=after)
        elif before == sender:
            got = ctx.unfilled()
            dist.recv(got, src=sender)
            yield got, ctx.pattern(sender, ctx.rank)


def _batch_isend_irecv(ctx: CheckContext) -> Iterator[tuple[Any, Any]]:
    after, before = ctx.neighbours
    got = ctx.unfilled()
    send = dist.P2POp(dist.isend, ctx.pattern(ctx.rank, after), after)
    for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, got, before)]):
        work.wait()
    yield got, ctx.pattern(before, ctx.rank)


# What training scripts build on collectives.


def _ddp_step(ctx: CheckContext) -> None:
    """Check that gradients after `backward` are the mean over all ranks."""
    model = DistributedDataParallel(_model(ctx), device_ids=[ctx.device.index] if ctx.device.type == "cuda" else None)
    model(_batch(ctx, ctx.rank)).square().mean().backward()
    for got, (name, wanted) in zip(model.parameters(), _reference(ctx).named_parameters(), strict=True):
        _expect_close(got.grad, wanted.grad, f"the gradient of {name}")


def _mesh_2d(ctx: CheckContext) -> Iterator[tuple[Any, Any]]:
    """Check a device mesh of pairs: groups of neighbours, and groups of ranks with the same place in their pair."""
    if ctx.size < _MIN_RANKS_2D or ctx.size % 2:
        raise CheckSkippedError(f"{ctx.size} ranks are no grid; an even number from 4 on is")
    mesh = init_device_mesh(ctx.device.type, (ctx.size // 2, 2), mesh_dim_names=("far", "near"))
    pair, place = divmod(ctx.rank, 2)
    for name, ranks in (("near", range(2 * pair, 2 * pair + 2)), ("far", range(place, ctx.size, 2))):
        got = ctx.pattern(ctx.rank)
        mesh.get_group(name).allreduce([got]).wait()
        yield got, sum(map(ctx.pattern, ranks))


def _fsdp2_step(ctx: CheckContext) -> None:
    """Check that the parameters after one step equal the unsharded model's."""
    if ctx.device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise CheckSkippedError("FSDP2 of this torch needs GPUs")  # such as torch 2.6
    model = _model(ctx)
    fully_shard(model, mesh=init_device_mesh(ctx.device.type, (ctx.size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(_batch(ctx, ctx.rank)).square().mean().backward()
    optimizer.step()
    reference = _reference(ctx)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    whole = [parameter.full_tensor() for parameter in model.parameters()]
    for got, (name, wanted) in zip(whole, reference.named_parameters(), strict=True):
        _expect_close(got, wanted, f"the parameter {name} after the step")


def _model(ctx: CheckContext) -> Any:
    """Return a model that is the same on all ranks. No random number is drawn."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(ctx.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.7, parameter.numel(), device=ctx.device).view_as(parameter))
    return model


def _batch(ctx: CheckContext, rank: int) -> Any:
    return torch.sin(torch.arange(8, device=ctx.device) + float(8 * rank)).view(2, 4)


def _reference(ctx: CheckContext) -> Any:
    """Return the model with the mean gradient over all ranks' batches, which have the same size."""
    model = _model(ctx)
    model(torch.cat([_batch(ctx, rank) for rank in range(ctx.size)])).square().mean().backward()
    return model


def _speed(ctx: CheckContext) -> str:
    """Measure latency and bandwidth of an all_reduce; return them as a text."""
    if ctx.size == 1:
        raise CheckSkippedError("one rank sends nothing")
    latency = statistics.median(_seconds(ctx, 4) for _ in range(_LATENCY_TRIES))
    _seconds(ctx, _SMALL)
    size, seconds = _SMALL, _slowest(ctx, _seconds(ctx, _SMALL))
    if seconds * _LARGE / _SMALL < _MAX_LARGE_SECONDS:
        _seconds(ctx, _LARGE)
        size, seconds = _LARGE, _slowest(ctx, _seconds(ctx, _LARGE))
    unit = f"{size // 2**20} MB" if size >= 2**20 else f"{size // 2**10} KB"
    return f"4 B in {latency * 1e6:.0f} us, {unit} at {size / seconds / 1e9:.3g} GB/s" if ctx.rank == 0 else ""


def _seconds(ctx: CheckContext, size: int) -> float:
    def synchronize() -> None:
        if ctx.device.type != "cpu":
            torch.accelerator.synchronize(ctx.device)

    data = torch.zeros(size // 4, device=ctx.device)
    synchronize()
    start = time.perf_counter()
    dist.all_reduce(data)
    synchronize()
    return time.perf_counter() - start


def _slowest(ctx: CheckContext, seconds: float) -> float:
    """Return the slowest rank's time on all ranks, so that all decide alike what to do next."""
    value = torch.tensor([seconds], device=ctx.device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


# Comparing.


def _expect_close(got: Any, wanted: Any, what: str) -> None:
    if not torch.allclose(got, wanted, rtol=1e-4, atol=1e-5):
        worst = float((got - wanted).abs().max())
        raise WrongResultError(f"{what} differs from the reference by up to {worst:.3g}")


def run(check: Callable[[CheckContext], Any], ctx: CheckContext) -> CheckOutcome:
    """Run a check from the table, and return what became of it. An error that comes after the timeout is late."""
    start = time.monotonic()
    try:
        return CheckOutcome(status=CheckStatus.OK, text=_checked(check(ctx)), seconds=time.monotonic() - start)
    except CheckSkippedError as skipped:
        return CheckOutcome(status=CheckStatus.SKIPPED, text=str(skipped))
    except WrongResultError as wrong:
        return CheckOutcome(status=CheckStatus.WRONG, text=str(wrong), seconds=time.monotonic() - start)
    except BaseException as error:  # noqa: BLE001
        seconds = time.monotonic() - start
        text = next(iter(str(error).strip().splitlines()), "")
        text = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
        if isinstance(error, RuntimeError) and _UNSUPPORTED.search(str(error)):
            return CheckOutcome(status=CheckStatus.UNSUPPORTED, text=text)
        late = seconds >= ctx.timeout.total_seconds() or _TIMED_OUT.search(text) is not None
        text = f"{type(error).__name__}: {text}"
        return CheckOutcome(status=CheckStatus.WRONG, text=text, seconds=seconds, late=late, raised=True)


def _checked(done: Any) -> str:
    """Return what a check has to tell, or `""`. Raises WrongResultError.

    All of the check runs before it says that a result is wrong, since the other ranks take part in the rest of it.
    """
    if done is None or isinstance(done, str):
        return done or ""
    for got, wanted in [(_plain(got), _plain(wanted)) for got, wanted in done]:
        if got != wanted:
            raise WrongResultError(f"expected {wanted}, got {got}")
    return ""


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


CHECKS: tuple[tuple[str, Callable[[CheckContext], Any]], ...] = (
    ("init env://", _init_env),
    ("broadcast", _broadcast),
    ("reduce", _reduce),
    ("all_reduce", _all_reduce),
    ("gather", _gather),
    ("all_gather_into_tensor", _all_gather_into_tensor),
    ("all_gather_object", _all_gather_object),
    ("scatter", _scatter),
    ("reduce_scatter_tensor", _reduce_scatter_tensor),
    ("all_to_all_single", _all_to_all_single),
    ("barrier", _barrier),
    ("send, recv", _send_recv),
    ("batch_isend_irecv", _batch_isend_irecv),
    ("DDP step", _ddp_step),
    ("init_device_mesh, 2-D", _mesh_2d),
    ("FSDP2 step", _fsdp2_step),
    ("all_reduce speed", _speed),
    ("init tcp://", _init_tcp),
)
"""By name, in order: the first one makes the process group of the others, and the last one ends it."""
