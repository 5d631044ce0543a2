"""What failures of workers cost: restarts of the budget, the exclusion of a host, a pause before the next attempt."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from raylaunch.core.failures.failure import SAME_FAILURE_WINDOW, Failure, why_hopeless
from raylaunch.core.newtypes import HostId, NodeId
from raylaunch.core.placement.environment import Member

PARDON_SECONDS = 30.0
"""A failure is explained by the loss of its node at most this many seconds later."""

FIRST_EXCLUSION = 60.0
MAX_EXCLUSION = 3600.0
"""Seconds for which a host is excluded: the first time, doubled each further time; and at most."""
FAILURE_WINDOW = 3600.0
"""Seconds after which the failure of a host does not count any more."""
NEEDED_EXCLUSION = 15.0
"""Seconds for which a host is excluded without which there are too few nodes: time for a replacement."""

QUICK_END = 10.0
"""An attempt that fails sooner than this, in seconds, and without a step, is part of a crash loop."""
_VAIN_RESTARTS = 3
"""Restarts that may bring no new saved step, one after the other."""
NO_RESTARTS = "no restarts were allowed"
"""Why a run ends with the first failure, if `max_restarts` is 0."""

_FREE_CRASHES = 2
_LONGEST_DELAY = 60.0

_SEVERAL = 2
_MOST_KINDS = 200
"""Kinds of failures that are remembered."""
_MOST_PER_HOST = 200
"""Failures of one host that are remembered."""

_OUTSIDE_SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


def came_from_outside(failure: Failure) -> bool:
    """Whether somebody killed the worker, as a host that shuts down does. The OOM killer does not count."""
    return failure.signal in _OUTSIDE_SIGNALS and not failure.evidence and not failure.hung


@dataclass(frozen=True, slots=True, kw_only=True)
class _Charge:
    """A failure, as far as later decisions need it, and whether it spent a restart."""

    at: float
    node: NodeId
    signature: str
    is_collateral: bool
    came_from_outside: bool
    nodes: Collection[NodeId]
    """The nodes of the attempt that it ended."""
    saved: int | None
    """The last step that all workers had saved."""
    spent: bool

    def is_explained_by(self, lost: Member, now: float) -> bool:
        if now - self.at > PARDON_SECONDS or lost.node not in self.nodes:
            return False
        return self.is_collateral or (self.node == lost.node and self.came_from_outside)


class Refusal(NamedTuple):
    """Why no attempt follows a failure."""

    why: str
    is_pointless: bool
    """Whether a new run would fail in the same way; else only the budget of this one is spent."""


class RestartBudget:
    """The restarts of one run: at most `max_restarts` (torchrun), and none in vain."""

    def __init__(self, max_restarts: int) -> None:
        self._all = max_restarts
        self.spent = 0
        #: The last step that all workers have saved, and how many restarts have brought no later one.
        self._saved: int | None = None
        self._vain = 0
        #: The failures that may still matter one by one, the oldest first.
        self._charges: list[_Charge] = []
        #: Of the earlier charges: whether any was collateral, and on which nodes they were; two nodes stand for all.
        self._any_collateral = False
        self._nodes: set[NodeId] = set()

    def saved(self, step: int) -> None:
        """Note that all workers have saved this step. An earlier one than before: what came after it is lost."""
        if self._saved is None or step > self._saved:
            self._vain = 0
        self._saved = step

    def spend(
        self, cause: Failure, now: float, nodes: Collection[NodeId], *, elsewhere: bool = False
    ) -> Refusal | None:
        """Spend a restart on this failure of an attempt on these nodes. Return None, or why there is none.

        `elsewhere`: the next attempt excludes the host, so repeated failures there do not count.
        """
        self._sum_up(now)
        if self._saved is not None and cause.saved is not None:  # perhaps since the last heartbeat
            self.saved(cause.saved)
        # A failure that comes again after a later step was saved does not stop the run: it goes on from there.
        same_step = [charge for charge in self._charges if charge.saved == self._saved]
        earlier = () if elsewhere else [(charge.at, charge.signature) for charge in same_step]
        pointless = why_hopeless(cause, earlier, now) or self._why_vain(cause, elsewhere=elsewhere)
        refused = Refusal(pointless, is_pointless=True) if pointless else None
        if refused is None and self.spent >= self._all:
            refused = Refusal(self._all_spent(cause, nodes), is_pointless=False)
        if self._charges and self._charges[-1].nodes == nodes:
            nodes = self._charges[-1].nodes  # one set for all attempts on the same nodes
        charge = _Charge(
            at=now,
            node=cause.node,
            signature=cause.signature,
            is_collateral=cause.is_collateral,
            came_from_outside=came_from_outside(cause),
            nodes=nodes,
            saved=self._saved,
            spent=refused is None,
        )
        self._charges.append(charge)
        self.spent += charge.spent
        return refused

    def _why_vain(self, cause: Failure, *, elsewhere: bool) -> str:
        """Return why another restart would bring no new step, or "". Scripts in which not all save cannot be judged."""
        if self._saved is None or elsewhere or cause.is_collateral or came_from_outside(cause):
            return ""
        if self._vain == _VAIN_RESTARTS:
            return f"{_VAIN_RESTARTS} restarts have brought no saved step after step {self._saved}"
        self._vain += 1
        return ""

    def _sum_up(self, now: float) -> None:
        """Remember little of failures that are so old that no event concerns them any more."""
        recent = [charge for charge in self._charges if now - charge.at <= max(PARDON_SECONDS, SAME_FAILURE_WINDOW)]
        for charge in self._charges[: len(self._charges) - len(recent)]:
            self._any_collateral |= charge.is_collateral
            if len(self._nodes) < _SEVERAL:
                self._nodes.add(charge.node)
        self._charges = recent

    def _all_spent(self, cause: Failure, nodes: Collection[NodeId]) -> str:
        if self._all == 0:
            return NO_RESTARTS
        if self._all == 1:
            return "the only restart is used"
        any_collateral = self._any_collateral or cause.is_collateral or any(one.is_collateral for one in self._charges)
        failed_on = self._nodes | {cause.node} | {charge.node for charge in self._charges}
        is_one = len(nodes) > 1 and not any_collateral and len(failed_on) == 1
        return f"all {self._all} restarts are used{f', and all failures were on {cause.node}' if is_one else ''}"

    def pardon(self, lost: Member, now: float) -> bool:
        """Give back the restarts of failures that the loss of a node explains. Return whether there were any."""
        explained = [charge for charge in self._charges if charge.is_explained_by(lost, now)]
        self._charges = [charge for charge in self._charges if charge not in explained]
        self.spent -= sum(charge.spent for charge in explained)
        return bool(explained)

    def __str__(self) -> str:
        return f"restart {self.spent} of {self._all}"


class HostHealth:
    """The failures of each host since it was last excluded, and the hosts that may not be used now."""

    def __init__(self, exclude_after: int, *, needed_exclusion: float = NEEDED_EXCLUSION) -> None:
        self._limit = exclude_after
        self._needed_exclusion = needed_exclusion
        #: (time, kind) of failures by host.
        self._failures: dict[HostId, list[tuple[float, str]]] = {}
        #: By kind of failure and host, when it last occurred. A failure of several hosts is no host's fault.
        self._seen: dict[str, dict[HostId, float]] = {}
        self._times_excluded: dict[HostId, int] = {}
        self._until: dict[HostId, float] = {}
        self._addresses: dict[HostId, str] = {}
        #: Hosts that a person drained.
        self.drained: set[HostId] = set()

    def blame(self, host: HostId, now: float, kind: str = "") -> bool:
        """Count a failure; return whether the host has too many. `kind` is `Failure.kind`, "" for a lost node."""
        if not host or not self._limit:
            return False
        if kind:
            before = self._seen.pop(kind, {})
            others = {other: at for other, at in before.items() if now - at < FAILURE_WINDOW}
            self._seen[kind] = others | {host: now}  # at the end: the first kinds are the oldest
            if len(self._seen) > _MOST_KINDS:
                del self._seen[next(iter(self._seen))]
        recent = [(at, what) for at, what in self._failures.get(host, ()) if now - at < FAILURE_WINDOW]
        self._failures[host] = [*recent[1 - _MOST_PER_HOST :], (now, kind)]
        return self._is_own(kind) and self._is_bad(host)

    def _is_own(self, kind: str) -> bool:
        return not kind or len(self._seen.get(kind, (kind,))) == 1

    def _is_bad(self, host: HostId) -> bool:
        return 0 < self._limit <= sum(self._is_own(kind) for _, kind in self._failures[host])

    @property
    def doubtful(self) -> frozenset[HostId]:
        """Hosts that have too many failures and are not excluded: they are chosen last."""
        return frozenset(host for host in self._failures if self._is_bad(host))

    def exclude(self, host: HostId, now: float, *, address: str, needed: bool) -> float:
        """Exclude a host and return for how many seconds. `needed`: there are too few nodes without it."""
        self._addresses[host] = address
        times = self._times_excluded[host] = self._times_excluded.get(host, 0) + 1
        seconds = self._needed_exclusion if needed else min(FIRST_EXCLUSION * 2 ** (times - 1), MAX_EXCLUSION)
        self._until[host] = now + seconds
        self._failures.pop(host, None)
        return seconds

    def shorten_exclusions(self, now: float) -> None:
        """End exclusions sooner, because there are too few nodes."""
        latest = now + self._needed_exclusion
        self._until = {host: min(until, latest) for host, until in self._until.items()}

    def end_exclusions(self, now: float) -> dict[HostId, str]:
        """Return the hosts whose exclusion is over now, with their addresses. They are not excluded any more."""
        over = {host: self._addresses.pop(host) for host, until in self._until.items() if until <= now}
        for host in over:
            del self._until[host]
        return over

    @property
    def excluded(self) -> tuple[HostId, ...]:
        """The hosts that are excluded now."""
        return tuple(self._until)

    @property
    def next_end(self) -> float | None:
        """When the next exclusion ends; None without exclusions."""
        return min(self._until.values(), default=None)


class CrashLoopBackoff:
    """Delays restarts of a script that fails soon and without a step again and again, as Kubernetes does."""

    def __init__(self) -> None:
        self._count = 0

    def progressed(self) -> None:
        """Note that workers made a step: the next failure is not part of a crash loop."""
        self._count = 0

    def delay(self, cause: Failure, seconds: float) -> float:
        """Return how long to wait before the next attempt. `seconds` is how long the failed one lasted.

        A kill from outside and a collateral failure are not the script's fault.
        """
        if seconds >= QUICK_END or came_from_outside(cause) or cause.is_collateral:
            self._count = 0
            return 0.0
        self._count += 1
        beyond = self._count - _FREE_CRASHES - 1
        return min(2.0**beyond, _LONGEST_DELAY) if beyond >= 0 else 0.0
