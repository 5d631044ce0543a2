"""What a check works with: its rank, its process group, and tensors that tell who sent them to whom."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from raylaunch.worker import torch_internals
from raylaunch.worker.selfcheck.bounded_check import WrongResultError

_SENDER_FACTOR = 1000.0


def another_connection(store: Any) -> Any:
    """Return the store with a connection of its own. All ranks must call this with the same store.

    Torch 2.6 has no `Store.clone`. Without it, a client of the same server is made, with one prefix for all stores.
    """
    import torch.distributed as dist  # noqa: PLC0415

    if hasattr(store, "clone"):
        return store.clone()
    server = store
    while isinstance(server, dist.PrefixStore):
        server = server.underlying_store
    client = dist.TCPStore(server.host, server.port, is_master=False, timeout=store.timeout)
    return dist.PrefixStore("another_connection", client)


@dataclass(slots=True, kw_only=True)
class CheckContext:
    """One backend on one rank."""

    backend: str
    rank: int
    size: int
    device: Any
    timeout: timedelta
    store: Any
    """An own connection to the launch's store, so that a check that is stuck in it blocks nothing else."""
    groups: int = 0
    """How many process groups were made with the store."""
    abandoned: list[Any] = field(default_factory=list)
    """Groups in which an operation failed. They are never destroyed, because that may wait for ever."""

    @property
    def group(self) -> Any:
        """The default process group, which has all ranks."""
        import torch.distributed as dist  # noqa: PLC0415

        return dist.group.WORLD

    def pattern(self, sender: int, receiver: int = 0) -> Any:
        """Return the tensor that `sender` sends to `receiver`; no other pair of ranks has the same."""
        import torch  # noqa: PLC0415

        values = [_SENDER_FACTOR * sender + receiver, float(sender), float(receiver)]
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def unfilled(self, *shape: int) -> Any:
        """Return a tensor to receive into, filled with a value that nobody sends."""
        import torch  # noqa: PLC0415

        return torch.full(shape or (3,), -1.0, dtype=torch.float32, device=self.device)

    def sum_of_patterns(self) -> Any:
        """Return the sum over all senders of their pattern for receiver 0."""
        return sum(self.pattern(rank) for rank in range(self.size))

    def expect_equal(self, got: Any, wanted: Any, what: str = "") -> None:
        """Raise WrongResultError unless the tensors are equal. `what` follows the expected value in the text."""
        import torch  # noqa: PLC0415

        if not torch.equal(got, wanted):
            where = f" {what}" if what else ""
            raise WrongResultError(f"expected {wanted.tolist()}{where}, got {got.tolist()}")

    def expect_close(self, got: Any, wanted: Any, what: str) -> None:
        """Raise WrongResultError unless the tensors are equal but for rounding."""
        import torch  # noqa: PLC0415

        if not torch.allclose(got, wanted, rtol=1e-4, atol=1e-5):
            worst = float((got - wanted).abs().max())
            raise WrongResultError(f"{what} differs from the reference by up to {worst:.3g}")

    def verify_group(self) -> None:
        """Check that the group can sum over all ranks, without the functions that are under test themselves."""
        got = self.pattern(self.rank)
        self.group.allreduce([got]).wait()
        self.expect_equal(got, self.sum_of_patterns())

    def init_group(self, **how: Any) -> None:
        """Make the default process group with `init_process_group(**how)`."""
        import torch.distributed as dist  # noqa: PLC0415

        dist.init_process_group(self.backend, rank=self.rank, world_size=self.size, timeout=self.timeout, **how)

    def init_new_group(self) -> None:
        """Make the default process group with the launch's store, under a prefix that no other group has used."""
        import torch.distributed as dist  # noqa: PLC0415

        self.groups += 1
        self.init_group(store=dist.PrefixStore(f"group/{self.backend}/{self.groups}", another_connection(self.store)))
        self.verify_group()

    def destroy_group(self, *, failed: bool) -> None:
        """Destroy the default process group. One that failed is aborted and kept, which waits for nothing."""
        import torch.distributed as dist  # noqa: PLC0415

        if not dist.is_initialized():
            self._reset_group_count()
        elif failed:
            self.abandoned.append(self.group)
            torch_internals.abort_process_group()
        else:
            dist.destroy_process_group()

    def _reset_group_count(self) -> None:
        """Reset torch's count of groups, which names the next one and must be equal on all ranks.

        A failed `init_process_group` raises the count, and `destroy_process_group` resets it (`_world.group_count` in
        `torch/distributed/distributed_c10d.py`).
        """
        import torch.distributed as dist  # noqa: PLC0415

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()


def device_of(backend: str) -> Any:
    """Return the device of this rank's tensors for a backend."""
    import torch  # noqa: PLC0415

    kind = {"nccl": "cuda", "xccl": "xpu"}.get(backend)
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())


def free_port() -> int:
    """Return a port that no socket of this machine is bound to now."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
