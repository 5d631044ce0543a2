"""The two buffers of this rank: which one holds what, and which one the next commit is written to."""

from __future__ import annotations

import sys

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.worker.state import buffer_client, commit_buffer, snapshot
from raylaunch.worker.state.buffer_client import Request
from raylaunch.worker.state.commit_buffer import BUFFERS, CommitBuffer
from raylaunch.worker.state.cuda_copies import CudaCopies
from raylaunch.worker.state.snapshot import Snapshot


class RankBuffers:
    """Both buffers, which the node holds. Those that it does not have yet are made for the first commit."""

    def __init__(self, attempt: int, rank: int, workers: int, *, spared: Commit | None) -> None:
        """`workers`: those of this node. `spared`: the commit to restore, whose buffer is not the first overwritten.

        Raises OSError where the agent cannot be reached.
        """
        self._attempt = attempt
        self._rank = rank
        self._workers = workers
        self._notes: set[str] = set()
        self._buffers = [self._get(index) for index in range(BUFFERS)]
        found = [buffer.header.held() if buffer is not None else None for buffer in self._buffers]
        commits = [held.commit if held is not None else None for held in found]
        #: Index of the buffer that the next commit overwrites.
        self._next = commits.index(spared) ^ 1 if spared in commits and spared is not None else 0

    def _get(self, index: int, size: int = 0) -> CommitBuffer | None:
        fd, note = buffer_client.ask(
            Request(
                attempt=self._attempt,
                rank=self._rank,
                index=index,
                bytes=size,
                node_bytes=BUFFERS * self._workers * size,
            )
        )
        if note and note not in self._notes:
            self._notes.add(note)
            print(f"raylaunch: {note}", file=sys.stderr, flush=True)
        return CommitBuffer(fd) if fd is not None else None

    def holding(self, commit: Commit) -> CommitBuffer | None:
        """Return the buffer that has this commit."""
        for buffer in self._buffers:
            held = buffer.header.held() if buffer is not None else None
            if held is not None and held.commit == commit:
                return buffer
        return None

    def write(self, found: Snapshot) -> CudaCopies:
        """Write a snapshot into the next buffer; CUDA tensors are still being copied when this returns.

        Raises MemoryError, before anything is overwritten, where the node does not have so much memory.
        """
        buffer = self._large_enough(commit_buffer.bytes_needed(found.tensor_bytes, len(found.pickled)), found)
        buffer.header.unseal()
        buffer.write_pickle(found.pickled, tensors=found.tensor_bytes)
        on_device = []
        if found.tensors:
            with sys.modules["torch"].no_grad():
                for target, source in snapshot.views(buffer, found.tensors):
                    if source.is_cuda:
                        on_device.append((target, source))
                    else:
                        target.copy_(source)
                return CudaCopies(buffer, on_device)
        return CudaCopies(buffer, ())

    def _large_enough(self, size: int, found: Snapshot) -> CommitBuffer:
        """Return the next buffer. Both are made at once, so that too little memory is noticed at the first commit."""
        needed = commit_buffer.HEADER_BYTES + found.tensor_bytes + len(found.pickled)
        for index in (self._next, self._next ^ 1):
            there = self._buffers[index]
            if there is None or (index == self._next and there.size < needed):
                self._buffers[index] = self._get(index, commit_buffer.page_aligned(size))
        buffer = self._buffers[self._next]
        assert buffer is not None
        return buffer

    def seal(self, held: HeldCommit, found: Snapshot) -> None:
        """Make what was written last count as this commit, and let the next one go into the other buffer."""
        buffer = self._buffers[self._next]
        assert buffer is not None
        buffer.header.seal(held, tensors=found.tensor_bytes, pickled=len(found.pickled))
        self._next ^= 1
