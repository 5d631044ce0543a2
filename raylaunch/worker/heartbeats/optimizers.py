"""Counts the optimizer steps of an unchanged script, with torch's hook for all optimizers.

The hook is `torch.optim.optimizer.register_optimizer_step_post_hook`. This module never imports torch itself.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

from raylaunch.worker import torch_internals
from raylaunch.worker.heartbeats.heartbeat_writer import HeartbeatWriter
from raylaunch.worker.heartbeats.import_hook import when_imported
from raylaunch.worker.heartbeats.shared_page import MAX_NUMBER

_MODULE = "torch.optim.optimizer"
_TAKEOVER_STEPS = 100
"""Steps of another optimizer, with none of the counted one, after which the other one is counted."""
_MAX_READS = 10
"""How often an optimizer's own step count is read, which may have to be copied from its device."""


def install(writer: HeartbeatWriter) -> None:
    """Record each optimizer step of this process as progress, from the time that it imports torch."""
    when_imported(_MODULE, lambda module: _register(module, writer))


def _register(module: types.ModuleType, writer: HeartbeatWriter) -> None:
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is None:
        return  # another version of torch, whose steps are not seen
    torch = sys.modules["torch"]
    count = StepCounter(writer).on_step

    def after_step(optimizer: Any, _args: object, _kwargs: object) -> None:
        # torch.compile traces this. A step that is one whole graph must stay one, so it is not counted.
        if torch.compiler.is_compiling() and not _breaks_graph(optimizer):
            return
        count(optimizer)

    register(after_step)


def _breaks_graph(optimizer: Any) -> bool:
    """Return whether torch breaks the graph around this optimizer's step anyway.

    It does so for its own optimizers with the option `differentiable` (`_use_grad_for_differentiable` in
    `torch/optim/optimizer.py`).
    """
    return type(optimizer).__module__.startswith("torch.optim.") and "differentiable" in optimizer.defaults


class StepCounter:
    """Counts the steps of one of the script's optimizers as progress: the first that steps.

    Steps of the others only show that the worker is alive. If the counted optimizer is gone or steps no more, another
    one takes over.
    """

    def __init__(self, writer: HeartbeatWriter) -> None:
        self._writer = writer
        self._counted: weakref.ref[Any] | None = None
        self._other: weakref.ref[Any] | None = None
        self._steps_of_other = 0
        #: Asks the device whether a graph is being captured; None: it has no such graphs.
        self._asks_capturing: Callable[[], bool] | None = None
        self._completed = 0
        self._state_id = 0
        self._reads = 0

    @torch_internals.do_not_compile
    def on_step(self, optimizer: Any) -> None:
        """Record a step of an optimizer. Called after each step of any optimizer."""
        counted = self._counted
        if counted is not None and counted() is optimizer:
            self._steps_of_other = 0
            if self._completed:
                self._completed += 1
        elif not self._takes_over(optimizer):
            self._writer.record_alive()
            return
        if self._asks_capturing is not None and self._is_capturing(self._asks_capturing):
            self._writer.record_alive()
            self._state_id = 0
            return
        state_id = id(optimizer.state)
        if state_id != self._state_id and self._reads < _MAX_READS:  # the first step, or the first of a loaded state
            self._state_id = state_id
            self._reads += 1
            self._completed = _completed_steps(optimizer)
        self._writer.record_progress(self._completed)

    def _takes_over(self, optimizer: Any) -> bool:
        """Return whether this optimizer, which was not counted so far, is counted from now on."""
        counted, other = self._counted, self._other
        if counted is not None and counted() is not None:
            if other is None or other() is None:
                self._other, self._steps_of_other = weakref.ref(optimizer), 0
            elif other() is optimizer:
                self._steps_of_other += 1
            if self._steps_of_other < _TAKEOVER_STEPS:
                return False
        self._counted, self._other, self._steps_of_other = weakref.ref(optimizer), None, 0
        self._asks_capturing = None
        for parameter in optimizer.param_groups[0]["params"][:1]:
            module = getattr(sys.modules["torch"], parameter.device.type, None)
            self._asks_capturing = getattr(module, "is_current_stream_capturing", None)
        self._state_id = self._reads = 0
        return True

    def _is_capturing(self, ask: Callable[[], bool]) -> bool:
        """Return whether this step is captured into a graph, as CUDA's: then nothing may be read from the device.

        The graph is replayed later without a call of the hook.
        """
        capturing = bool(ask())
        self._writer.set_unobservable(capturing)
        return capturing


def _completed_steps(optimizer: Any) -> int:
    """Return how many steps the optimizer's state says were done in all attempts, or 0 where it does not say.

    Adam and similar optimizers keep the count with each parameter. Some fused optimizers of other libraries keep it
    with the group.
    """
    try:
        first = next(iter(optimizer.state.values()), None) or {}
        step = first.get("step", optimizer.param_groups[0].get("step"))
        if type(step) is sys.modules["torch"].Tensor:
            step = step.item()
        return int(step) if isinstance(step, int | float) and 0 < step < MAX_NUMBER else 0
    except Exception:  # noqa: BLE001
        return 0  # a state of another kind, which must not disturb the script
