"""The present attempt on a node, as its supervisor knows it."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field

from raylaunch.core.failure import Failure
from raylaunch.core.ranks import Assignment
from raylaunch.node import messages


@dataclass(slots=True)
class Present:
    """`ends` holds all and only the ranks whose processes are gone."""

    part: Assignment
    pids: tuple[int, ...] = ()
    """By local rank, once they are started."""
    ends: dict[int, int] = field(default_factory=dict)
    late: list[Failure] = field(default_factory=list)
    values: dict[int, bytes] = field(default_factory=dict)
    finished: bool = False
    shown: set[int] = field(default_factory=set)
    """Ranks that have ended, and whose last marks were told."""

    @property
    def attempt(self) -> int:
        return self.part.attempt

    def died_with_server(self, *, stopped: bool) -> list[messages.Exited]:
        """The words that a fork server was to say of its workers, had it not died before them."""
        return [
            messages.Exited(
                attempt=self.attempt,
                rank=rank,
                local_rank=local_rank,
                pid=self.pids[local_rank] if local_rank < len(self.pids) else 0,
                exit_code=-signal.SIGKILL,
                stopped=stopped,
                at=time.monotonic(),
            )
            for local_rank, rank in enumerate(self.part.ranks)
            if rank not in self.ends
        ]

    def live(self) -> list[tuple[int, int, int]]:
        """Local rank, rank and process id of each worker that was started and has not ended."""
        return [worker for worker in self.started() if worker[1] not in self.ends]

    def started(self) -> list[tuple[int, int, int]]:
        """The same of all that were."""
        return [*zip(range(len(self.pids)), self.part.ranks, self.pids, strict=False)]
