"""Objects of the script as tensors in a buffer and a pickle without them, and back.

Tensors are copied as they are. Of a DTensor, the local part is copied; its placements, the name of its mesh and the
place of its local part are pickled. Everything else, such as the counters of a scheduler, is pickled.
"""

from __future__ import annotations

import contextlib
import io
import math
import mmap
import pickle
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from raylaunch.worker.state import shared_tensors
from raylaunch.worker.state.commit_buffer import HEADER_BYTES, CommitBuffer, round_up
from raylaunch.worker.state.shared_tensors import IsShared, PartMemory

OBJECT = "object:"
"""Before the name of an object, in that of its item."""
_RAW_DEVICES = ("cpu", "cuda")
_LEAST_OWN_BYTES = 2**16
"""Smaller tensors are in memory of torch's allocator, as any others."""
_HUGE_PAGE = 2**21
_CHUNK_BYTES = 2**25
"""Tensors share memory of this size, which is free when none of them is left. Larger ones have their own."""
_CHANNELS_LAST = {4: "channels_last", 5: "channels_last_3d"}
"""Memory formats by number of dimensions."""

MeshKey = tuple[tuple[str, ...] | None, tuple[int, ...], tuple[int, ...]]
"""The names and the sizes of the dimensions of a DeviceMesh, and its ranks."""


Offsets = tuple[int, ...]
"""Where the local part of a DTensor begins in the whole tensor, in elements, by dimension."""


@dataclass(frozen=True, slots=True)
class CommitItem:
    """An item of a commit: its pickle, and the part of the buffer that has its tensors."""

    pickled: bytes
    begin: int
    end: int
    of_world: bool
    """Whether all ranks have it together, as a model and an optimizer; otherwise it is the rank's own."""
    has_dtensors: bool


class Snapshot:
    """What a commit writes: tensors, each with its place, and one pickle of everything else."""

    def __init__(
        self, items: dict[str, Any], of_world: Collection[str] = (), shared: Mapping[str, IsShared] | None = None
    ) -> None:
        """Take the items by name. The tensors are not copied yet. Raises what pickling raises, naming the item.

        `of_world`: names of items that all ranks have together. So are those in which there is a DTensor. `shared`:
        which tensors of an item are equal on all ranks.
        """
        #: Tensors with their offsets in the buffer.
        self.tensors: list[tuple[int, Any]] = []
        self.tensor_bytes = 0
        #: The same of tensors that the ranks of a node divide among them.
        self.shared: list[tuple[int, Any]] = []
        self.shared_bytes = 0
        self._is_shared = shared or {}
        #: Whether there is no sharded DTensor in it, and whether there is any DTensor.
        self.is_replicated, self.has_dtensors = True, False
        found = {name: self._item(name, item, name in of_world) for name, item in items.items()}
        self.pickled = pickle.dumps(found, protocol=pickle.HIGHEST_PROTOCOL)

    def _item(self, name: str, item: Any, of_world: bool) -> CommitItem:
        file, begin = io.BytesIO(), HEADER_BYTES + self.tensor_bytes
        is_shared = self._is_shared.get(name)
        pickler = _Pickler(file, lambda tensor: self._add(tensor, is_shared))
        try:
            pickler.dump(item)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            msg = f"`State` cannot pickle {name}: {error}"
            raise pickle.PicklingError(msg) from error
        self.is_replicated = self.is_replicated and not pickler.found_shards
        end, has_dtensors = HEADER_BYTES + self.tensor_bytes, pickler.found_dtensors
        self.has_dtensors = self.has_dtensors or has_dtensors
        return CommitItem(file.getvalue(), begin, end, of_world or has_dtensors, has_dtensors)

    def _add(self, tensor: Any, is_shared: IsShared | None) -> int:
        """Give a tensor a place, and return its offset."""
        size = tensor.numel() * tensor.element_size()
        if is_shared is not None and shared_tensors.can_share(tensor) and is_shared(tensor):
            offset = shared_tensors.OFFSETS_FROM + self.shared_bytes
            self.shared.append((offset, tensor))
            self.shared_bytes = round_up(self.shared_bytes + size)
            return offset
        offset = HEADER_BYTES + self.tensor_bytes
        self.tensors.append((offset, tensor))
        self.tensor_bytes = round_up(self.tensor_bytes + size)
        return offset


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, add: Callable[[Any], int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._add = add
        self._torch = sys.modules.get("torch")
        self._dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        self.found_dtensors = self.found_shards = False

    def reducer_override(self, found: Any) -> Any:
        if self._torch is None:
            return NotImplemented
        if type(found) is self._torch.Tensor and _is_raw(self._torch, found):
            place = self._add(found), found.dtype, tuple(found.shape), _memory_format(self._torch, found)
            return tensor_at, (*place, str(found.device))
        if self._dtensor is not None and isinstance(found, self._dtensor):
            local = found.to_local().detach()
            placements, shape = tuple(found.placements), tuple(found.shape)
            self.found_dtensors = True
            self.found_shards = self.found_shards or not all(one.is_replicate() for one in placements)
            mesh, offsets = _place(found, placements, shape)
            return dtensor_of, (local, mesh, placements, shape, found.stride(), offsets)
        return NotImplemented


_places: dict[Any, tuple[MeshKey, Offsets | None]] = {}
"""What is known of DTensors, by mesh, place in it, placements and shape: all commits are of the same ones."""


def _place(found: Any, placements: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[MeshKey, Offsets | None]:
    """Return the key of a DTensor's mesh, and the offsets of its local part; None where that is no part of it."""
    mesh = found.device_mesh
    key = mesh, tuple(mesh.get_coordinate() or ()), placements, shape  # a process may become another rank
    if key not in _places:
        offsets = None
        if not any(one.is_partial() for one in placements):
            chunks = found.__create_chunk_list__()  # what `torch.distributed.checkpoint` calls
            offsets = tuple(chunks[0].offsets)
        _places[key] = mesh_key(mesh), offsets
    return _places[key]


def _is_raw(torch: Any, tensor: Any) -> bool:
    """Return whether a tensor is what its elements are, so that they can be copied as bytes."""
    is_plain = tensor.layout is torch.strided and tensor.device.type in _RAW_DEVICES and not tensor.is_quantized
    return is_plain and not tensor.is_conj() and not tensor.is_neg()


def _memory_format(torch: Any, tensor: Any) -> str:
    name = _CHANNELS_LAST.get(tensor.dim(), "")
    if not name or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=getattr(torch, name)):
        return "contiguous_format"
    return name


def mesh_key(mesh: Any) -> MeshKey:
    """Return what says which mesh of a script this is, in any attempt."""
    ranks = mesh.mesh
    names = mesh.mesh_dim_names
    return (tuple(names) if names else None, tuple(ranks.shape), tuple(ranks.flatten().tolist()))


def tensor_at(offset: int, dtype: Any, shape: tuple[int, ...], memory_format: str, device: str) -> Any:
    """Stand in a pickle for a tensor in the buffer. `_Unpickler` puts the tensor in its place."""
    raise NotImplementedError(offset, dtype, shape, memory_format, device)


def dtensor_of(
    local: Any,
    mesh: MeshKey,
    placements: Any,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offsets: Offsets | None,
) -> Any:
    """Stand in a pickle for a DTensor with this local part. `_Unpickler` puts the DTensor in its place."""
    raise NotImplementedError(local, mesh, placements, shape, stride, offsets)


def load_item(item: CommitItem, tensor: Callable[..., Any], dtensor: Callable[..., Any]) -> Any:
    """Unpickle an item. `tensor` and `dtensor` have the parameters of `tensor_at` and `dtensor_of`."""
    unpickler = _Unpickler(io.BytesIO(item.pickled))
    unpickler.replaced = {(__name__, tensor_at.__name__): tensor, (__name__, dtensor_of.__name__): dtensor}
    return unpickler.load()


def items_of(buffer: CommitBuffer) -> dict[str, CommitItem]:
    """Return the items of a commit by name. Raises ValueError where the buffer is damaged."""
    return dict(pickle.loads(buffer.read_pickle()))  # noqa: S301


class OwnMemory:
    """Memory of this process for tensors that are restored, in huge pages where the kernel allows that.

    Most of the time of copying into new memory is that of its page faults. As those that `torch.load` returns, the
    tensors cannot be made larger in place.
    """

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0

    def empty(self, dtype: Any, shape: tuple[int, ...], memory_format: str, device: str) -> Any:
        """Return a tensor that is not initialized. The arguments are those of `tensor_at`."""
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
        """Whether one of its items has."""
        return any(item.has_dtensors for item in self._items.values())

    def item(self, name: str, *, copied: bool = True) -> Any:
        """Return an item. `copied` False: its tensors are memory of the buffer, which a later commit overwrites.

        In any case, those of this process that are still as they were committed are themselves.
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
        kind = sys.modules["torch.distributed.tensor"].DTensor
        size = sys.modules["torch"].Size(shape)
        return kind.from_local(local, self._meshes[mesh], placements, run_check=False, shape=size, stride=stride)


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
    """Return the meshes of those of the tensors that are DTensors, each once."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is None:
        return []
    return [*{id(one.device_mesh): one.device_mesh for one in tensors if isinstance(one, kind)}.values()]
