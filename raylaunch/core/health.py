"""What is on record: hosts that fail again and again are left out, scripts that crash in a loop are slowed down."""

from __future__ import annotations

from raylaunch.core.failure import Failure

FIRST_COOLING = 60.0
LONGEST_COOLING = 3600.0
"""Seconds for which a host is left out: the first time, doubled each further time, and at most."""
FAILURE_WINDOW = 3600.0
"""Seconds after which a failure of a host is forgotten."""
NEEDED_COOLING = 15.0
"""Seconds that another node has to come in place of one without which there are too few."""

QUICK_END = 10.0
"""Seconds: an attempt that failed sooner, without a step, is one of a crash loop."""
_FREE_CRASHES = 2
_LONGEST_DELAY = 60.0

_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def came_from_outside(failure: Failure) -> bool:
    """Whether somebody ended the worker, as a machine that goes down does; not the kernel for want of memory."""
    return failure.signal in _FROM_OUTSIDE and not failure.evidence and not failure.hung


class Health:
    """Failures by host, of the last hour and since it was last left out."""

    def __init__(self, exclude_after: int, *, needed_cooling: float = NEEDED_COOLING) -> None:
        self._limit = exclude_after
        self._needed_cooling = needed_cooling
        #: When they were, and of which kind.
        self._failures: dict[str, list[tuple[float, str]]] = {}
        #: When a kind of failure was last seen on which hosts: what fails everywhere is no host's fault.
        self._seen: dict[str, dict[str, float]] = {}
        self._times_excluded: dict[str, int] = {}
        self._until: dict[str, float] = {}

    def blame(self, host: str, now: float, kind: str = "") -> bool:
        """One more failure; whether that is one too many. `kind` as in `Failure`; none: it is the host's own."""
        if not host:
            return False
        if kind:
            others = {other: at for other, at in self._seen.get(kind, {}).items() if now - at < FAILURE_WINDOW}
            self._seen[kind] = others | {host: now}
        recent = [(at, what) for at, what in self._failures.get(host, ()) if now - at < FAILURE_WINDOW]
        self._failures[host] = [*recent, (now, kind)]
        return self._is_own(kind) and self._is_bad(host)

    def _is_own(self, kind: str) -> bool:
        return not kind or len(self._seen[kind]) == 1

    def _is_bad(self, host: str) -> bool:
        return 0 < self._limit <= sum(self._is_own(kind) for _, kind in self._failures[host])

    @property
    def doubtful(self) -> frozenset[str]:
        """Hosts that have failed as often as a host may: the last to be chosen."""
        return frozenset(host for host in self._failures if self._is_bad(host))

    def exclude(self, host: str, now: float, *, needed: bool) -> float:
        """Leave it out; for how many seconds. `needed`: there are too few nodes without it."""
        times = self._times_excluded[host] = self._times_excluded.get(host, 0) + 1
        cooling = self._needed_cooling if needed else min(FIRST_COOLING * 2 ** (times - 1), LONGEST_COOLING)
        self._until[host] = now + cooling
        self._failures.pop(host, None)
        return cooling

    def hurry(self, now: float) -> None:
        """There are too few nodes: nobody is left out any longer than one that is needed."""
        latest = now + self._needed_cooling
        self._until = {host: min(until, latest) for host, until in self._until.items()}

    def cooled(self, now: float) -> list[str]:
        """Hosts whose time is over; they count as admitted from here on."""
        found = [host for host, until in self._until.items() if until <= now]
        for host in found:
            del self._until[host]
        return found

    @property
    def excluded(self) -> tuple[str, ...]:
        """Hosts that are left out at present."""
        return tuple(self._until)

    @property
    def next_cooled(self) -> float | None:
        """When the next host may come back."""
        return min(self._until.values(), default=None)


class CrashLoop:
    """How often in a row the script failed by itself, soon and without a step."""

    def __init__(self) -> None:
        self._count = 0

    def progressed(self) -> None:
        """The workers made a step."""
        self._count = 0

    def delay(self, cause: Failure, seconds: float) -> float:
        """How long to wait before the next attempt; `seconds` is how long this one lasted.

        A worker that was killed from outside says nothing of the script.
        """
        if seconds >= QUICK_END or came_from_outside(cause) or cause.is_collateral:
            self._count = 0
            return 0.0
        self._count += 1
        beyond = self._count - _FREE_CRASHES - 1
        return min(2.0**beyond, _LONGEST_DELAY) if beyond >= 0 else 0.0
