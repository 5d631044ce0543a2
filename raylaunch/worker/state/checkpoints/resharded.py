"""What `State.restore` reads from when another world has written it: the parts of a commit, or a checkpoint on disk.

What all ranks have together, models and optimizers, is put together anew by DCP. What is a rank's own comes from the
part of the old rank `RANK % W`, if the old world had W ranks: its own part, as long as there was one.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed import tensor as dtensors
from torch.distributed.checkpoint import FileSystemReader, StorageReader
from torch.distributed.checkpoint.metadata import Metadata

from raylaunch.worker import torch_internals
from raylaunch.worker.state.checkpoints import dcp_parts, known_pickles
from raylaunch.worker.state.checkpoints.dcp_parts import RECORDS, PartsReader, RankRecord
from raylaunch.worker.state.checkpoints.durable_folder import METADATA
from raylaunch.worker.state.commit_buffer import CommitBuffer
from raylaunch.worker.state.shared_tensors import view_at
from raylaunch.worker.state.snapshots.restored import OwnMemory, load_item, meshes_of
from raylaunch.worker.state.snapshots.snapshot import OBJECT, CommitItem, MeshKey, Offsets


class Resharded:
    """The items of a commit, for a world of another size. It has the methods of `Restored`."""

    def __init__(
        self,
        items: Mapping[str, CommitItem],
        memory_of: Callable[[str], tuple[Any, int]],
        reader: StorageReader,
        metadata: Metadata,
        own: Iterable[Any],
        path: str = "",
    ) -> None:
        """`items`: from the old rank whose things this rank takes over. `path`: of a checkpoint on disk.

        `memory_of`: returns for an item of a rank the tensor of bytes that has its tensors, and the offset that its
        first byte has for the item. `own`: the parameters of the script's objects.
        """
        self._items = items
        self._memory_of = memory_of
        self._reader = reader
        self._metadata = metadata
        self._path = path
        parameters = [one for one in own if isinstance(one, dtensors.DTensor)]
        self._meshes = meshes_of(parameters)
        self._alike = {(tuple(one.shape), tuple(one.placements)): one for one in reversed(parameters)}

    @classmethod
    def of_parts(cls, buffers: Mapping[int, CommitBuffer], rank: int, own: Iterable[Any]) -> Resharded:
        """Read the parts of a commit in memory, by rank: all or, if they are replicated, one and those it shares with.

        `rank`: the old rank whose things this rank takes over.
        """
        parts = dcp_parts.parts_of(buffers)
        part = parts[rank]
        reader = PartsReader([part] if part.held.replicated else [*parts.values()])
        return cls(part.items, lambda _: (part.memory.own, 0), reader, reader.read_metadata(), own)

    @classmethod
    def of_checkpoint(cls, path: str, rank: int, own: Iterable[Any]) -> tuple[Resharded, RankRecord]:
        """Read a checkpoint on disk, for a rank of this world. Return also what an old rank has written of its own.

        Raises ValueError where it cannot be read, or is no checkpoint of `State`.
        """
        reader = FileSystemReader(path)
        with _named(path), open(os.path.join(path, METADATA), "rb") as file:
            metadata: Metadata = known_pickles.load(file)
        names = [name for name in metadata.state_dict_metadata if name.startswith(f"{RECORDS}.rank_")]
        if not names:
            raise ValueError(f"{path} is a checkpoint that `State` has not written")
        name = f"{RECORDS}.rank_{rank % len(names)}"
        with _named(path):
            record: RankRecord = known_pickles.load(
                io.BytesIO(dcp_parts.read_into({name: b""}, reader, metadata)[name])
            )
        return cls(record.items, record.memory_of, reader, metadata, own, path), record

    @property
    def names(self) -> list[str]:
        """The names of the items."""
        return [*self._items]

    def item(self, name: str, *, copied: bool = True) -> Any:
        """Return an item. `copied` False: its DTensors are not on their devices yet.

        Its tensors are the caller's own in any case. Raises ValueError where something has no place in this world, or
        cannot be read.
        """
        item = self._items[name]
        if not item.of_world:
            memory, base = self._memory_of(name)
            return load_item(item, _copies(memory, base), self._empty_dtensor)
        found = load_item(item, _empty_tensor, partial(self._empty_dtensor, device=None if copied else "cpu"))
        targets = dcp_parts.tensors_by_fqn({name.removeprefix(OBJECT): found})
        with torch.no_grad(), _named(self._path):
            dcp_parts.read_into(targets, self._reader, self._metadata)
        return found

    def is_live(self, tensor: Any) -> bool:
        """Return False: what another world has written is read anew."""
        del tensor
        return False

    def is_aliased(self, tensors: Iterable[Any]) -> bool:
        """Return False: no tensor is memory of a buffer."""
        del tensors
        return False

    def _empty_dtensor(
        self,
        local: Any,
        mesh: MeshKey,
        placements: Any,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offsets: Offsets | None,
        device: str | None = None,
    ) -> Any:
        """Return a DTensor as the script has one of this shape; a plain tensor where it has no DTensors at all.

        `device`: where its local part is; None: where the script has that.
        """
        del stride
        dcp_parts.placed(offsets, placements)
        if not self._meshes:
            return torch.empty(shape, dtype=local.dtype)
        if (alike := self._alike.get((shape, placements))) is not None:
            own = torch.empty_like(alike.to_local().detach(), dtype=local.dtype, device=device)
            return torch_internals.dtensor_of(own, alike.device_mesh, placements, alike.shape, alike.stride())
        found = [one for one in self._meshes if (one.mesh_dim_names, one.ndim) == (mesh[0], len(mesh[1]))]
        if len(found) != 1:
            names = f"the dimensions {', '.join(mesh[0])}" if mesh[0] else f"{len(mesh[1])} dimensions without names"
            msg = f"`State` has a DTensor of a mesh with {names}, and the script has {len(found)} such meshes"
            raise ValueError(msg)
        return dtensors.empty(*shape, dtype=local.dtype, device_mesh=found[0], placements=placements)


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Raise ValueError that names a checkpoint which cannot be read. `path` "": it is in memory."""
    try:
        yield
    except Exception as error:
        if not path:
            raise
        msg = (
            f"the checkpoint {path} cannot be read ({type(error).__name__}: {error}); "
            "when it is moved away, `State` restores an older one or begins anew"
        )
        raise ValueError(msg) from error


def _empty_tensor(offset: int, dtype: Any, shape: tuple[int, ...], memory_format: str, device: str) -> Any:
    """Return a tensor for DCP to fill. It is on the CPU: what loads it has devices of its own."""
    del offset, device
    return torch.empty(shape, dtype=dtype, memory_format=getattr(torch, memory_format))


def _copies(memory: Any, base: int) -> Callable[..., Any]:
    own = OwnMemory()

    def copied(offset: int, dtype: Any, shape: tuple[int, ...], memory_format: str, device: str) -> Any:
        kind = device.partition(":")[0]  # the old rank's device may have another index here
        return own.empty(dtype, shape, memory_format, kind).copy_(view_at(memory, offset - base, dtype, shape))

    return copied
