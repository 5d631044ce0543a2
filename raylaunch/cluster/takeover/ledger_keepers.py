"""The keepers of the ledger of a detached run: a few agents, or an interim keeper while there are none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import ray

from raylaunch.cluster.fleet.ray_fleet import RayFleet
from raylaunch.cluster.succession import interim_keeper
from raylaunch.cluster.succession.agent_session import DetachedSettings
from raylaunch.cluster.succession.interim_keeper import InterimState
from raylaunch.core.newtypes import NodeId

_MOST_KEEPERS = 3
"""This number of agents keep the ledger: the first that are up, each on another host if possible."""


class LedgerKeepers:
    """Sends the orders of a batch, with the ledger that follows from it."""

    def __init__(self, fleet: RayFleet, settings: DetachedSettings, epoch: int) -> None:
        """`epoch`: the driver's epoch."""
        self.fleet = fleet
        self._settings = settings
        self._epoch = epoch
        #: The generation of the last ledger that the interim keeper has; None: it has ended.
        self._interim: int | None = 0
        self._has_other_hosts = sum(node["Alive"] for node in ray.nodes()) > 1

    def flush(self, ledger: bytes) -> None:
        """Send the orders that wait. First those to the agents that also get the ledger, which is about them.

        `ledger`: empty if orders must not wait for it.
        """
        keepers = self._keepers() if ledger else []
        generation = self.fleet.agents.flush(keepers, ledger)
        if ledger and self._needs_interim(keepers):
            self._interim = generation
            found = InterimState(kept=(self._epoch, generation), ledger=ledger)
            keep = partial(interim_keeper.keep, self._settings.token, self._settings.driver_timeout, found)
            self.fleet.to_do.put(keep)

    def _keepers(self) -> list[NodeId]:
        here = self.fleet.here
        with self.fleet.slots() as slots:
            hosts = {node: slots.host_of(node) for node in self.fleet.agents.obeying if slots.is_up(node)}
        by_host = {host: node for node, host in reversed(hosts.items())}
        first = [node for host, node in by_host.items() if host != here]
        others = [node for node in hosts if node not in first]
        return [*first, *others][:_MOST_KEEPERS]

    def _needs_interim(self, keepers: Sequence[NodeId]) -> bool:
        """Return whether no agent keeps the ledger, or none that would outlive the host of this process."""
        with self.fleet.slots() as slots:
            return not any(not self._has_other_hosts or slots.host_of(node) != self.fleet.here for node in keepers)

    def reported(self, node: NodeId, generation: int) -> None:
        """Learn that an agent has the ledger of this generation. 0: none of this driver."""
        if self._interim is not None and generation > self._interim and not self._needs_interim([node]):
            self._interim = None
            self.fleet.to_do.put(partial(interim_keeper.end, self._settings.token))
