"""Every collective and point-to-point operation of torch.distributed, with values that tell a wrong peer or order."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from raylaunch.worker.selfcheck.attempt import SkippedError, WrongError
from raylaunch.worker.selfcheck.bench import Bench

_BARRIER_LAG = 0.05


def broadcast(on: Bench) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    for root in _roots(on):
        got = on.mark(root) if on.rank == root else on.blank()
        dist.broadcast(got, src=root, group=on.group)
        on.expect(got, on.mark(root), f"from rank {root}")


def broadcast_object_list(on: Bench) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    for root in _roots(on):
        got: list[Any] = [{"from": root}, root] if on.rank == root else [None, None]
        dist.broadcast_object_list(got, src=root, group=on.group)
        _expect_objects(got, [{"from": root}, root])


def reduce(on: Bench) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    for root in _roots(on):
        got = on.mark(on.rank)
        dist.reduce(got, dst=root, group=on.group)
        if on.rank == root:
            on.expect(got, on.total(), f"at rank {root}")


def all_reduce(on: Bench) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    got = on.mark(on.rank)
    dist.all_reduce(got, group=on.group)
    on.expect(got, on.total())
    got = on.mark(on.rank)
    dist.all_reduce(got, op=dist.ReduceOp.MAX, group=on.group)
    on.expect(got, on.mark(on.size - 1), "as the greatest")


def gather(on: Bench) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    for root in _roots(on):
        got = [on.blank() for _ in range(on.size)] if on.rank == root else None
        dist.gather(on.mark(on.rank, root), got, dst=root, group=on.group)
        for sender, one in enumerate(got or []):
            on.expect(one, on.mark(sender, root), f"from rank {sender}")


def all_gather(on: Bench) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    got = [on.blank() for _ in range(on.size)]
    dist.all_gather(got, on.mark(on.rank), group=on.group)
    for sender, one in enumerate(got):
        on.expect(one, on.mark(sender), f"from rank {sender}")


def all_gather_into_tensor(on: Bench) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    got = on.blank(on.size, 3)
    dist.all_gather_into_tensor(got, on.mark(on.rank).unsqueeze(0), group=on.group)
    on.expect(got, torch.stack([on.mark(sender) for sender in range(on.size)]))


def all_gather_object(on: Bench) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    got: list[Any] = [None] * on.size
    dist.all_gather_object(got, {"from": on.rank}, group=on.group)
    _expect_objects(got, [{"from": sender} for sender in range(on.size)])


def scatter(on: Bench) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    for root in _roots(on):
        got = on.blank()
        given = [on.mark(root, receiver) for receiver in range(on.size)] if on.rank == root else None
        dist.scatter(got, given, src=root, group=on.group)
        on.expect(got, on.mark(root, on.rank), f"from rank {root}")


def reduce_scatter(on: Bench) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    got = on.blank()
    dist.reduce_scatter(got, [on.mark(on.rank, receiver) for receiver in range(on.size)], group=on.group)
    on.expect(got, _total_for(on, on.rank))


def reduce_scatter_tensor(on: Bench) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    got = on.blank(1, 3)
    given = torch.stack([on.mark(on.rank, receiver) for receiver in range(on.size)])
    dist.reduce_scatter_tensor(got, given, group=on.group)
    on.expect(got[0], _total_for(on, on.rank))


def all_to_all(on: Bench) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    got = [on.blank() for _ in range(on.size)]
    dist.all_to_all(got, [on.mark(on.rank, receiver) for receiver in range(on.size)], group=on.group)
    for sender, one in enumerate(got):
        on.expect(one, on.mark(sender, on.rank), f"from rank {sender}")


def all_to_all_single(on: Bench) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    got = on.blank(on.size, 3)
    given = torch.stack([on.mark(on.rank, receiver) for receiver in range(on.size)])
    dist.all_to_all_single(got, given, group=on.group)
    on.expect(got, torch.stack([on.mark(sender, on.rank) for sender in range(on.size)]))


def barrier(on: Bench) -> None:
    """Nobody passes before the last has come, which is a little late."""
    import torch.distributed as dist  # noqa: PLC0415

    key = f"barrier/{on.backend}"
    if on.rank == on.size - 1:
        time.sleep(_BARRIER_LAG)
    on.store.add(key, 1)
    dist.barrier(group=on.group, device_ids=[on.device.index] if on.device.type == "cuda" else None)
    came = on.store.add(key, 0)
    if came != on.size:
        raise WrongError(f"expected all {on.size} ranks to have come, but {came} had")


def send_recv(on: Bench) -> None:
    """One message goes round, from each rank to the next."""
    import torch.distributed as dist  # noqa: PLC0415

    _need_peer(on)
    for sender in range(on.size):
        receiver = (sender + 1) % on.size
        if on.rank == sender:
            dist.send(on.mark(sender, receiver), dst=receiver, group=on.group)
        elif on.rank == receiver:
            got = on.blank()
            dist.recv(got, src=sender, group=on.group)
            on.expect(got, on.mark(sender, receiver), f"from rank {sender}")


def isend_irecv(on: Bench) -> None:
    """All send to the next at once. Half of them receive first: NCCL connects pairs in the order of the calls."""
    import torch.distributed as dist  # noqa: PLC0415

    _need_peer(on)
    after, before = (on.rank + 1) % on.size, (on.rank - 1) % on.size
    given, got = on.mark(on.rank, after), on.blank()
    steps: list[Callable[[], Any]] = [
        lambda: dist.isend(given, dst=after, group=on.group),
        lambda: dist.irecv(got, src=before, group=on.group),
    ]
    for work in [step() for step in (steps if on.rank % 2 == 0 else reversed(steps))]:
        work.wait()
    on.expect(got, on.mark(before, on.rank), f"from rank {before}")


def batch_isend_irecv(on: Bench) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    _need_peer(on)
    after, before = (on.rank + 1) % on.size, (on.rank - 1) % on.size
    got = on.blank()
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, on.mark(on.rank, after), after, group=on.group),
            dist.P2POp(dist.irecv, got, before, group=on.group),
        ]
    ):
        work.wait()
    on.expect(got, on.mark(before, on.rank), f"from rank {before}")


CHECKS: tuple[tuple[str, Callable[[Bench], None]], ...] = (
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


def _roots(on: Bench) -> list[int]:
    """The first rank and the last: two roots tell one that is ignored."""
    return sorted({0, on.size - 1})


def _total_for(on: Bench, receiver: int) -> Any:
    return sum(on.mark(sender, receiver) for sender in range(on.size))


def _expect_objects(got: list[Any], wanted: list[Any]) -> None:
    if got != wanted:
        raise WrongError(f"expected {wanted}, got {got}")


def _need_peer(on: Bench) -> None:
    if on.size == 1:
        raise SkippedError("one rank has no peer")
