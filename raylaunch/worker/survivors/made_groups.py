"""What this process has made of torch's distributed parts: process groups, device meshes, and models in DDP.

It is noted from the time that a script names `raylaunch.worker.elastic`. A survivor makes the default group anew as it
was made, and its models go on with the new one. A worker that is started beside survivors makes both in its
preparation, without the survivors: so nothing may be communicated there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
import weakref
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from raylaunch.worker import torch_internals
from raylaunch.worker.heartbeats import heartbeat_writer
from raylaunch.worker.heartbeats.import_hook import when_imported
from raylaunch.worker.survivors.broken_collectives import GroupSockets

_C10D = "torch.distributed.distributed_c10d"
_DDP = "torch.nn.parallel.distributed"
_MESH = "torch.distributed.device_mesh"
_FOR_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    "NCCL_NVLS_ENABLE": "0",
}
"""Variables for a process whose communicators are aborted, and made anew: torch neither ends it nor waits in it for
reports of other ranks, and NCCL uses nothing that cannot be made a second time. NVIDIA's guide to restarts in process
has them (nvidia-resiliency-ext, docs/source/inprocess/usage_guide.rst).
"""
_LEAST_NCCL = 2, 27
"""With earlier ones, and the torch before 2.8 that has them, an abort may hang or crash (pytorch#149418, #150690)."""


class MadeGroups:
    """The groups and models that were made in this process."""

    def __init__(self) -> None:
        self.sockets = GroupSockets()
        #: Whether `watch` was called.
        self.is_watching = False
        #: How the default group was made, as `init_process_group` takes it; None: it was not.
        self.options: dict[str, Any] | None = None
        self._others = 0
        self._meshes = 0
        #: How many attempts this process was in before.
        self._attempts = 0
        #: Models that were made before the elastic function was called, and in it.
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._inner_models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._called_by_models = 0
        self._is_prepared = False
        #: Why torch is not as this module needs it, for a person; "": it is.
        self._lacks = ""

    def watch(self) -> None:
        """Note what is made from now on."""
        self.is_watching = True
        os.environ.update(_FOR_NCCL)
        when_imported(_C10D, self._watch_groups)
        when_imported(_DDP, self._watch_models)
        when_imported(_MESH, lambda module: torch_internals.watch_meshes(module, self._mesh_made))

    def _watch_groups(self, module: types.ModuleType) -> None:
        if not torch_internals.watch_groups(module, self._group_made):
            self._lacks = "this torch makes process groups in another way than is known"

    def _watch_models(self, module: types.ModuleType) -> None:
        if not torch_internals.watch_models(module, self._model_made):
            self._lacks = "DistributedDataParallel of this torch has no `init_sync`"

    @contextlib.contextmanager
    def _group_made(self, options: dict[str, Any], *, is_default: bool) -> Iterator[None]:
        with self.sockets.opening():
            yield
        if is_default:
            self.options = options
        elif not self._is_prepared:
            self._others += 1

    def _mesh_made(self) -> int:
        """Return a number that meshes of another attempt do not have."""
        self._meshes += not self._is_prepared
        return self._attempts

    @contextlib.contextmanager
    def _model_made(self, model: Any) -> Iterator[bool]:
        """Give whether the ranks must not compare and broadcast the model: survivors would not answer."""
        before = torch_internals.collectives_called()
        yield not self._is_prepared and os.environ.get(heartbeat_writer.WITH_SURVIVORS_VARIABLE) == "1"
        (self._inner_models if self._is_prepared else self._models).add(model)
        if not self._is_prepared:
            self._called_by_models += torch_internals.collectives_called() - before

    def end_preparation(self) -> str:
        """Record that the script calls its elastic function. Return why this worker cannot stay; "": it can."""
        self._is_prepared = True
        if self._lacks:
            return self._lacks
        if torch_internals.is_group_made() and self.options is None:
            return "the process group was made before `raylaunch.worker.elastic` was imported"
        if self._meshes:
            return (
                "the script makes a device mesh before it calls the elastic function; make it, and models of "
                "`fully_shard`, in it"
            )
        if self._others:
            return "the script makes process groups before it calls the elastic function; make them in it"
        if torch_internals.collectives_called() > self._called_by_models:
            return "the script communicates before it calls the elastic function; do that in it"
        return ""

    def why_not_nccl(self) -> str:
        """Return why this worker cannot stay with the NCCL that it uses; "": it can, or uses none."""
        if not torch_internals.has_nccl():
            return ""
        version = import_module("torch.cuda.nccl").version()
        if version >= _LEAST_NCCL:
            return ""
        return f"NCCL {'.'.join(map(str, version))} may hang when it is aborted; 2.27, which torch 2.8 has, does not"

    @property
    def has_group(self) -> bool:
        """Whether there is a default group."""
        return torch_internals.is_group_made()

    def make_group(self, backend: str | None) -> None:
        """Make the default group, as it was made before. Raises what `init_process_group` does."""
        if self.options is None and backend is None:
            return
        distributed = import_module("torch.distributed")
        hook = sys.excepthook
        distributed.init_process_group(**(self.options or {"backend": backend}))
        if self.options is not None:
            sys.excepthook = hook  # torch has put another one before it

    def forget(self) -> None:
        """Forget all groups, and let models that were made in the elastic function communicate no more."""
        self._attempts += 1
        for model in list(self._inner_models):
            torch_internals.release_model(model)
        self._inner_models.clear()
        if torch_internals.is_group_made():
            torch_internals.abort_process_groups()
        torch_internals.forget_failed_group()

    def renew_models(self) -> None:
        """Let the models in DistributedDataParallel go on with the new default group."""
        for model in list(self._models):
            torch_internals.renew_model(model)
