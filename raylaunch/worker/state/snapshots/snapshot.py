"""Objects of the script as tensors in a buffer and a pickle without them.

Tensors are copied as they are. A DTensor's local part is copied; its placements, the name of its mesh and the place of
its local part are pickled. Everything else, such as the counters of a scheduler, is pickled.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from raylaunch.worker.state import shared_tensors
from raylaunch.worker.state.commit_buffer import HEADER_BYTES, round_up
from raylaunch.worker.state.device_copies import has_streams
from raylaunch.worker.state.shared_tensors import IsShared

OBJECT = "object:"
"""Prefix of an object's name in the name of its item."""
_CHANNELS_LAST = {4: "channels_last", 5: "channels_last_3d"}
"""Memory formats by number of dimensions."""

MeshKey = tuple[tuple[str, ...] | None, tuple[int, ...], tuple[int, ...]]
"""The names and the sizes of the dimensions of a DeviceMesh, and its ranks."""


Offsets = tuple[int, ...]
"""Where the local part of a DTensor begins in the whole tensor, in elements, by dimension."""


class CommitItem(NamedTuple):
    """An item of a commit: its pickle, and the part of the buffer that has its tensors."""

    pickled: bytes
    begin: int
    end: int
    of_world: bool
    """Whether all ranks have it together, as a model and an optimizer; otherwise it is the rank's own."""
    has_dtensors: bool


class SnapshotPart(NamedTuple):
    """What a snapshot has of an item."""

    item: CommitItem
    tensors: list[tuple[int, Any]]
    """Own ones, with their offsets in the buffer."""
    shared: list[tuple[int, Any]]
    """The tensors that a node's ranks divide among them, with their offsets."""
    shared_begin: int
    shared_end: int
    is_replicated: bool


class Snapshot:
    """What a commit writes: tensors, each with its place, and one pickle of everything else."""

    def __init__(
        self,
        items: dict[str, Any],
        of_world: Collection[str] = (),
        shared: Mapping[str, IsShared] | None = None,
        known: Mapping[str, SnapshotPart] | None = None,
    ) -> None:
        """Take the items by name. The tensors are not copied yet. Raises what pickling raises, naming the item.

        `of_world`: names of items that all ranks have together. So are those in which there is a DTensor. `shared`:
        which tensors of an item are equal on all ranks. `known`: what another snapshot has of items that are the same,
        but for the contents of tensors.
        """
        #: Tensors with their offsets in the buffer.
        self.tensors: list[tuple[int, Any]] = []
        self.tensor_bytes = 0
        #: The same of tensors that the ranks of a node divide among them.
        self.shared: list[tuple[int, Any]] = []
        self.shared_bytes = 0
        #: Whether there is no sharded DTensor in it, and whether there is any DTensor.
        self.is_replicated, self.has_dtensors = True, False
        self.parts: dict[str, SnapshotPart] = {}
        for name, item in items.items():
            part = known.get(name) if known else None
            if part is None or (part.item.begin, part.shared_begin) != (self._end, self.shared_bytes):
                part = self._part(name, item, name in of_world, shared.get(name) if shared else None)
            self._append(name, part)
        #: Everything else.
        self.pickled = pickle.dumps(
            {name: part.item for name, part in self.parts.items()}, protocol=pickle.HIGHEST_PROTOCOL
        )

    @property
    def _end(self) -> int:
        return HEADER_BYTES + self.tensor_bytes

    def _part(self, name: str, item: Any, of_world: bool, is_shared: IsShared | None) -> SnapshotPart:
        tensors: list[tuple[int, Any]] = []
        shared: list[tuple[int, Any]] = []
        end, shared_end = self._end, self.shared_bytes

        def add(tensor: Any) -> int:
            """Give a tensor a place, and return its offset."""
            nonlocal end, shared_end
            size = tensor.numel() * tensor.element_size()
            if is_shared is not None and shared_tensors.can_share(tensor) and is_shared(tensor):
                offset = shared_tensors.OFFSETS_FROM + shared_end
                shared.append((offset, tensor))
                shared_end = round_up(shared_end + size)
                return offset
            offset = end
            tensors.append((offset, tensor))
            end = round_up(end + size)
            return offset

        file = io.BytesIO()
        pickler = _Pickler(file, add)
        try:
            pickler.dump(item)
        except MemoryError:
            raise
        except Exception as error:  # any: a class may have a `__reduce__` of its own
            msg = f"`State` cannot pickle {_what_fails(name, item)}: {error}"
            raise pickle.PicklingError(msg) from error
        has_dtensors = pickler.found_dtensors
        found = CommitItem(file.getvalue(), self._end, end, of_world or has_dtensors, has_dtensors)
        return SnapshotPart(found, tensors, shared, self.shared_bytes, shared_end, not pickler.found_shards)

    def _append(self, name: str, part: SnapshotPart) -> None:
        self.parts[name] = part
        self.tensors += part.tensors
        self.tensor_bytes = part.item.end - HEADER_BYTES
        self.shared += part.shared
        self.shared_bytes = part.shared_end
        self.is_replicated = self.is_replicated and part.is_replicated
        self.has_dtensors = self.has_dtensors or part.item.has_dtensors


def _what_fails(name: str, item: Any) -> str:
    """Return the expression for the innermost value in an item's dicts that cannot be pickled."""
    found = f"{name.removeprefix(OBJECT)}.state_dict()" if name.startswith(OBJECT) else name
    while isinstance(item, dict):
        failing = [key for key, value in item.items() if not _can_pickle(value)]
        if not failing:
            break
        found, item = f"{found}[{failing[0]!r}]", item[failing[0]]
    return found


def _can_pickle(value: Any) -> bool:
    try:
        _Pickler(io.BytesIO(), lambda _: 0).dump(value)
    except Exception:  # noqa: BLE001
        return False
    return True


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
        if type(found) is self._torch.Tensor and is_raw(self._torch, found):
            place = self._add(found), found.dtype, tuple(found.shape), _memory_format(self._torch, found)
            return tensor_at, (*place, _device(self._torch, found))
        if self._dtensor is not None and isinstance(found, self._dtensor):
            local = found.to_local().detach()
            placements, shape = tuple(found.placements), tuple(found.shape)
            self.found_dtensors = True
            self.found_shards = self.found_shards or not all(one.is_replicate() for one in placements)
            mesh, offsets = _place(found, placements, shape)
            return dtensor_of, (local, mesh, placements, shape, found.stride(), offsets)
        if isinstance(found, self._torch.Tensor) and _is_plain(self._torch, type(found)):
            return of_class, (found.as_subclass(self._torch.Tensor).detach(), type(found), vars(found))
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


def _is_plain(torch: Any, kind: type) -> bool:
    """Return whether a class of tensors only adds methods and attributes. Of others the tensors within are copied."""
    names = ("__torch_dispatch__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
    own = {name for one in kind.__mro__[: kind.__mro__.index(torch.Tensor)] for name in vars(one)}
    return own.isdisjoint((*names, "__slots__")) and kind is not torch.Tensor


def of_class(tensor: Any, kind: type, attributes: dict[str, Any]) -> Any:
    """Return a tensor as one of another class, with these attributes."""
    found = tensor.as_subclass(kind)
    vars(found).update(attributes)
    return found


def is_raw(torch: Any, tensor: Any) -> bool:
    """Return whether a tensor is what its elements are, so that they can be copied as bytes."""
    is_plain = tensor.layout is torch.strided and not tensor.is_quantized
    return is_plain and not tensor.is_conj() and not tensor.is_neg() and (tensor.is_cpu or has_streams(tensor.device))


def _device(torch: Any, tensor: Any) -> str:
    """Return a tensor's device. The rank's current one has no index: it may have another where it is restored."""
    device = tensor.device
    is_current = device.index is not None and device.index == torch.get_device_module(device).current_device()
    return device.type if is_current else str(device)


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
