"""For scripts with an `Accelerator`: a `State` of what it has prepared, and its checkpoints on request."""

from __future__ import annotations

import os
from typing import Any, Literal

from torch.optim import Optimizer

from raylaunch.worker import State, checkpointed, should_checkpoint


def prepared_state(
    accelerator: Any,
    *,
    every: int | Literal["auto"] = "auto",
    durable: str | os.PathLike[str] | None = None,
    **objects: Any,
) -> State:
    """Return a `State` of objects that `accelerator.prepare` has returned, and of the accelerator's gradient scaler.

        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        state = prepared_state(accelerator, model=model, optimizer=optimizer, scheduler=scheduler)
        for step in range(state.restore(), steps):
            ...
            state.commit(step)

    With gradient accumulation, commit only if `accelerator.sync_gradients`, and count steps of the optimizer.
    """
    if accelerator.scaler is not None:
        objects["scaler"] = accelerator.scaler
    return State(every=every, durable=durable, **{name: unwrapped(thing) for name, thing in objects.items()})


def unwrapped(thing: Any) -> Any:
    """Return the torch optimizer in an optimizer that accelerate has wrapped, and anything else as it is.

    `State` divides the work of commits among the ranks for optimizers of torch, and knows no wrappers.
    """
    return getattr(thing, "optimizer", thing) if isinstance(thing, Optimizer) else thing


def save_on_request(accelerator: Any, step: int, folder: str | os.PathLike[str]) -> None:
    """Write a checkpoint with `accelerator.save_state` if one is requested: see `raylaunch.worker.should_checkpoint`.

    Call this on every rank after each step, with the number of the step that was just done. After a checkpoint it does
    not return: the worker is ended, and the next attempt can call `accelerator.load_state`.
    """
    if should_checkpoint(step):
        accelerator.save_state(os.fspath(folder))
        checkpointed(step)
