"""Light commits: what a survivor needs so that no step is lost when other ranks die, though few steps are committed.

DistributedDataParallel (DDP) keeps parameters equal on all ranks, so a rank that dies takes none of them with it. After
each step the ranks commit what differs between them, such as random states, which is little: that is a light commit.
When ranks have died, a survivor of each node completes its last one: it writes the tensors that are equal on all ranks
into memory of the node, from where the ranks restore them. This is just-in-time checkpointing (Gupta et al., EuroSys
2024).

A survivor can do so only if nothing has changed these tensors since the commit: the optimizer, which must be one of
torch's, has not begun its next step, no other tensor was changed in place, and samples of their bytes are the same.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.worker import torch_internals
from raylaunch.worker.state import buffer_client, rank_commits
from raylaunch.worker.state.commit_buffer import HEADER_BYTES, CommitBuffer
from raylaunch.worker.state.rank_buffers import RankBuffers
from raylaunch.worker.state.shared_tensors import PartMemory, bytes_of
from raylaunch.worker.state.snapshots.snapshot import Snapshot

_SAMPLED_BYTES = 2**12


@dataclass(frozen=True, slots=True, eq=False)
class _KeptCommit:
    """A light commit, and how the tensors were that it does not have."""

    buffer: CommitBuffer
    held: HeldCommit
    found: Snapshot
    versions: tuple[int, ...]
    owner: weakref.ref[RankBuffers]
    """Those of the `State` that has made the commit."""

    def is_intact(self) -> bool:
        """Return whether the commit is there, and the tensors are as they were, as far as can be known."""
        is_there = _versions(self.found) == self.versions and self.buffer.header.held() == self.held
        return is_there and _digest(self.found, self.held) == self.held.digest

    def complete(self, target: CommitBuffer) -> None:
        """Write the whole part into another buffer, and seal it."""
        start, _ = self.buffer.header.share()
        own, memory, everything = PartMemory(self.buffer).own, PartMemory(target), range(self.found.shared_bytes)
        with sys.modules["torch"].no_grad():
            memory.own[HEADER_BYTES:start].copy_(own[HEADER_BYTES:start])
            for place, tensor in memory.share_pairs(start, everything, self.found.shared):
                place.copy_(tensor)
        whole = replace(self.held, light=False, first_sharer=self.held.rank, sharers=1)
        _seal(target, whole, self.found, self.buffer.header.interval)


class LightCommits:
    """The light commits of this process. `use` is called by another thread than the rest."""

    def __init__(self) -> None:
        #: The last commit, until an optimizer begins the next step.
        self._last: _KeptCommit | None = None
        self._number = 0
        #: The file in which a commit is to be completed, -1 for none, and after how many steps at most; 0: any.
        self._order = -1, 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._hook: Any = None
        #: Optimizers that were seen to begin a step.
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Whether they have one of the tensors, so that the next step will be noticed, too; None: not known yet.
        self._is_noticed: bool | None = None

    def commit(self, buffers: RankBuffers, held: HeldCommit, found: Snapshot, interval: int) -> bool:
        """Commit what is this rank's own. Return False, if no optimizer of torch was seen to begin a step.

        `held`: the name of the commit. `interval`: as in `RankBuffers.seal`.

        Raises MemoryError where the node does not have so much memory.
        """
        if self._hook is None:
            self._hook = import_module("torch.optim.optimizer").register_optimizer_step_pre_hook(self._step_begins)
        if self._is_noticed is None:
            groups = [group for each in self._optimizers for group in each.param_groups]
            parameters = {one.data_ptr() for group in groups for one in group["params"]}
            self._is_noticed = any(tensor.data_ptr() in parameters for _, tensor in found.shared)
        if not self._is_noticed:
            return False
        self._number += 1
        buffer = buffers.light(self._number, found)
        buffer.header.unseal()
        buffer.write_pickle(found.pickled, tensors=found.tensor_bytes)
        _copy(found.tensors, buffer)
        held = replace(held, light=True, digest=_digest(found, held))  # waits for a device
        if not found.shared[0][1].is_cpu:
            rank_commits.leave_if_ordered()
        _seal(buffer, held, found, interval)
        self._last = _KeptCommit(buffer, held, found, _versions(found), weakref.ref(buffers))
        return True

    def _step_begins(self, optimizer: Any, *_: Any) -> None:
        """Forget the last commit: an optimizer's step is about to change its tensors.

        If another attempt begins, collectives may have ended that had no result, and the step would be of garbage.
        """
        rank_commits.leave_if_ordered()
        self._last = None
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._is_noticed = None

    def use(self, fd: int, newest: int) -> None:
        """Take the descriptor of a file in which the last commit is to be completed.

        `newest`: the most steps of a commit that is of use; 0: not known.
        """
        with self._lock:
            (before, _), self._order = ((fd, 0), (-1, 0)) if self._is_closed else (self._order, (fd, newest))
        _close(before)

    def complete(self) -> None:
        """Complete the last commit, if this process has a file for it, and the tensors are as they were.

        Closes the file. Errors are printed; the ranks then restore an earlier commit.
        """
        with self._lock:
            (fd, newest), self._order = self._order, (-1, 0)
        last = self._last if self._last is not None and self._last.is_intact() else None
        # Without the owner, the function has made the tensors, and will make others: their memory must be free.
        self._last = last if last is not None and last.owner() is not None else None
        if fd < 0 or last is None or 0 < newest < last.held.commit.steps:
            _close(fd)
            return
        try:
            last.complete(buffer_client.mapped(fd))
        except (OSError, ValueError, RuntimeError) as error:
            print(f"raylaunch: the last steps must be done again: {error}", file=sys.stderr, flush=True)

    def live(self, commit: Commit) -> dict[int, Any]:
        """Return the tensors that are equal on all ranks, if they are still as in this commit, by their offsets."""
        last = self._last
        return dict(last.found.shared) if last is not None and last.held.commit == commit and last.is_intact() else {}

    def close(self) -> None:
        """Complete nothing any more: the elastic function has come to its end."""
        if self._hook is not None:
            self._hook.remove()
        self._last = None
        with self._lock:
            self._is_closed = True
            (fd, _), self._order = self._order, (-1, 0)
        _close(fd)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


def _copy(tensors: Sequence[tuple[int, Any]], buffer: CommitBuffer) -> None:
    """Copy tensors into a buffer. Most are so small that the way to copy them matters."""
    memory, others = ctypes.addressof(buffer.memory), []
    for offset, tensor in tensors:
        if tensor.is_cpu and tensor.is_contiguous():
            ctypes.memmove(memory + offset, tensor.data_ptr(), tensor.numel() * tensor.element_size())
        else:
            others.append((offset, tensor))
    with sys.modules["torch"].no_grad():
        for target, source in PartMemory(buffer).pairs(others):
            target.copy_(source)


def _seal(buffer: CommitBuffer, held: HeldCommit, found: Snapshot, interval: int) -> None:
    buffer.header.seal(
        held,
        tensors=found.tensor_bytes,
        pickled=len(found.pickled),
        shared=found.shared_bytes,
        interval=interval,
    )


def _digest(found: Snapshot, held: HeldCommit) -> int:
    """Return a number that is the same on all ranks, of some bytes of a tensor: of others with each commit.

    Not a `Digest`, which is of more bytes, and takes three times as long.
    """
    tensors, number = found.shared, held.commit.steps
    tensor = tensors[number % len(tensors)][1]
    size = tensor.numel() * tensor.element_size()
    start = number // len(tensors) * _SAMPLED_BYTES % size
    if tensor.is_cpu:
        sample = ctypes.string_at(tensor.data_ptr() + start, min(_SAMPLED_BYTES, size - start))
    else:
        sample = bytes(bytes_of(tensor)[start : start + _SAMPLED_BYTES].tolist())
    return zlib.crc32(sample, zlib.crc32(f"{len(tensors)} {found.shared_bytes}".encode())) | 1


def _versions(found: Snapshot) -> tuple[int, ...]:
    """Return how often each of the tensors was changed in place, as torch counts it."""
    return tuple(torch_internals.version(tensor) for _, tensor in found.shared)
