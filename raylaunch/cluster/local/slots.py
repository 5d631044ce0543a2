"""Slots on this machine: which are granted, and which GPUs each has."""

from __future__ import annotations

from collections.abc import Mapping

from raylaunch.cluster.local import gpus
from raylaunch.cluster.local.gpus import Gpus
from raylaunch.core.placement.packing import Bundle


class LocalSlots:
    """Grants slots as long as there are GPUs for them. CPUs are not counted, since workers may share them."""

    def __init__(self, found: Gpus) -> None:
        self._gpus = found
        self._pending: dict[int, Bundle] = {}
        #: By granted slot: the ids of its GPUs.
        self._granted: dict[int, tuple[str, ...]] = {}

    def request(self, slot: int, bundle: Bundle) -> None:
        """Request a slot; `grant` grants it."""
        self._pending[slot] = bundle

    def grant(self) -> list[int]:
        """Grant what can be granted now; return those slots."""
        slots = []
        for slot, bundle in list(self._pending.items()):
            taken = {gpu for gpus_of_slot in self._granted.values() for gpu in gpus_of_slot}
            free = [gpu for gpu in self._gpus.ids if gpu not in taken]
            if bundle.gpus <= len(free):
                del self._pending[slot]
                self._granted[slot] = tuple(free[: int(bundle.gpus)])
                slots.append(slot)
        return slots

    def is_granted(self, slot: int) -> bool:
        """Return whether the slot is granted."""
        return slot in self._granted

    def release(self, slot: int) -> None:
        """Release a slot, granted or pending. Its GPUs are free again."""
        self._pending.pop(slot, None)
        self._granted.pop(slot, None)

    def environ(self, slot: int) -> Mapping[str, str]:
        """Return the environment variables by which the slot's agent finds its GPUs."""
        return gpus.share(self._gpus, self._granted[slot])
