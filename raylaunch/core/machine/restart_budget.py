"""The restart budget: failures of workers spend restarts, and get them back if a lost node explains the failure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from raylaunch.core.failures.failure import Failure, why_hopeless
from raylaunch.core.machine.host_health import came_from_outside
from raylaunch.core.placement.ranks import Member

PARDON_SECONDS = 30.0
"""The loss of a node within so many seconds after a failure explains the failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Charge:
    """A failure, the nodes of the attempt that it ended, and whether it spent a restart."""

    at: float
    cause: Failure
    nodes: Collection[str]
    spent: bool

    def is_explained_by(self, lost: Member, now: float) -> bool:
        if now - self.at > PARDON_SECONDS or lost.node not in self.nodes:
            return False
        return self.cause.is_collateral or (self.cause.node == lost.node and came_from_outside(self.cause))


class RestartBudget:
    """The restarts of one run: at most `max_restarts` (torchrun)."""

    def __init__(self, max_restarts: int) -> None:
        self._all = max_restarts
        self.spent = 0
        self._charges: list[_Charge] = []

    def spend(self, cause: Failure, now: float, nodes: Collection[str], *, elsewhere: bool = False) -> str:
        """Spend a restart on this failure of an attempt on these nodes. Return "", or why there is none.

        `elsewhere`: the next attempt excludes the host, so repeated failures there do not count.
        """
        earlier = () if elsewhere else [(charge.at, charge.cause.signature) for charge in self._charges]
        refused = why_hopeless(cause, earlier, now)
        if not refused and self.spent >= self._all:
            refused = self._all_spent(cause, nodes)
        self._charges.append(_Charge(at=now, cause=cause, nodes=nodes, spent=not refused))
        self.spent += not refused
        return refused

    def _all_spent(self, cause: Failure, nodes: Collection[str]) -> str:
        if self._all == 0:
            return "no restarts were allowed"
        if self._all == 1:
            return "the only restart is used"
        causes = [*(charge.cause for charge in self._charges), cause]
        own = len(nodes) > 1 and not any(each.is_collateral for each in causes)
        where = f", and all failures were on {cause.node}" if own and len({each.node for each in causes}) == 1 else ""
        return f"all {self._all} restarts are used{where}"

    def pardon(self, lost: Member, now: float) -> bool:
        """Give back the restarts of failures that the loss of a node explains. Return whether there were any."""
        explained = [charge for charge in self._charges if charge.is_explained_by(lost, now)]
        self._charges = [charge for charge in self._charges if charge not in explained]
        self.spent -= sum(charge.spent for charge in explained)
        return bool(explained)

    def __str__(self) -> str:
        return f"restart {self.spent} of {self._all}"
