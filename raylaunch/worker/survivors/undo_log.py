"""The undo log of optimizers' steps: tensors as they were before a step has changed them.

A rank may die between its optimizer's step and its commit, when others have begun the same step. Then the last commit
that all ranks have is the one before, and no rank has the tensors of that one any more, except in this log.

The copies are made before the step, and take memory and time for all that the optimizer changes. Where that is much,
there are none: they are worth their time if most of a model is not trained, or if steps take long.
"""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from time import perf_counter, thread_time
from typing import Any, Final

SHARE: Final = 0.001
"""What copies may cost, as a share of the time from one to the next. Ranks that share CPUs begin their optimizers'
steps at the same time, and then wait for each other's copies, too. A thread would not help: one that is preempted while
it holds the GIL stops the script for milliseconds.
"""
MOST_BYTES: Final = 2**28
"""The most memory that the copies of one optimizer take."""
_MEASURED = 4
"""Times that are compared with the share: the first copies fill pages, and the first steps take longer."""
_LEAST_MEASURED = 2

Tensors = Sequence[tuple[int, Any]]
"""Tensors with their offsets, as in `Snapshot.shared`."""


class UndoLog:
    """Copies of the tensors that optimizers are about to change, the last ones of each optimizer."""

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[Any, _BeforeImages] = weakref.WeakKeyDictionary()

    def record(self, optimizer: Any, tensors: Tensors) -> Mapping[int, Any] | None:
        """Copy the tensors that this optimizer changes, and return the copies by their offsets.

        The next call for the same optimizer overwrites them. None: it would take too much time or memory, or the
        tensors are on a device.
        """
        images = self._last.get(optimizer)
        if images is None or not images.are_of(tensors):
            images = self._last[optimizer] = _BeforeImages(optimizer, tensors)
        return images.taken()


class _BeforeImages:
    """What one optimizer changes, and the copies of that."""

    def __init__(self, optimizer: Any, tensors: Tensors) -> None:
        addresses = _changed_by(optimizer)
        changed = [(offset, tensor) for offset, tensor in tensors if tensor.data_ptr() in addresses]
        size = sum(tensor.numel() * tensor.element_size() for _, tensor in changed)
        self._tensors = tensors
        self._is_worth_it = size <= MOST_BYTES and all(tensor.is_cpu for _, tensor in changed)
        self._changed = changed if self._is_worth_it else []
        self._images = {offset: tensor.new_empty(tensor.shape) for offset, tensor in self._changed}
        self._costs: deque[float] = deque(maxlen=_MEASURED)
        self._pauses: deque[float] = deque(maxlen=_MEASURED)
        self._taken_at: float | None = None

    def are_of(self, tensors: Tensors) -> bool:
        """Return whether these are the same tensors, at the same places."""
        return len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))

    def taken(self) -> Mapping[int, Any] | None:
        """Take the copies anew, and return them. None: they are not worth it."""
        if not self._is_worth_it:
            return None
        began, cpu = perf_counter(), thread_time()
        for offset, tensor in self._changed:
            size = tensor.numel() * tensor.element_size()
            ctypes.memmove(self._images[offset].data_ptr(), tensor.data_ptr(), size)
        # Of the CPU: when ranks share it, each waits for others now and then.
        self._costs.append(thread_time() - cpu)
        if self._taken_at is not None:
            self._pauses.append(began - self._taken_at)
        self._taken_at = began
        if len(self._pauses) >= _LEAST_MEASURED and min(self._costs) > SHARE * max(self._pauses):
            self._is_worth_it, self._changed, self._images = False, [], {}
            return None
        return self._images


def _changed_by(optimizer: Any) -> set[int]:
    """Return the addresses of what an optimizer of torch changes: its parameters that are trained, and its state."""
    found = {one.data_ptr() for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
    for state in optimizer.state.values():
        if isinstance(state, Mapping):
            found |= {one.data_ptr() for one in state.values() if hasattr(one, "data_ptr")}
    return found
