"""Tensors that are equal on all ranks: the ranks of a node divide them among their parts of a commit.

DistributedDataParallel (DDP) keeps parameters equal on all ranks, and so are the tensors of an optimizer that has no
other parameters. Each rank of a node copies a share of their bytes; ranks that restore put the shares together again.

Whether the tensors are equal is not left to DDP alone: before the first commit of an attempt the ranks compare digests
of all of them, and with each later commit digests of samples. A commit whose digests differ is never restored.
"""

from __future__ import annotations

import math
import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from raylaunch.worker.state.commit_buffer import CommitBuffer

OFFSETS_FROM: Final = 2**48
"""Offsets of shared tensors begin here, so that they differ from the offsets of a rank's own tensors in the buffer."""
_LEAST_BYTES = 2**14
"""Smaller tensors are not worth to be divided: each rank copies its own."""
LEAST_SHARED_BYTES = 2**20
"""If there are less in all, each rank copies its own."""
_SAMPLED_TENSORS, _SAMPLED_BYTES = 8, 2**16
"""How many tensors are part of a commit's digest, and how many bytes of each. All have their turn."""
_DIGEST_BITS = 30
"""So that sums over all ranks, and over all commits of an attempt, are below 2**63."""

IsShared = Callable[[Any], bool]


def find(objects: Mapping[str, Any]) -> dict[str, IsShared]:
    """Return which of the objects have tensors that are equal on all ranks, and by which function they are known."""
    kind = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", ())
    models = {name: _synchronized(one) for name, one in objects.items() if isinstance(one, kind) and _is_on_all(one)}
    everywhere = frozenset[int]().union(*models.values())
    found = {name: _is_at(addresses) for name, addresses in models.items()}
    for name, one in objects.items():
        # Optimizers of torch.distributed.optim divide their state among the ranks, or average parameters now and then.
        if hasattr(one, "param_groups") and type(one).__module__.startswith("torch.optim."):
            parameters = {each.data_ptr() for group in one.param_groups for each in group["params"]}
            if parameters and parameters <= everywhere:
                found[name] = lambda _: True
    return found


def _is_on_all(model: Any) -> bool:
    """Return whether a model in DDP is the same on all ranks, not only in a smaller group."""
    return bool(model.process_group.size() == sys.modules["torch.distributed"].get_world_size())


def _synchronized(model: Any) -> frozenset[int]:
    """Return the addresses of the parameters of a model in DDP that it keeps equal. Buffers may differ."""
    ignored = getattr(model, "parameters_to_ignore", ())
    return frozenset(one.data_ptr() for name, one in model.module.named_parameters() if name not in ignored)


def _is_at(addresses: frozenset[int]) -> IsShared:
    return lambda tensor: tensor.data_ptr() in addresses


def can_share(tensor: Any) -> bool:
    """Return whether a tensor's memory can be divided."""
    return bool(tensor.is_contiguous() and tensor.numel() * tensor.element_size() >= _LEAST_BYTES)


def bytes_of(tensor: Any) -> Any:
    """Return the memory of a contiguous tensor as one of bytes."""
    torch = sys.modules["torch"]
    return tensor.detach().reshape(-1).view(torch.uint8)


class PartMemory:
    """The memory of a part's tensors: its own buffer and, for shared tensors, all sharers' buffers."""

    def __init__(self, buffer: CommitBuffer, sharing: Sequence[CommitBuffer] = ()) -> None:
        """`sharing`: the parts of `HeldCommit.sharing`. Raises ValueError where a header is damaged."""
        self._buffer = buffer
        self._own: Any = None
        self._shares = [(each, *each.header.share()) for each in sharing]

    @property
    def own(self) -> Any:
        """The part's own buffer as a tensor of bytes."""
        if self._own is None:  # torch is imported when the first tensor is unpickled
            self._own = _bytes(self._buffer)
        return self._own

    def tensor(self, offset: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Return the tensor at an offset: memory of a buffer or, if several have bytes of it, a copy.

        Raises ValueError where the buffers do not have it.
        """
        pieces = self.pieces(offset, math.prod(shape) * dtype.itemsize)
        found = pieces[0] if len(pieces) == 1 else sys.modules["torch"].cat(pieces)
        return found.view(dtype).view(shape)

    def pieces(self, offset: int, size: int) -> list[Any]:
        """Return the `size` bytes of the tensor at an offset, one piece from each buffer that has some of them.

        They are memory of the buffers. Raises ValueError where these do not have all.
        """
        if offset < OFFSETS_FROM:
            return [self.own[offset : offset + size]]
        first = offset - OFFSETS_FROM
        found = []
        for buffer, at, share in self._shares:
            begin, end = max(first, share.start), min(first + size, share.stop)
            if begin < end:
                found.append(_bytes(buffer)[at + begin - share.start : at + end - share.start])
        if sum(len(piece) for piece in found) != size:
            msg = "the node does not have all shares of a tensor of the commit to restore"
            raise ValueError(msg)
        return found

    def pairs(self, tensors: Iterable[tuple[int, Any]]) -> Iterator[tuple[Any, Any]]:
        """Yield, for each own tensor that is not empty, a tensor in the buffer at its offset, and the tensor itself."""
        for offset, tensor in tensors:
            if tensor.numel():
                yield view_at(self.own, offset, tensor.dtype, tensor.shape), tensor

    def share_pairs(self, at: int, share: range, tensors: Iterable[tuple[int, Any]]) -> Iterator[tuple[Any, Any]]:
        """For each shared tensor that overlaps `share`, yield its bytes in the buffer, and the same of the tensor.

        `at`: where the share begins in the buffer.
        """
        for offset, tensor in tensors:
            first = offset - OFFSETS_FROM
            begin, end = max(first, share.start), min(first + tensor.numel() * tensor.element_size(), share.stop)
            if begin < end:
                target = self.own[at + begin - share.start : at + end - share.start]
                yield target, bytes_of(tensor)[begin - first : end - first]

    def has(self, tensor: Any) -> bool:
        """Return whether a tensor is memory of one of the buffers."""
        memories = (self.own, *(_bytes(buffer) for buffer, _, _ in self._shares))
        return tensor.device.type == "cpu" and any(
            one.data_ptr() <= tensor.data_ptr() < one.data_ptr() + one.numel() for one in memories
        )


def view_at(memory: Any, offset: int, dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return a tensor whose elements begin at an offset of a tensor of bytes."""
    size = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + size].view(dtype).view(shape)


def _bytes(buffer: CommitBuffer) -> Any:
    """Return the memory of a buffer as a tensor of bytes."""
    torch = sys.modules["torch"]
    return torch.frombuffer(buffer.memory, dtype=torch.uint8)


class Digest:
    """A number that is the same for equal tensors. On a device it is computed while the script goes on."""

    def __init__(self, tensors: Sequence[tuple[int, Any]], number: int, *, is_full: bool) -> None:
        """`tensors`: the shared ones, with their offsets. `number`: the commit's, which says what is sampled."""
        layout = array("q")
        for offset, tensor in tensors:
            layout.extend((offset, tensor.numel(), tensor.element_size()))
        self._layout = zlib.crc32(layout.tobytes())
        sums: dict[Any, list[Any]] = {}
        for memory in (bytes_of(tensor) for _, tensor in tensors) if is_full else _samples(tensors, number):
            sums.setdefault(memory.device, []).append(_sum(memory))
        self._sums = [sys.modules["torch"].stack(of_device) for of_device in sums.values()]

    def moves(self) -> list[tuple[Any, Any]]:
        """Return what `DeviceCopies` is to copy with the commit: what the number is made of, into pinned memory.

        To read that from a device would wait for all that the script has launched since.
        """
        sums, empty = self._sums, sys.modules["torch"].empty
        self._sums = [one if one.is_cpu else empty(one.shape, dtype=one.dtype, pin_memory=True) for one in sums]
        return [(target, source) for target, source in zip(self._sums, sums, strict=True) if target is not source]

    def value(self) -> int:
        """Return the number, from 1 on. Waits for devices, but not after `moves`."""
        sums = array("q", (one for of_device in self._sums for one in of_device.tolist()))
        return max(1, zlib.crc32(sums.tobytes(), self._layout) >> (32 - _DIGEST_BITS))


def _samples(tensors: Sequence[tuple[int, Any]], number: int) -> Iterator[Any]:
    """Yield some bytes of some tensors: others with the next commit."""
    rounds = -(-len(tensors) // _SAMPLED_TENSORS)
    for _, tensor in tensors[number % rounds :: rounds]:
        memory = bytes_of(tensor)
        start = number // rounds % -(-len(memory) // _SAMPLED_BYTES) * _SAMPLED_BYTES
        yield memory[start : start + _SAMPLED_BYTES]


def _sum(memory: Any) -> Any:
    """Return the sum of all bytes as numbers of 64 bits, and of the rest as bytes."""
    torch = sys.modules["torch"]
    if memory.storage_offset() % 8:
        memory = memory.clone()
    end = len(memory) // 8 * 8
    return memory[:end].view(torch.int64).sum() + memory[end:].sum(dtype=torch.int64)
