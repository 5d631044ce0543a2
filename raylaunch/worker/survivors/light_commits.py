"""Light commits: what a survivor needs so that no step is lost when other ranks die, though few steps are committed.

DistributedDataParallel (DDP) keeps parameters equal on all ranks, so a rank that dies takes none of them with it. After
each step the ranks commit what differs between them, such as random states, which is little: that is a light commit.
When ranks have died, a survivor of each node completes its last one: it writes the tensors that are equal on all ranks
into memory of the node, from where the ranks restore them. This is just-in-time checkpointing (Gupta et al., EuroSys
2024).

A survivor can do so only if nothing has changed these tensors since the commit: the optimizer, which must be one of
torch's, has not begun its next step or has its tensors in the undo log, no other tensor was changed in place, and
samples of their bytes are the same. Since a rank may have died before its last commit, when others had made theirs, a
survivor keeps the commit before its last one, too.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import zip_longest
from typing import Any

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.worker import torch_internals
from raylaunch.worker.state import rank_buffers
from raylaunch.worker.state.commit_buffer import HEADER_BYTES, CommitBuffer
from raylaunch.worker.state.rank_buffers import RankBuffers
from raylaunch.worker.state.shared_tensors import PartMemory, bytes_of
from raylaunch.worker.state.snapshots.snapshot import Snapshot
from raylaunch.worker.survivors.undo_log import UndoLog

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
    undo: dict[int, Any] = field(default_factory=dict)
    """By offset, what optimizers have changed since, as it was."""
    changed_by: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """The optimizers that have begun a step since."""

    @property
    def steps(self) -> int:
        return self.held.commit.steps

    @property
    def tensors(self) -> list[tuple[int, Any]]:
        """The tensors as they were, by offset."""
        return [(offset, self.undo.get(offset, tensor)) for offset, tensor in self.found.shared]

    def is_unchanged(self) -> bool:
        """Return whether torch has counted no change of a tensor since, except changes that can be undone."""
        now = zip(self.found.shared, _versions(self.found), self.versions, strict=True)
        return all(version == before or offset in self.undo for (offset, _), version, before in now)

    def is_intact(self) -> bool:
        """Return whether the commit is there, and the tensors are as they were, as far as can be known."""
        is_there = self.is_unchanged() and self.buffer.header.held() == self.held
        return is_there and _digest(self.tensors, self.found, self.held) == self.held.digest

    def complete(self, target: CommitBuffer) -> None:
        """Write the whole part into another buffer, and seal it."""
        start, _ = self.buffer.header.share()
        own, memory, everything = PartMemory(self.buffer).own, PartMemory(target), range(self.found.shared_bytes)
        with sys.modules["torch"].no_grad():
            memory.own[HEADER_BYTES:start].copy_(own[HEADER_BYTES:start])
            for place, tensor in memory.share_pairs(start, everything, self.tensors):
                place.copy_(tensor)
        whole = replace(self.held, light=False, first_sharer=self.held.rank, sharers=1)
        _seal(target, whole, self.found, self.buffer.header.interval)


class LightCommits:
    """The light commits of this process. `use` is called by another thread than the rest."""

    def __init__(self) -> None:
        #: The last commit, before an optimizer has begun the next step.
        self._last: _KeptCommit | None = None
        #: The commit before that one or, if an optimizer has begun the next step, the last one.
        self._before: _KeptCommit | None = None
        self._undo_log = UndoLog()
        self._number = 0
        #: The files in which commits are to be completed, and after how many steps the newest of them is; 0: any.
        self._order: tuple[Sequence[int], int] = (), 0
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
        held = replace(held, light=True, digest=_digest(found.shared, found, held))
        _seal(buffer, held, found, interval)
        self._last = _KeptCommit(buffer, held, found, _versions(found), weakref.ref(buffers))
        return True

    def _step_begins(self, optimizer: Any, *_: Any) -> None:
        """Copy what an optimizer's step is about to change of the last commit's tensors."""
        kept = self._before
        if self._last is not None:
            kept, self._before = self._last, None  # from here on the undo log is of the last commit
        if kept is not None and optimizer not in kept.changed_by:
            images = self._undo_log.record(optimizer, kept.found.shared)
            if images is None or not kept.is_unchanged():
                kept = None
            else:
                kept.undo.update(images)
                kept.changed_by.add(optimizer)
        self._before, self._last = kept, None
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._is_noticed = None

    def use(self, fds: Sequence[int], newest: int) -> None:
        """Take the descriptors of files: in each a commit is to be completed, from the newest one on.

        `newest`: the most steps of a commit that is of use; 0: not known.
        """
        with self._lock:
            (before, _), self._order = ((fds, 0), ((), 0)) if self._is_closed else (self._order, (fds, newest))
        for fd in before:
            os.close(fd)

    def complete(self) -> None:
        """Complete the last commits, as far as this process has files for them, and the tensors are as they were.

        Closes the files. Errors are printed; the ranks then restore an earlier commit.
        """
        with self._lock:
            (fds, newest), self._order = self._order, ((), 0)
        found = [one for one in (self._last, self._before) if one is not None and one.is_intact()]
        self._last, self._before = (
            # The function has made the tensors, and will make others: their memory must be free.
            one if one in found and one.owner() is not None else None
            for one in (self._last, self._before)
        )
        wanted = [one for one in found if not newest or one.steps <= newest]
        for fd, one in zip_longest(fds, wanted[: len(fds)]):
            if one is None:
                os.close(fd)
                continue
            try:
                one.complete(rank_buffers.mapped(fd))
            except (OSError, ValueError, RuntimeError) as error:
                print(f"raylaunch: the last steps must be done again: {error}", file=sys.stderr, flush=True)

    def live(self, commit: Commit) -> dict[int, Any]:
        """Return the tensors that are equal on all ranks, if they are still as in this commit, by their offsets."""
        for one in (self._last, self._before):
            if one is not None and one.held.commit == commit and one.is_intact():
                return {offset: tensor for offset, tensor in one.found.shared if offset not in one.undo}
        return {}

    def close(self) -> None:
        """Complete nothing any more: the elastic function has come to its end."""
        if self._hook is not None:
            self._hook.remove()
        self._last = self._before = None
        with self._lock:
            self._is_closed = True
            (fds, _), self._order = self._order, ((), 0)
        for fd in fds:
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


def _digest(tensors: Sequence[tuple[int, Any]], found: Snapshot, held: HeldCommit) -> int:
    """Return a number that is the same on all ranks, of some bytes of a tensor: of others with each commit.

    Not a `Digest`, which is of more bytes, and takes three times as long.
    """
    number = held.commit.steps
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
