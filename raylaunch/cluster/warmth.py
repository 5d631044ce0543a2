"""How a run has agents that rested after the last one, and puts its own to rest.

Such agents sit beside the bundle that was granted on their host, not in it: what is in it ends with it.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylaunch.cluster import warm
from raylaunch.cluster.actor import Rested, dismiss
from raylaunch.cluster.agent import AgentSettings
from raylaunch.cluster.deeds import Man
from raylaunch.cluster.warm import Pool, Rester
from raylaunch.core.layout import Bundle

_WAKE_SECONDS = 10.0
_REST_SECONDS = 7.0
_MORE_SECONDS = 30.0
"""What an agent waits longer by itself than this process has it wait."""

Options = Mapping[str, Any]
Start = Callable[[Man, AgentSettings, Options], None]


@dataclass(frozen=True, slots=True)
class _Place:
    deed: Man
    told: AgentSettings
    host: str
    address: str


@dataclass(frozen=True, slots=True)
class _Waking:
    place: _Place
    actor: Any
    until: float


class Warmth:
    """All calls but `rest` come from the fleet's own thread."""

    def __init__(
        self,
        pool: Pool,
        inside: Callable[[int, Bundle], Options],
        start: Start,
        take: Callable[[str, Any], None],
        later: queue.SimpleQueue[Any],
    ) -> None:
        """`inside` gives the options for an agent in its bundle; `start` starts one with such options.

        `take` takes one that is there already, under its new name; `later`: where calls are put for the fleet's thread.
        """
        self._pool = pool
        self._inside = inside
        self._start = start
        self._take = take
        self._later = later
        #: Agents that start when it is known where: by seat.
        self._unplaced: dict[int, tuple[Man, AgentSettings]] = {}
        self._waking: dict[str, _Waking] = {}
        #: By node, those beside their bundles.
        self._beside: dict[str, _Place] = {}

    def wants(self, deed: Man, told: AgentSettings) -> None:
        """An agent is to start at a seat that is not granted yet."""
        self._unplaced[deed.seat] = (deed, told)

    def granted(self, hosts: Mapping[int, str], address: Callable[[str], str]) -> None:
        """Where seats are. `address` gives that of a host."""
        for seat, host in hosts.items():
            deed, told = self._unplaced.pop(seat, (None, None))
            if deed is None or told is None:
                continue
            if host:
                self._settle(_Place(deed, told, host, address(host)))
            else:  # Ray has taken it elsewhere, and will know where
                self._start(deed, told, self._inside(seat, deed.bundle))

    def _settle(self, place: _Place) -> None:
        node = place.deed.node
        self._beside[node] = place
        actor = self._pool.take(place.host, warm.key(place.told))
        if actor is None:
            self._start_fresh(place)
            return
        self._waking[node] = _Waking(place, actor, time.monotonic() + _WAKE_SECONDS)
        answer = actor.take_up.remote(place.told).future()
        answer.add_done_callback(lambda future: self._later.put(partial(self._answered, node, future)))

    def _start_fresh(self, place: _Place) -> None:
        there = NodeAffinitySchedulingStrategy(place.host, soft=False)
        self._start(place.deed, place.told, {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": there})

    def _answered(self, node: str, future: Any) -> None:
        waking = self._waking.pop(node, None)
        if waking is None:
            return
        if future.exception() is None and future.result():
            self._take(node, waking.actor)
        else:
            self._give_up(waking)

    def look(self, now: float) -> None:
        """Start others in the place of those who do not answer."""
        for node, waking in list(self._waking.items()):
            if waking.until <= now:
                del self._waking[node]
                self._give_up(waking)

    def _give_up(self, waking: _Waking) -> None:
        dismiss([waking.actor])
        self._start_fresh(waking.place)

    def close(self) -> None:
        """Nobody waits for those who have not answered yet."""
        dismiss([waking.actor for waking in self._waking.values()])
        self._waking.clear()

    def ended(self, node: str) -> None:
        """The node is not wanted any more."""
        self._unplaced = {seat: wanted for seat, wanted in self._unplaced.items() if wanted[0].node != node}
        self._beside.pop(node, None)
        waking = self._waking.pop(node, None)
        if waking is not None:
            dismiss([waking.actor])

    def can_rest(self, node: str) -> bool:
        """Whether it sits beside its bundle."""
        return node in self._beside

    def rest(self, actors: Mapping[str, Any], seconds: float) -> None:
        """The run is over; put these to rest, for so many seconds. Whoever cannot be is ended."""
        places = {node: self._beside[node] for node in actors}
        names = dict(zip(places, self._pool.names(len(places)), strict=True))
        anchors = {node: self._pool.anchor(place.told.anchor) for node, place in places.items()}
        asked = {node: actors[node].rest.remote(names[node], anchors[node], seconds + _MORE_SECONDS) for node in places}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=_REST_SECONDS)
        found = {node: rested for node, ref in asked.items() if (rested := _answer(ref)) is not None}
        dismiss([actor for node, actor in actors.items() if node not in found])
        self._pool.put(
            [
                Rester(
                    name=names[node],
                    agent=actors[node],
                    key=warm.key(places[node].told),
                    host=places[node].host,
                    nproc=places[node].told.nproc,
                    address=places[node].address,
                    pid=rested.pid,
                    memory=rested.memory,
                )
                for node, rested in found.items()
            ],
            seconds,
        )


def _answer(ref: Any) -> Rested | None:
    """None: it has none in time."""
    try:
        rested: Rested | None = ray.get(ref, timeout=0)
    except RayError:
        return None
    return rested
