"""Snapshots of the same objects after each step: what is as it was in the last one is not pickled again.

Pickling takes most of the time of a snapshot whose tensors are not copied, and finds the same again and again: of the
state of a model or an optimizer, nothing but the contents of its tensors changes in most steps.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from raylaunch.worker.state.shared_tensors import IsShared
from raylaunch.worker.state.snapshots import snapshot
from raylaunch.worker.state.snapshots.snapshot import Snapshot

_ATOMS = frozenset({bool, bytes, int, str, type(None)})
_METADATA = {"_metadata"}
"""The attribute of the state of a module, which has the versions of its submodules' classes."""

_Outline = list[Any]


class SnapshotCache:
    """Takes snapshots, and remembers the last one."""

    def __init__(self, of_world: Collection[str], shared: Mapping[str, IsShared]) -> None:
        """Take the same as `Snapshot`. It must hold as long as no tensor is at another address."""
        self._of_world = of_world
        self._shared = shared
        self._last: Snapshot | None = None
        #: The items of the last snapshot that are known well enough to be compared.
        self._outlines: dict[str, _Outline] = {}

    def take(self, items: dict[str, Any]) -> Snapshot:
        """Return a snapshot of these items. Raises what `Snapshot` does."""
        outlines = {name: outline for name, item in items.items() if (outline := _outline(item)) is not None}
        same = {name for name, outline in outlines.items() if outline == self._outlines.get(name)}
        known = {name: part for name, part in self._last.parts.items() if name in same} if self._last else {}
        if self._last is None or [*items] != [*self._last.parts] or len(known) < len(items):
            self._last = Snapshot(items, self._of_world, self._shared, known)
        self._outlines = outlines
        return self._last


def _outline(item: Any) -> _Outline | None:
    """Return what is equal for two objects only if their pickles are equal, but for the contents of tensors.

    None: there is something in it of which that is not known.
    """
    found: _Outline = []
    return found if _add((item,), found, sys.modules.get("torch")) else None


def _add(several: Iterable[Any], found: _Outline, torch: Any) -> bool:
    """Add the outlines of several objects. Return False if one is not known."""
    for one in several:
        kind = type(one)
        if kind in _ATOMS:
            found += (kind, one)
        elif kind is float:
            found.append(one.hex())  # 0.0 and -0.0 are equal
        elif torch is not None and kind is torch.Tensor and snapshot.is_raw(torch, one):
            found += (one.data_ptr(), one.dtype, one.shape, one.stride(), one.is_cpu)
        elif kind is list or kind is tuple:
            found += (kind, len(one))
            if not _add(one, found, torch):
                return False
        elif kind is dict or (kind is OrderedDict and vars(one).keys() <= _METADATA):
            found += (kind, len(one))
            if not (_add(one, found, torch) and _add(one.values(), found, torch)):
                return False
        else:
            return False
    return True
