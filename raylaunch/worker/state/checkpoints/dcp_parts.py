"""The parts of a commit as `torch.distributed.checkpoint` (DCP) sees them: state dicts, plans, and a storage to read.

A part is what one rank has written. DCP's own planners find out which of its tensors go where. A shard of a DTensor
tells them its place by the methods that DTensor has for them too, so that the processes of its mesh are not needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, StorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, TensorWriteData, WriteItem, WriteItemType

from raylaunch.core.machine.commits import HeldCommit
from raylaunch.worker.state.commit_buffer import CommitBuffer
from raylaunch.worker.state.shared_tensors import PartMemory
from raylaunch.worker.state.snapshots.restored import items_of, load_item
from raylaunch.worker.state.snapshots.snapshot import OBJECT, CommitItem, MeshKey, Offsets

RECORDS = "raylaunch"
"""The key of a checkpoint's state dict under which there is what `State` has besides the objects."""


class LocalShard(torch.Tensor):  # type: ignore[misc]
    """The local part of a DTensor. It has the methods that DCP calls on a DTensor (`_Checkpointable` in torch)."""

    offsets: Offsets
    whole_shape: tuple[int, ...]

    @classmethod
    def of(cls, local: Any, shape: tuple[int, ...], offsets: Offsets) -> LocalShard:
        """Take a tensor as the part of a tensor of this shape that begins at these offsets."""
        found: LocalShard = local.as_subclass(cls)
        found.offsets, found.whole_shape = offsets, shape
        return found

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the place of this part."""
        return [ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=self.shape)]

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        """Return what to write of the tensor with this name."""
        del value
        (chunk,) = self.__create_chunk_list__()
        properties = TensorProperties.create_from_tensor(self.as_subclass(torch.Tensor))
        data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self.whole_shape))
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Any:
        """Return the part itself."""
        del index
        return self.as_subclass(torch.Tensor)


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What a checkpoint on disk has of one rank besides tensors of models and optimizers, in one pickle."""

    held: HeldCommit
    items: dict[str, CommitItem]
    regions: dict[str, bytes]
    """By name of an item that is the rank's own: the part of the buffer that has its tensors."""

    def memory_of(self, name: str) -> tuple[Any, int]:
        """Return the tensors of an item as a tensor of bytes, and the offset of its first byte."""
        region = bytearray(self.regions[name])
        memory = torch.frombuffer(region, dtype=torch.uint8) if region else torch.empty(0, dtype=torch.uint8)
        return memory, self.items[name].begin


@dataclass(frozen=True, slots=True)
class CommitPart:
    """What one rank has written for a commit."""

    held: HeldCommit
    items: dict[str, CommitItem]
    memory: PartMemory
    """The memory in which the items have their places."""

    @classmethod
    def of(cls, buffer: CommitBuffer, sharing: Sequence[CommitBuffer] = ()) -> CommitPart:
        """Read a buffer. `sharing`: as in `PartMemory`. Raises ValueError where it has no whole commit."""
        held = buffer.header.held()
        if held is None:
            raise ValueError("the buffer has no whole commit")
        return cls(held, items_of(buffer), PartMemory(buffer, sharing))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the objects that all ranks have together, by name. Its tensors are memory of the part.

        Raises ValueError for a DTensor that has no place, and what unpickling raises.
        """
        names = [name for name, item in self.items.items() if item.of_world]
        return {name.removeprefix(OBJECT): self.load(name) for name in names}

    def record(self) -> RankRecord:
        """Return what belongs to this rank alone."""
        own = {name: item for name, item in self.items.items() if not item.of_world}
        regions = {name: self.memory.own[item.begin : item.end].numpy().tobytes() for name, item in own.items()}
        return RankRecord(self.held, self.items, regions)

    def load(self, name: str) -> Any:
        """Return an item. Its tensors are memory of the part; each DTensor is a `LocalShard`."""
        return load_item(self.items[name], self._tensor, _shard)

    def _tensor(self, offset: int, dtype: Any, shape: tuple[int, ...], memory_format: str, device: str) -> Any:
        del memory_format, device
        return self.memory.tensor(offset, dtype, shape)


def parts_of(buffers: Mapping[int, CommitBuffer]) -> dict[int, CommitPart]:
    """Read the parts of a commit, by rank. Raises ValueError where they do not fit together.

    Each part needs those with which it shares tensors, and these must be equal on all ranks.
    """
    found, all_held = {}, {rank: buffer.header.held() for rank, buffer in buffers.items()}
    if len({held.digest for held in all_held.values() if held is not None}) > 1:
        raise ValueError("parameters that DistributedDataParallel keeps equal differ between the ranks")
    for rank, buffer in buffers.items():
        held = all_held[rank]
        sharing = held.sharing if held is not None else ()
        if missing := [one for one in sharing if one not in buffers]:
            msg = f"the parts of the ranks {missing} are missing, which have shares of the same tensors"
            raise ValueError(msg)
        found[rank] = CommitPart.of(buffer, [buffers[one] for one in sharing])
    return found


def _shard(
    local: Any,
    mesh: MeshKey,
    placements: Any,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offsets: Offsets | None,
) -> Any:
    del mesh, stride
    return LocalShard.of(local, shape, placed(offsets, placements))


def placed(offsets: Offsets | None, placements: object) -> Offsets:
    """Return the offsets of a DTensor's local part. Raises ValueError where it is no part, but a summand."""
    if offsets is None:
        msg = f"a DTensor with the placements {placements} can only be restored by the world that has committed it"
        raise ValueError(msg)
    return offsets


def save_planner(state_dict: dict[str, Any], rank: int) -> DefaultSavePlanner:
    """Return DCP's planner for what one rank writes. Of what several have, the lowest rank writes all."""
    planner = DefaultSavePlanner(flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
    planner.set_up_planner(state_dict, is_coordinator=rank == 0)
    return planner


class PartsReader(StorageReader):  # type: ignore[misc]
    """DCP's storage for reading: the parts, in memory of this node."""

    def __init__(self, parts: Sequence[CommitPart]) -> None:
        """`parts`: of all ranks, or one of them if they are replicated. Raises as `CommitPart.state_dict` does."""
        planners = [save_planner(part.state_dict(), part.held.rank) for part in parts]
        plans = [planner.create_local_plan() for planner in planners]
        self._tensors = {
            item.index: planner.resolve_data(item)
            for planner, plan in zip(planners, plans, strict=True)
            for item in plan.items
            if item.type != WriteItemType.BYTE_IO
        }
        _, self._metadata = planners[0].create_global_plan(plans)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what DCP's planner has made of the parts."""
        del args, kwargs
        return self._metadata

    def read_data(self, plan: Any, planner: Any) -> torch.futures.Future[None]:
        """Copy what the plan says out of the parts. Only tensors are read in this way."""
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise ValueError(f"{item.storage_index.fqn} is no tensor in the commit")
            source = self._tensors[item.storage_index]
            for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dimension, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(source)
            planner.commit_tensor(item, target)
        found: torch.futures.Future[None] = torch.futures.Future()
        found.set_result(None)
        return found

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: there is only one checkpoint here."""

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there are no files."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        """Return the plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: there is nothing that a name could stand for."""
        del checkpoint_id
        return False


def tensors_by_fqn(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a nested state dict under the names that DCP gives them."""
    planner = DefaultSavePlanner(flatten_sharded_tensors=False)
    planner.set_up_planner(state_dict)
    return {fqn: found for fqn, found in planner.state_dict.items() if isinstance(found, torch.Tensor)}


class _LoadPlanner(DefaultLoadPlanner):  # type: ignore[misc]
    """DCP's planner, but for objects that are no tensors: bytes are read, and not whatever a pickle says."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Put bytes into the state dict. Raises pickle.UnpicklingError for anything else than simple values."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read_into(targets: Mapping[str, Any], reader: StorageReader, metadata: Metadata) -> dict[str, Any]:
    """Fill tensors by DCP, and return all by name, objects that are no tensors replaced by what was saved.

    As `torch.distributed.checkpoint.load`, but without communication: each rank reads what it needs.

    Raises RuntimeError for a name that was not saved, and ValueError for a tensor of another shape.
    """
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    found = dict(targets)
    planner.set_up_planner(found, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return found
