"""What failures cost: restarts, spent by failures of workers, and given back where a lost node explains them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from raylaunch.core.failure import Failure, why_hopeless
from raylaunch.core.health import came_from_outside
from raylaunch.core.ranks import Member

PARDON_SECONDS = 30.0
"""A node that is lost so soon after a failure explains it: what died there, and what its peers then said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """A failure that counts, who took part in the attempt that it ended, and whether it took a restart."""

    at: float
    cause: Failure
    nodes: Collection[str]
    spent: bool

    def is_explained_by(self, lost: Member, now: float) -> bool:
        if now - self.at > PARDON_SECONDS or lost.node not in self.nodes:
            return False
        return self.cause.is_collateral or (self.cause.node == lost.node and came_from_outside(self.cause))


class Budget:
    """The restarts of one run."""

    def __init__(self, max_restarts: int) -> None:
        self._all = max_restarts
        self.spent = 0
        self._costs: list[_Cost] = []

    def spend(self, cause: Failure, now: float, nodes: Collection[str], *, elsewhere: bool = False) -> str:
        """Take one restart for this failure of an attempt on these nodes. `""`, or why there is none.

        `elsewhere`: the next attempt leaves its host out, so that what always failed there may not fail again.
        """
        earlier = () if elsewhere else [(cost.at, cost.cause.signature) for cost in self._costs]
        refused = why_hopeless(cause, earlier, now)
        if not refused and self.spent >= self._all:
            refused = self._all_spent(cause, nodes)
        self._costs.append(_Cost(at=now, cause=cause, nodes=nodes, spent=not refused))
        self.spent += not refused
        return refused

    def _all_spent(self, cause: Failure, nodes: Collection[str]) -> str:
        if self._all == 0:
            return "no restarts were allowed"
        if self._all == 1:
            return "the only restart is used"
        causes = [*(cost.cause for cost in self._costs), cause]
        own = len(nodes) > 1 and not any(each.is_collateral for each in causes)
        where = f", and all failures were on {cause.node}" if own and len({each.node for each in causes}) == 1 else ""
        return f"all {self._all} restarts are used{where}"

    def pardon(self, lost: Member, now: float) -> bool:
        """A node was lost: whether that explains failures of late, which then cost nothing."""
        explained = [cost for cost in self._costs if cost.is_explained_by(lost, now)]
        self._costs = [cost for cost in self._costs if cost not in explained]
        self.spent -= sum(cost.spent for cost in explained)
        return bool(explained)

    def __str__(self) -> str:
        return f"restart {self.spent} of {self._all}"
