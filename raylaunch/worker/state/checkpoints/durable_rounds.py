"""When a commit is also written to disk, and what rank 0 prints about it."""

from __future__ import annotations

import secrets
import sys

from raylaunch.core.text import count
from raylaunch.worker.state.checkpoints.durable_folder import DurableFolder
from raylaunch.worker.state.commit_agreement import CommitAgreement
from raylaunch.worker.state.rank_buffers import RankBuffers

_LATE_SECONDS = 60.0
"""How long writing may take, in seconds, before a message says so."""


class DurableRounds:
    """Decides for one rank, in one attempt, which commits go to disk. Times are in seconds."""

    def __init__(self, folder: DurableFolder, rank: int, local_rank: int, now: float) -> None:
        self._folder = folder
        self._rank = rank
        self._local_rank = local_rank
        self._token = 0
        self._began_at = now
        self._was_last = False
        self._told = ""
        self._told_late = False

    def token(self, agreement: CommitAgreement) -> int:
        """Return a random number that is the same on all ranks: see `CommitHeader.token`."""
        if not self._token:
            self._token = int(agreement.agree("token", lambda: str(secrets.randbits(62))))
        return self._token

    def began(self, now: float, *, to_disk: bool) -> None:
        """Note that a commit is made, and whether it is for the disk."""
        self._was_last = to_disk
        if to_disk:
            self._began_at, self._told_late = now, False

    def is_due(self, buffers: RankBuffers, now: float) -> bool:
        """Return whether rank 0 proposes to write the next commit. The last one must not be the one that is written."""
        is_time = now - self._began_at >= self._folder.every
        return self._rank == 0 and is_time and buffers.is_written and not self._was_last

    def tell(self, buffers: RankBuffers, now: float) -> None:
        """Say, once for each node, that a commit could not be written; on rank 0 also that it is late."""
        failed = buffers.failed_write() if self._local_rank == 0 else ""
        if failed and failed != self._told:
            self._told = failed
            print(f"raylaunch: {failed}; training goes on", file=sys.stderr, flush=True)
        seconds = now - self._began_at
        if self._rank == 0 and not buffers.is_written and seconds > _LATE_SECONDS and not self._told_late:
            self._told_late = True
            print(
                f"raylaunch: writing a checkpoint to {self._folder.path} takes longer than "
                f"{count(round(seconds), 'second')}; no other one is begun before its end, and training goes on",
                file=sys.stderr,
                flush=True,
            )
