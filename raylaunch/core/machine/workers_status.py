"""What a node says of its workers. It knows no events: fork servers import it, and start the sooner."""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.failures.failure import FailureRecord
from raylaunch.core.machine.measured import RestartTimings
from raylaunch.core.newtypes import NodeTime


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit(FailureRecord):
    """How a worker ended: as the fork server tells it, and then with all that the supervisor finds out.

    The status of a node has those that did not end well, and the driver makes a `Failure` of each. `pid` is 0 where
    there never was a process.
    """

    at: NodeTime
    """When it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStatus:
    """The workers of a node in its newest attempt. While an attempt lasts, nothing that was said is taken back."""

    attempt: int = 0
    """0: there was none yet."""
    pids: tuple[int, ...] | None = None
    """By local rank. None: they are not all started."""
    timings: RestartTimings | None = None
    stayed: int = 0
    """As in `WorkersStarted`."""
    can_stay: bool = False
    """A worker can stay when the next attempt begins."""
    failures: tuple[WorkerExit, ...] = ()
    """Workers that ended by themselves, and not well."""
    succeeded: bool = False
    """All workers have ended by themselves with exit code 0."""
    has_saved: bool = False
    """The workers have answered a request to save; `saved` says at which step."""
    saved: int | None = None
    """As in `WorkersCheckpointed`."""
    stopped: tuple[WorkerExit, ...] | None = None
    """No process of the attempt is left: the workers that failed after they were told to end. None: some may be."""

    @property
    def are_gone(self) -> bool:
        """Whether all workers have ended, and none of them will write anything more."""
        return self.succeeded or self.stopped is not None
