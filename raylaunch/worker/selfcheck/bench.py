"""What a check works with: its rank, its group, tensors that bear the mark of their sender."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from raylaunch.worker.selfcheck.attempt import WrongError

_BASE = 1000.0


@dataclass(slots=True, kw_only=True)
class Bench:
    """One backend, as one rank sees it."""

    backend: str
    rank: int
    size: int
    device: Any
    timeout: timedelta
    store: Any
    """A connection of its own to the launch's store: a check that is stuck in it blocks nobody else."""
    groups: int = 0
    """How many groups were made of the store."""
    abandoned: list[Any] = field(default_factory=list)
    """Groups that an operation failed in. Their end may wait for what never comes, so they are kept."""

    @property
    def group(self) -> Any:
        """The default group."""
        import torch.distributed as dist  # noqa: PLC0415

        return dist.group.WORLD

    def mark(self, sender: int, receiver: int = 0) -> Any:
        """What `sender` sends to `receiver`: no other pair has the same."""
        import torch  # noqa: PLC0415

        values = [_BASE * sender + receiver, float(sender), float(receiver)]
        return torch.tensor(values, dtype=torch.float32, device=self.device)

    def blank(self, *shape: int) -> Any:
        """Where something is to be received."""
        import torch  # noqa: PLC0415

        return torch.full(shape or (3,), -1.0, dtype=torch.float32, device=self.device)

    def total(self) -> Any:
        """The sum of all ranks' marks for receiver 0."""
        return sum(self.mark(rank) for rank in range(self.size))

    def expect(self, got: Any, wanted: Any, what: str = "") -> None:
        """Compare exactly."""
        import torch  # noqa: PLC0415

        if not torch.equal(got, wanted):
            where = f" {what}" if what else ""
            raise WrongError(f"expected {wanted.tolist()}{where}, got {got.tolist()}")

    def expect_close(self, got: Any, wanted: Any, what: str) -> None:
        """Compare sums that may be added in another order."""
        import torch  # noqa: PLC0415

        if not torch.allclose(got, wanted, rtol=1e-4, atol=1e-5):
            worst = float((got - wanted).abs().max())
            raise WrongError(f"{what} differs from the reference by up to {worst:.3g}")

    def prove(self) -> None:
        """That the group works: a sum over all ranks, past the functions that are themselves under test."""
        got = self.mark(self.rank)
        self.group.allreduce([got]).wait()
        self.expect(got, self.total())

    def join(self, **how: Any) -> None:
        """Make the default group."""
        import torch.distributed as dist  # noqa: PLC0415

        dist.init_process_group(self.backend, rank=self.rank, world_size=self.size, timeout=self.timeout, **how)

    def join_anew(self) -> None:
        """Make the default group by the launch's store, at a place in it that no group used."""
        import torch.distributed as dist  # noqa: PLC0415

        self.groups += 1
        self.join(store=dist.PrefixStore(f"group/{self.backend}/{self.groups}", self.store.clone()))
        self.prove()

    def leave(self, *, failed: bool) -> None:
        """End the default group. One that failed is dropped without waiting for anything in it."""
        import torch.distributed as dist  # noqa: PLC0415

        if not dist.is_initialized():
            self._forget_attempts()
        elif failed:
            self.abandoned.append(self.group)
            dist.distributed_c10d._abort_process_group()  # noqa: SLF001
        else:
            dist.destroy_process_group()

    def _forget_attempts(self) -> None:
        """Torch counts attempts to make a group, and names the next by the count, which must be equal on all ranks.

        Ending a group sets it back.
        """
        import torch.distributed as dist  # noqa: PLC0415

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.destroy_process_group()


def device_of(backend: str) -> Any:
    """Where the backend's tensors are, for this rank."""
    import torch  # noqa: PLC0415

    kind = {"nccl": "cuda", "xccl": "xpu"}.get(backend)
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())


def free_port() -> int:
    """A port that nobody has at the moment."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
