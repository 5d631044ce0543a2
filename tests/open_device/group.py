"""A backend for the device of `tests/open_device`: gloo, with copies of its tensors on the host."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

NAME = "hosted"


class HostedGroup(dist.ProcessGroup):
    """A process group whose collectives have ended when they return."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        copies = [tensor.detach().cpu() for tensor in tensors]
        self._gloo.allreduce(copies, options).wait()
        return _ended(tensors, copies)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        copies = [tensor.detach().cpu() for tensor in tensors]
        self._gloo.broadcast(copies, options).wait()
        return _ended(tensors, copies)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> Any:
        copies = [[tensor.detach().cpu() for tensor in output] for output in outputs]
        self._gloo.allgather(copies, [tensor.detach().cpu() for tensor in inputs], options).wait()
        return _ended([*chain(*outputs)], [*chain(*copies)])

    def barrier(self, options: Any) -> Any:
        return self._gloo.barrier(options)


def _ended(tensors: list[torch.Tensor], copies: list[torch.Tensor]) -> Any:
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
    future = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future)


def register() -> None:
    """Let this process have the backend."""
    dist.Backend.register_backend(NAME, HostedGroup, devices=["cpu", "open_device"])
