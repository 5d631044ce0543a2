"""What the seats of a run have of this machine: a place each, and their share of its GPUs."""

from __future__ import annotations

from collections.abc import Mapping

from raylaunch.cluster import gpus
from raylaunch.cluster.gpus import Gpus
from raylaunch.core.layout import Bundle


class Room:
    """CPUs are not counted: workers may share them."""

    def __init__(self, found: Gpus) -> None:
        self._gpus = found
        self._asked: dict[int, Bundle] = {}
        self._held: dict[int, tuple[str, ...]] = {}

    def ask(self, seat: int, bundle: Bundle) -> None:
        """A seat is wanted."""
        self._asked[seat] = bundle

    def grant(self) -> list[int]:
        """Those asked for that there is room for."""
        granted = []
        for seat, bundle in list(self._asked.items()):
            taken = {one for held in self._held.values() for one in held}
            free = [one for one in self._gpus.ids if one not in taken]
            if bundle.gpus <= len(free):
                del self._asked[seat]
                self._held[seat] = tuple(free[: int(bundle.gpus)])
                granted.append(seat)
        return granted

    def holds(self, seat: int) -> bool:
        """Whether it was granted."""
        return seat in self._held

    def give_back(self, seat: int) -> None:
        """It is not wanted any more."""
        self._asked.pop(seat, None)
        self._held.pop(seat, None)

    def environ(self, seat: int) -> Mapping[str, str]:
        """What an agent there is to find in its environment: which GPUs are its own."""
        return gpus.share(self._gpus, self._held[seat])
