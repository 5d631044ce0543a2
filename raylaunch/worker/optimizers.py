"""The steps of an unchanged script, by torch's public hook for all optimizers. torch is never imported here."""

from __future__ import annotations

import sys
import types
import weakref
from typing import Any

from raylaunch.worker.on_import import when_imported
from raylaunch.worker.watch import Watch

_MODULE = "torch.optim.optimizer"
_TAKES_OVER = 100
"""Steps of another optimizer, with none of the one that is counted, after which the other is counted."""
_TOO_MANY = 1 << 62
_MOST_READS = 10
"""Of an optimizer's own count, which may have to be fetched from its device."""


def follow(watch: Watch) -> None:
    """Have every optimizer step of this process marked, whenever it imports torch."""
    when_imported(_MODULE, lambda module: _register(module, watch))


def _register(module: types.ModuleType, watch: Watch) -> None:
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is None:
        return  # another torch; its steps cannot be seen
    torch = sys.modules["torch"]
    counted = Counted(watch).stepped

    def after_step(optimizer: Any, _args: object, _kwargs: object) -> None:
        # While torch.compile traces: where a step is one graph, it is left whole and its steps are not seen.
        if torch.compiler.is_compiling() and not _breaks_the_graph(optimizer):
            return
        counted(optimizer)

    register(after_step)


def _breaks_the_graph(optimizer: Any) -> bool:
    """Those of torch that have this option break the graph around their step themselves."""
    return type(optimizer).__module__.startswith("torch.optim.") and "differentiable" in optimizer.defaults


class Counted:
    """One of the script's optimizers, the first that stepped, stands for its steps; others are signs of life."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._leader: weakref.ref[Any] | None = None
        self._other: weakref.ref[Any] | None = None
        self._others_steps = 0
        self._on_device = False
        self._done = 0
        self._state = 0
        self._reads = 0

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has made a step."""
        leader = self._leader
        if leader is not None and leader() is optimizer:
            self._others_steps = 0
            if self._done:
                self._done += 1
        elif not self._leads(optimizer):
            self._watch.sign_of_life()
            return
        if self._on_device and self._is_captured():
            self._watch.sign_of_life()
            self._state = 0
            return
        state = id(optimizer.state)
        if state != self._state and self._reads < _MOST_READS:  # its first step, or the first since it was loaded
            self._state = state
            self._reads += 1
            self._done = _steps_of(optimizer)
        self._watch.mark(self._done)

    stepped._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001

    def _leads(self, optimizer: Any) -> bool:
        """Whether this one is counted from here on."""
        leader, other = self._leader, self._other
        if leader is not None and leader() is not None:
            if other is None or other() is None:
                self._other, self._others_steps = weakref.ref(optimizer), 0
            elif other() is optimizer:
                self._others_steps += 1
            if self._others_steps < _TAKES_OVER:
                return False
        self._leader, self._other, self._others_steps = weakref.ref(optimizer), None, 0
        self._on_device = any(parameter.is_cuda for parameter in optimizer.param_groups[0]["params"][:1])
        self._state = self._reads = 0
        return True

    def _is_captured(self) -> bool:
        """A step that is captured is run later, again and again, without us; and nothing may be read during it."""
        captured = bool(sys.modules["torch"].cuda.is_current_stream_capturing())
        self._watch.cannot_be_seen(captured)
        return captured


def _steps_of(optimizer: Any) -> int:
    """How many steps it has done in its life, restarts included, as Adam knows; 0: it does not say."""
    try:
        first = next(iter(optimizer.state.values()), None) or {}
        step = first.get("step", optimizer.param_groups[0].get("step"))  # there, with some fused ones of others
        if type(step) is sys.modules["torch"].Tensor:
            step = step.item()
        return int(step) if isinstance(step, int | float) and 0 < step < _TOO_MANY else 0
    except Exception:  # noqa: BLE001
        return 0  # its state is of another kind; the script is not to suffer from that
