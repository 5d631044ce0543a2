"""The buffers of this rank: which one holds what, and which one the next commit is written to."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from typing import Any

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.worker.state import commit_buffer
from raylaunch.worker.state.buffer_client import BufferClient
from raylaunch.worker.state.commit_agreement import CopyRounds
from raylaunch.worker.state.commit_buffer import (
    BUFFERS,
    BUFFERS_WITH_COPIES,
    DURABLE_BUFFER,
    LIGHT_BUFFERS,
    CommitBuffer,
    CommitHeader,
    WriteState,
)
from raylaunch.worker.state.device_copies import DeviceCopies
from raylaunch.worker.state.shared_tensors import PartMemory
from raylaunch.worker.state.snapshots.snapshot import Snapshot

_FILES_FOR_COPIES = 4
"""Files of a node for each of its ranks, if there are copies: two more buffers, and two copies of another rank."""


class RankBuffers:
    """The buffers, which the node holds. Those that it does not have yet are made when they are needed.

    Two of them take turns. The commits of `copies` stay where they are, and then there are two more that do.
    """

    def __init__(
        self,
        client: BufferClient,
        rank: int,
        sharers: range,
        *,
        spared: Commit | None,
        copies: CopyRounds,
        is_durable: bool = False,
    ) -> None:
        """`sharers`: the ranks of this node. `spared`: the commit to restore, whose buffer is not overwritten first.

        `is_durable`: whether there are commits that are also written to disk.

        Raises OSError where the agent cannot be reached.
        """
        self._client = client
        self._rank = rank
        self._sharers = sharers
        self._copies = copies
        self._required = range(BUFFERS if is_durable else DURABLE_BUFFER)
        self._buffers = [client.buffer(index) for index in range(BUFFERS_WITH_COPIES)]
        #: Those for light commits that were needed in this attempt, by index.
        self._light: dict[int, CommitBuffer] = {}
        #: The last commit that all ranks have when the next one is begun, and the one before it.
        self._newest = self._before = spared
        #: Index of the buffer of the commit that is being made.
        self._target = 0

    def light(self, index: int, found: Snapshot) -> CommitBuffer:
        """Return one of the two buffers for light commits, large enough for what is the rank's own in a snapshot.

        Raises MemoryError where the node does not have so much memory.
        """
        index = LIGHT_BUFFERS[index % len(LIGHT_BUFFERS)]
        buffer = self._light.get(index) or self._client.buffer(index)
        size = commit_buffer.share_start(found.tensor_bytes, len(found.pickled))
        if buffer is None or buffer.size < size:
            size = commit_buffer.bytes_needed(found.tensor_bytes, len(found.pickled))
            buffer = self._client.buffer(index, commit_buffer.page_aligned(size))
        assert buffer is not None
        self._light[index] = buffer
        return buffer

    @property
    def is_written(self) -> bool:
        """Whether nothing is to be written to disk any more, so that the buffer for that can be used again."""
        header = self._durable_header
        return header is None or header.write_state is not WriteState.TO_WRITE

    @property
    def _durable_header(self) -> CommitHeader | None:
        """The header of the buffer for the disk; None: there is none, or not yet."""
        buffer = self._buffers[DURABLE_BUFFER] if DURABLE_BUFFER in self._required else None
        return buffer.header if buffer is not None else None

    def failed_write(self) -> str:
        """Return why the last commit for the disk could not be written, for a person; "": it could, or is not yet."""
        header = self._durable_header
        return header.outcome if header is not None and header.write_state is WriteState.FAILED else ""

    def write(self, found: Snapshot, *, to_disk: bool, moves: Iterable[tuple[Any, Any]] = ()) -> DeviceCopies:
        """Write a snapshot into the next buffer; tensors on devices are still being copied when this returns.

        `moves`: what else is copied with them, as in `DeviceCopies`.

        Raises MemoryError, before anything is overwritten, where the node does not have so much memory.
        """
        buffer = self._large_enough(found, to_disk=to_disk)
        buffer.header.unseal()
        buffer.write_pickle(found.pickled, tensors=found.tensor_bytes)
        on_device = [*moves]
        if found.tensors or found.shared:
            memory, start = PartMemory(buffer), commit_buffer.share_start(found.tensor_bytes, len(found.pickled))
            with sys.modules["torch"].no_grad():
                for target, source in chain(
                    memory.pairs(found.tensors), memory.share_pairs(start, self._share(found), found.shared)
                ):
                    if source.is_cpu:
                        target.copy_(source)
                    else:
                        on_device.append((target, source))
                return DeviceCopies(buffer, on_device)
        return DeviceCopies(buffer, ())

    def _share(self, found: Snapshot) -> range:
        """Return which bytes of the shared tensors this rank copies."""
        return commit_buffer.share_of(found.shared_bytes, self._sharers.index(self._rank), len(self._sharers))

    def _large_enough(self, found: Snapshot, *, to_disk: bool) -> CommitBuffer:
        """Choose the next buffer. Those that are required are made at once, to notice too little memory at first."""
        for index in self._required:
            if self._buffers[index] is None:
                self._make(index, found)
        self._target = DURABLE_BUFFER if to_disk else self._choose()
        if self._target not in self._required:
            try:
                return self._make(self._target, found)
            except MemoryError as error:
                self._copies.give_up()
                self._client.say(f"there is no copy of the state on another host: {error}")
                self._target = self._choose()
        return self._make(self._target, found)

    def _choose(self) -> int:
        """Return the index of a buffer that has no commit that is still needed, of one that exists if possible."""
        needed = {self._newest, self._copies.kept, self._copies.copying} - {None}
        free = []
        for index, buffer in enumerate(self._buffers):
            held = buffer.header.held() if buffer is not None else None
            if index != DURABLE_BUFFER and (held is None or held.commit not in needed):
                free.append((buffer is None, index))
        return min(free)[1]

    def _make(self, index: int, found: Snapshot) -> CommitBuffer:
        """Return a buffer that is large enough."""
        buffer = self._buffers[index]
        share = len(self._share(found))
        if buffer is None or buffer.size < commit_buffer.share_start(found.tensor_bytes, len(found.pickled)) + share:
            size = commit_buffer.page_aligned(commit_buffer.bytes_needed(found.tensor_bytes, len(found.pickled), share))
            files = len(self._required) + (0 if index in self._required else _FILES_FOR_COPIES)
            buffer = self._client.buffer(index, size, node_bytes=files * len(self._sharers) * size)
            self._buffers[index] = buffer
        assert buffer is not None
        return buffer

    def seal(self, held: HeldCommit, found: Snapshot, token: int, interval: int) -> None:
        """Make what was written last count as this commit. If it is for the disk, the node writes it from now on.

        `interval`: after how many steps the next commit follows.
        """
        buffer = self._buffers[self._target]
        assert buffer is not None
        to_disk = self._target == DURABLE_BUFFER
        buffer.header.seal(
            held,
            tensors=found.tensor_bytes,
            pickled=len(found.pickled),
            token=token,
            write=WriteState.TO_WRITE if to_disk else WriteState.NONE,
            kept=self._copies.copying == held.commit,
            interval=interval,
            shared=found.shared_bytes,
        )
        self._before, self._newest = self._newest, held.commit
        if to_disk:
            self._client.buffer(DURABLE_BUFFER, write=True)

    def drop_newest(self) -> Commit | None:
        """Make the last commit count no more, and keep the one before it. Return the last one."""
        buffer = self._buffers[self._target]
        if buffer is not None:
            buffer.header.unseal()
        dropped, self._newest = self._newest, self._before
        return dropped
