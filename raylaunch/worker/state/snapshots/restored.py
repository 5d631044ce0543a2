"""Objects of the script from a buffer and a pickle: what `snapshot` has written there."""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from raylaunch.worker import torch_internals
from raylaunch.worker.state import shared_tensors
from raylaunch.worker.state.commit_buffer import CommitBuffer, round_up
from raylaunch.worker.state.shared_tensors import PartMemory
from raylaunch.worker.state.snapshots import snapshot
from raylaunch.worker.state.snapshots.snapshot import CommitItem, MeshKey, Offsets, mesh_key

_LEAST_OWN_BYTES = 2**16
"""Smaller tensors are in memory of torch's allocator, as any others."""
_HUGE_PAGE = 2**21
_CHUNK_BYTES = 2**25
"""Tensors share memory of this size, which is free when none of them is left. Larger ones have their own."""


def load_item(item: CommitItem, tensor: Callable[..., Any], dtensor: Callable[..., Any]) -> Any:
    """Unpickle an item. `tensor` and `dtensor` have the parameters of `tensor_at` and `dtensor_of`."""
    unpickler = _Unpickler(io.BytesIO(item.pickled))
    places = {snapshot.tensor_at: tensor, snapshot.dtensor_of: dtensor}
    unpickler.replaced = {(one.__module__, one.__name__): place for one, place in places.items()}
    return unpickler.load()


def items_of(buffer: CommitBuffer) -> dict[str, CommitItem]:
    """Return the items of a commit by name. Raises ValueError where the buffer is damaged."""
    return dict(pickle.loads(buffer.read_pickle()))  # noqa: S301


class OwnMemory:
    """Memory of this process for tensors that are restored, in huge pages where the kernel allows that.

    Page faults take most of the time of copying into new memory. Like tensors from `torch.load`, these cannot be
    resized in place.
    """

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def empty(self, dtype: Any, shape: tuple[int, ...], memory_format: str, device: str) -> Any:
        """Return a tensor that is not initialized. Takes the same arguments as `tensor_at`."""
        torch = sys.modules["torch"]
        like = {"dtype": dtype, "memory_format": getattr(torch, memory_format)}
        size = math.prod(shape) * dtype.itemsize
        if device != "cpu" or size < _LEAST_OWN_BYTES:
            return torch.empty(shape, device=device, **like)
        if self._chunk is None or self._used + size > len(self._chunk):
            self._chunk, self._used = _huge_pages(round_up(max(size, _CHUNK_BYTES), _HUGE_PAGE)), 0
        memory = torch.frombuffer(self._chunk, dtype=torch.uint8, count=size, offset=self._used)
        self._used += round_up(size)
        stride = torch.empty(shape, device="meta", **like).stride()
        return torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), 0, shape, stride)


def _huge_pages(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Restored:
    """The items of a commit, read from a buffer."""

    def __init__(
        self,
        buffer: CommitBuffer,
        meshes: Iterable[Any],
        sharing: Iterable[CommitBuffer] = (),
        live: Mapping[int, Any] | None = None,
    ) -> None:
        """`meshes`: the DeviceMeshes of the script's objects. `sharing`: as in `PartMemory`.

        `live`: shared tensors of this process that are still as they were committed, by their offsets.

        Raises ValueError where a buffer is damaged.
        """
        self._live = live or {}
        self._live_ids = {id(one) for one in self._live.values()}
        self._memory = PartMemory(buffer, [*sharing])
        self._meshes = {mesh_key(mesh): mesh for mesh in meshes}
        self._items = items_of(buffer)
        self._own = OwnMemory()

    @property
    def names(self) -> list[str]:
        """The names of the items."""
        return [*self._items]

    @property
    def has_dtensors(self) -> bool:
        """Whether any item contains a DTensor."""
        return any(item.has_dtensors for item in self._items.values())

    def item(self, name: str, *, copied: bool = True) -> Any:
        """Return an item. `copied` False: its tensors are memory of the buffer, which a later commit overwrites.

        Tensors of this process that have not changed since the commit are returned as they are, not copied.
        """
        tensor = self._copied_tensor if copied else partial(self._tensor, OwnMemory())
        return load_item(self._items[name], tensor, self._dtensor)

    def is_live(self, tensor: Any) -> bool:
        """Return whether a tensor is one of this process that is still as it was committed."""
        return id(tensor) in self._live_ids

    def is_aliased(self, tensors: Iterable[Any]) -> bool:
        """Return whether one of the tensors is memory of a buffer."""
        return any(self._memory.has(local_part(one)) for one in tensors)

    def _tensor(
        self, own: OwnMemory, offset: int, dtype: Any, shape: tuple[int, ...], memory_format: str, device: str
    ) -> Any:
        """Return memory of a buffer or, if several have bytes of the tensor, a copy in `own`."""
        del device
        if offset in self._live:
            return self._live[offset]
        pieces = self._memory.pieces(offset, math.prod(shape) * dtype.itemsize)
        if len(pieces) > 1:
            return _copied(pieces, own.empty(dtype, shape, memory_format, "cpu"))
        return pieces[0].view(dtype).view(shape)

    def _copied_tensor(self, offset: int, dtype: Any, shape: tuple[int, ...], memory_format: str, device: str) -> Any:
        if offset in self._live:
            return self._live[offset]
        pieces = self._memory.pieces(offset, math.prod(shape) * dtype.itemsize)
        own = self._own.empty(dtype, shape, memory_format, device)
        return own.copy_(pieces[0].view(dtype).view(shape)) if len(pieces) == 1 else _copied(pieces, own)

    def _dtensor(
        self,
        local: Any,
        mesh: MeshKey,
        placements: Any,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offsets: Offsets | None,
    ) -> Any:
        del offsets
        if mesh not in self._meshes:
            msg = (
                f"`State` has a DTensor of a mesh {mesh[1]} over ranks {mesh[2]}, which no parameter of the script has"
            )
            raise ValueError(msg)
        size = sys.modules["torch"].Size(shape)
        return torch_internals.dtensor_of(local, self._meshes[mesh], placements, size, stride)


def _copied(pieces: list[Any], target: Any) -> Any:
    """Copy the bytes of a shared tensor, which is contiguous, into another tensor, and return that."""
    memory, begin = shared_tensors.bytes_of(target), 0
    for piece in pieces:
        memory[begin : begin + len(piece)].copy_(piece)
        begin += len(piece)
    return target


class _Unpickler(pickle.Unpickler):
    replaced: dict[tuple[str, str], Any]

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name in the pickle stands for."""
        return self.replaced.get((module, name)) or super().find_class(module, name)


def local_part(tensor: Any) -> Any:
    """Return the local part of a DTensor; any other tensor is its own."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return tensor.to_local() if kind is not None and isinstance(tensor, kind) else tensor


def meshes_of(tensors: Iterable[Any]) -> list[Any]:
    """Return the meshes of all DTensors among the tensors, each once."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None:
        return []
    return [*{id(one.device_mesh): one.device_mesh for one in tensors if isinstance(one, kind)}.values()]
