"""Objects of the script as tensors in a buffer and a pickle without them, and back.

Tensors are copied as they are. Of a DTensor, the local part is copied; its placements, the name of its mesh and the
place of its local part are pickled. Everything else, such as the counters of a scheduler, is pickled.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from raylaunch.worker.state import shared_tensors
from raylaunch.worker.state.commit_buffer import HEADER_BYTES, round_up
from raylaunch.worker.state.shared_tensors import IsShared

OBJECT = "object:"
"""Before the name of an object, in that of its item."""
_RAW_DEVICES = ("cpu", "cuda")
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
