"""Slots on this machine: which are granted, and which GPUs each has."""

from __future__ import annotations

import math
from collections.abc import Mapping

from raylaunch.cluster.local import gpus
from raylaunch.cluster.local.gpus import Gpus
from raylaunch.core.placement.plan import Bundle

_ROUNDING = 1e-6


class LocalSlots:
    """Grants slots as long as there are GPUs for them. CPUs are not counted, since workers may share them."""

    def __init__(self, found: Gpus) -> None:
        self._gpus = found
        self._pending: dict[int, Bundle] = {}
        #: By granted slot: the ids of its GPUs, and which part of each it may use.
        self._granted: dict[int, tuple[tuple[str, ...], float]] = {}

    def request(self, slot: int, bundle: Bundle) -> None:
        """Request a slot; `grant` grants it."""
        self._pending[slot] = bundle

    def grant(self) -> list[int]:
        """Grant what can be granted now; return those slots."""
        slots = []
        for slot, bundle in list(self._pending.items()):
            part, wanted = min(bundle.gpus, 1.0), math.ceil(bundle.gpus)
            free = [gpu for gpu in self._gpus.ids if self._taken(gpu) + part <= 1 + _ROUNDING]
            if wanted <= len(free):
                free.sort(key=self._taken, reverse=True)  # parts go where others are, so that whole GPUs stay free
                del self._pending[slot]
                self._granted[slot] = tuple(free[:wanted]), part
                slots.append(slot)
        return slots

    def _taken(self, gpu: str) -> float:
        return sum(part for gpus_of_slot, part in self._granted.values() if gpu in gpus_of_slot)

    def is_granted(self, slot: int) -> bool:
        """Return whether the slot is granted."""
        return slot in self._granted

    def release(self, slot: int) -> None:
        """Release a slot, granted or pending. Its GPUs are free again."""
        self._pending.pop(slot, None)
        self._granted.pop(slot, None)

    def environ(self, slot: int) -> Mapping[str, str]:
        """Return the environment variables by which the slot's agent finds its GPUs."""
        return gpus.share(self._gpus, self._granted[slot][0])
