"""Objects of the script as tensors in a buffer and a pickle without them, and back.

Tensors are copied as they are. Of a DTensor, the local part is copied; its placements and the name of its mesh are
pickled. Everything else, such as the counters of a scheduler, is pickled.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from raylaunch.worker.state.commit_buffer import HEADER_BYTES, CommitBuffer, round_up

_RAW_DEVICES = ("cpu", "cuda")
_CHANNELS_LAST = {4: "channels_last", 5: "channels_last_3d"}
"""Memory formats by number of dimensions."""

MeshKey = tuple[tuple[str, ...] | None, tuple[int, ...], tuple[int, ...]]
"""The names and the sizes of the dimensions of a DeviceMesh, and its ranks."""


class Snapshot:
    """What a commit writes: tensors, each with its place, and one pickle of everything else."""

    def __init__(self, items: dict[str, Any]) -> None:
        """Take the items by name. The tensors are not copied yet. Raises what pickling raises, naming the item."""
        #: Tensors with their offsets in the buffer.
        self.tensors: list[tuple[int, Any]] = []
        self.tensor_bytes = 0
        parts = [(name, self._pickled(name, item)) for name, item in items.items()]
        self.pickled = pickle.dumps(parts, protocol=pickle.HIGHEST_PROTOCOL)

    def _pickled(self, name: str, item: Any) -> bytes:
        file = io.BytesIO()
        try:
            _Pickler(file, self._add).dump(item)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            msg = f"`State` cannot pickle {name}: {error}"
            raise pickle.PicklingError(msg) from error
        return file.getvalue()

    def _add(self, tensor: Any) -> int:
        """Give a tensor a place, and return its offset."""
        offset = self.tensor_bytes
        self.tensors.append((HEADER_BYTES + offset, tensor))
        self.tensor_bytes = round_up(offset + tensor.numel() * tensor.element_size())
        return HEADER_BYTES + offset


def views(buffer: CommitBuffer, tensors: Iterable[tuple[int, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield, for each tensor that is not empty, a tensor in the buffer at its offset, and the tensor itself."""
    memory = whole(buffer)
    for offset, tensor in tensors:
        if tensor.numel():
            yield _view(memory, offset, tensor.dtype, tensor.shape), tensor


def whole(buffer: CommitBuffer) -> Any:
    """Return a tensor of bytes that is the memory of a buffer."""
    torch = sys.modules["torch"]
    return torch.frombuffer(buffer.memory, dtype=torch.uint8)


def _view(memory: Any, offset: int, dtype: Any, shape: tuple[int, ...]) -> Any:
    size = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + size].view(dtype).view(shape)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, add: Callable[[Any], int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._add = add
        self._torch = sys.modules.get("torch")
        self._dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)

    def reducer_override(self, found: Any) -> Any:
        if self._torch is None:
            return NotImplemented
        if type(found) is self._torch.Tensor and _is_raw(self._torch, found):
            place = self._add(found), found.dtype, tuple(found.shape), _memory_format(self._torch, found)
            return tensor_at, (*place, str(found.device))
        if self._dtensor is not None and isinstance(found, self._dtensor):
            local = found.to_local().detach()
            mesh = found.device_mesh
            return dtensor_of, (local, mesh_key(mesh), tuple(found.placements), tuple(found.shape), found.stride())
        return NotImplemented


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


def dtensor_of(local: Any, mesh: MeshKey, placements: Any, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    """Stand in a pickle for a DTensor with this local part. `_Unpickler` puts the DTensor in its place."""
    raise NotImplementedError(local, mesh, placements, shape, stride)


class Restored:
    """The items of a commit, read from a buffer."""

    def __init__(self, buffer: CommitBuffer, meshes: Iterable[Any]) -> None:
        """`meshes`: the DeviceMeshes of the script's objects. Raises ValueError where the buffer is damaged."""
        self._memory = whole(buffer) if "torch" in sys.modules else None
        self._meshes = {mesh_key(mesh): mesh for mesh in meshes}
        self._parts = dict(pickle.loads(buffer.read_pickle()))  # noqa: S301

    @property
    def names(self) -> list[str]:
        """The names of the items."""
        return [*self._parts]

    def item(self, name: str, *, copied: bool = True) -> Any:
        """Return an item. `copied` False: its tensors are memory of the buffer, which a later commit overwrites."""
        unpickler = _Unpickler(io.BytesIO(self._parts[name]))
        unpickler.replaced = {
            (__name__, tensor_at.__name__): self._copied_tensor if copied else self._tensor,
            (__name__, dtensor_of.__name__): self._dtensor,
        }
        return unpickler.load()

    def is_aliased(self, tensors: Iterable[Any]) -> bool:
        """Return whether one of the tensors is memory of the buffer."""
        if self._memory is None:
            return False
        start = self._memory.data_ptr()
        return any(
            one.device.type == "cpu" and start <= local_part(one).data_ptr() < start + self._memory.numel()
            for one in tensors
        )

    def _tensor(self, offset: int, dtype: Any, shape: tuple[int, ...], memory_format: str, device: str) -> Any:
        del memory_format, device
        if self._memory is None:
            msg = "`State` has tensors, and the script has not imported torch"
            raise ValueError(msg)
        return _view(self._memory, offset, dtype, shape)

    def _copied_tensor(self, offset: int, dtype: Any, shape: tuple[int, ...], memory_format: str, device: str) -> Any:
        torch = sys.modules["torch"]
        view = self._tensor(offset, dtype, shape, memory_format, device)
        found = torch.empty(shape, dtype=dtype, device=device, memory_format=getattr(torch, memory_format))
        return found.copy_(view)

    def _dtensor(
        self, local: Any, mesh: MeshKey, placements: Any, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> Any:
        if mesh not in self._meshes:
            msg = (
                f"`State` has a DTensor of a mesh {mesh[1]} over ranks {mesh[2]}, which no parameter of the script has"
            )
            raise ValueError(msg)
        kind = sys.modules["torch.distributed.tensor"].DTensor
        size = sys.modules["torch"].Size(shape)
        return kind.from_local(local, self._meshes[mesh], placements, run_check=False, shape=size, stride=stride)


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
