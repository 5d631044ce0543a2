"""Checks of every collective and point-to-point operation of torch.distributed.

Each value depends on its sender and its receiver, so that a wrong peer or order is noticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from raylaunch.worker.selfcheck.bounded_check import CheckSkippedError, WrongResultError
from raylaunch.worker.selfcheck.check_context import CheckContext

BARRIER_DELAY = 0.05
"""Seconds by which the last rank comes later to the barrier."""


def broadcast(ctx: CheckContext) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    for root in _roots(ctx):
        got = ctx.pattern(root) if ctx.rank == root else ctx.unfilled()
        dist.broadcast(got, src=root, group=ctx.group)
        ctx.expect_equal(got, ctx.pattern(root), f"from rank {root}")


def broadcast_object_list(ctx: CheckContext) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    for root in _roots(ctx):
        got: list[Any] = [{"from": root}, root] if ctx.rank == root else [None, None]
        dist.broadcast_object_list(got, src=root, group=ctx.group)
        _expect_objects(got, [{"from": root}, root])


def reduce(ctx: CheckContext) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    for root in _roots(ctx):
        got = ctx.pattern(ctx.rank)
        dist.reduce(got, dst=root, group=ctx.group)
        if ctx.rank == root:
            ctx.expect_equal(got, ctx.sum_of_patterns(), f"at rank {root}")


def all_reduce(ctx: CheckContext) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    got = ctx.pattern(ctx.rank)
    dist.all_reduce(got, group=ctx.group)
    ctx.expect_equal(got, ctx.sum_of_patterns())
    got = ctx.pattern(ctx.rank)
    dist.all_reduce(got, op=dist.ReduceOp.MAX, group=ctx.group)
    ctx.expect_equal(got, ctx.pattern(ctx.size - 1), "as the greatest")


def gather(ctx: CheckContext) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    for root in _roots(ctx):
        got = [ctx.unfilled() for _ in range(ctx.size)] if ctx.rank == root else None
        dist.gather(ctx.pattern(ctx.rank, root), got, dst=root, group=ctx.group)
        for sender, one in enumerate(got or []):
            ctx.expect_equal(one, ctx.pattern(sender, root), f"from rank {sender}")


def all_gather(ctx: CheckContext) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    got = [ctx.unfilled() for _ in range(ctx.size)]
    dist.all_gather(got, ctx.pattern(ctx.rank), group=ctx.group)
    for sender, one in enumerate(got):
        ctx.expect_equal(one, ctx.pattern(sender), f"from rank {sender}")


def all_gather_into_tensor(ctx: CheckContext) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    got = ctx.unfilled(ctx.size, 3)
    dist.all_gather_into_tensor(got, ctx.pattern(ctx.rank).unsqueeze(0), group=ctx.group)
    ctx.expect_equal(got, torch.stack([ctx.pattern(sender) for sender in range(ctx.size)]))


def all_gather_object(ctx: CheckContext) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    got: list[Any] = [None] * ctx.size
    dist.all_gather_object(got, {"from": ctx.rank}, group=ctx.group)
    _expect_objects(got, [{"from": sender} for sender in range(ctx.size)])


def scatter(ctx: CheckContext) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    for root in _roots(ctx):
        got = ctx.unfilled()
        given = [ctx.pattern(root, receiver) for receiver in range(ctx.size)] if ctx.rank == root else None
        dist.scatter(got, given, src=root, group=ctx.group)
        ctx.expect_equal(got, ctx.pattern(root, ctx.rank), f"from rank {root}")


def reduce_scatter(ctx: CheckContext) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    got = ctx.unfilled()
    dist.reduce_scatter(got, [ctx.pattern(ctx.rank, receiver) for receiver in range(ctx.size)], group=ctx.group)
    ctx.expect_equal(got, _total_for(ctx, ctx.rank))


def reduce_scatter_tensor(ctx: CheckContext) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    got = ctx.unfilled(1, 3)
    given = torch.stack([ctx.pattern(ctx.rank, receiver) for receiver in range(ctx.size)])
    dist.reduce_scatter_tensor(got, given, group=ctx.group)
    ctx.expect_equal(got[0], _total_for(ctx, ctx.rank))


def all_to_all(ctx: CheckContext) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    got = [ctx.unfilled() for _ in range(ctx.size)]
    dist.all_to_all(got, [ctx.pattern(ctx.rank, receiver) for receiver in range(ctx.size)], group=ctx.group)
    for sender, one in enumerate(got):
        ctx.expect_equal(one, ctx.pattern(sender, ctx.rank), f"from rank {sender}")


def all_to_all_single(ctx: CheckContext) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    got = ctx.unfilled(ctx.size, 3)
    given = torch.stack([ctx.pattern(ctx.rank, receiver) for receiver in range(ctx.size)])
    dist.all_to_all_single(got, given, group=ctx.group)
    ctx.expect_equal(got, torch.stack([ctx.pattern(sender, ctx.rank) for sender in range(ctx.size)]))


def barrier(ctx: CheckContext) -> None:
    """Check that no rank passes before the last rank has come, which is late on purpose."""
    import torch.distributed as dist  # noqa: PLC0415

    key = f"barrier/{ctx.backend}"
    if ctx.rank == ctx.size - 1:
        time.sleep(BARRIER_DELAY)
    ctx.store.add(key, 1)
    dist.barrier(group=ctx.group, device_ids=[ctx.device.index] if ctx.device.type == "cuda" else None)
    came = ctx.store.add(key, 0)
    if came != ctx.size:
        raise WrongResultError(f"expected all {ctx.size} ranks to have come, but {came} had")


def send_recv(ctx: CheckContext) -> None:
    """Check that a message goes from each rank to the next, one after the other."""
    import torch.distributed as dist  # noqa: PLC0415

    _need_peer(ctx)
    for sender in range(ctx.size):
        receiver = (sender + 1) % ctx.size
        if ctx.rank == sender:
            dist.send(ctx.pattern(sender, receiver), dst=receiver, group=ctx.group)
        elif ctx.rank == receiver:
            got = ctx.unfilled()
            dist.recv(got, src=sender, group=ctx.group)
            ctx.expect_equal(got, ctx.pattern(sender, receiver), f"from rank {sender}")


def isend_irecv(ctx: CheckContext) -> None:
    """Check that all ranks can send to the next rank at once.

    Odd ranks call `irecv` first, because NCCL connects pairs in the order of the calls.
    """
    import torch.distributed as dist  # noqa: PLC0415

    _need_peer(ctx)
    after, before = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    given, got = ctx.pattern(ctx.rank, after), ctx.unfilled()
    steps: list[Callable[[], Any]] = [
        lambda: dist.isend(given, dst=after, group=ctx.group),
        lambda: dist.irecv(got, src=before, group=ctx.group),
    ]
    for work in [step() for step in (steps if ctx.rank % 2 == 0 else reversed(steps))]:
        work.wait()
    ctx.expect_equal(got, ctx.pattern(before, ctx.rank), f"from rank {before}")


def batch_isend_irecv(ctx: CheckContext) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    _need_peer(ctx)
    after, before = (ctx.rank + 1) % ctx.size, (ctx.rank - 1) % ctx.size
    got = ctx.unfilled()
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, ctx.pattern(ctx.rank, after), after, group=ctx.group),
            dist.P2POp(dist.irecv, got, before, group=ctx.group),
        ]
    ):
        work.wait()
    ctx.expect_equal(got, ctx.pattern(before, ctx.rank), f"from rank {before}")


CHECKS: tuple[tuple[str, Callable[[CheckContext], None]], ...] = (
    ("broadcast", broadcast),
    ("broadcast_object_list", broadcast_object_list),
    ("reduce", reduce),
    ("all_reduce", all_reduce),
    ("gather", gather),
    ("all_gather", all_gather),
    ("all_gather_into_tensor", all_gather_into_tensor),
    ("all_gather_object", all_gather_object),
    ("scatter", scatter),
    ("reduce_scatter", reduce_scatter),
    ("reduce_scatter_tensor", reduce_scatter_tensor),
    ("all_to_all", all_to_all),
    ("all_to_all_single", all_to_all_single),
    ("barrier", barrier),
    ("send, recv", send_recv),
    ("isend, irecv", isend_irecv),
    ("batch_isend_irecv", batch_isend_irecv),
)


def _roots(ctx: CheckContext) -> list[int]:
    """Return the first and the last rank: with two different roots, an ignored `src` or `dst` is noticed."""
    return sorted({0, ctx.size - 1})


def _total_for(ctx: CheckContext, receiver: int) -> Any:
    return sum(ctx.pattern(sender, receiver) for sender in range(ctx.size))


def _expect_objects(got: list[Any], wanted: list[Any]) -> None:
    if got != wanted:
        raise WrongResultError(f"expected {wanted}, got {got}")


def _need_peer(ctx: CheckContext) -> None:
    if ctx.size == 1:
        raise CheckSkippedError("one rank has no peer")
