"""Callbacks for the `Trainer` of transformers: `State` in place of its checkpoints, or its checkpoints on request."""

from __future__ import annotations

import math
import os
from typing import Any, Literal

from transformers import TrainerCallback

from raylaunch.integrations.accelerate import unwrapped
from raylaunch.integrations.data import ElasticDataLoader, ElasticSampler
from raylaunch.worker import State, checkpointed, heartbeat, should_checkpoint

_TRAINER = "trainer"
_KEPT = ("best_metric", "best_global_step", "best_model_checkpoint", "num_input_tokens_seen", "total_flos")
"""Of the Trainer's own state. What it has logged would make commits larger and larger."""


class StateTrainerCallback(TrainerCallback):
    """Commits to a `State` after each step of the optimizer, and goes on from there after a failure.

        Trainer(model, args, train_dataset=data, callbacks=[StateTrainerCallback()]).train()

    The Trainer begins its samples anew after a restart, and ends after as many steps as `max_steps` or the number of
    epochs says. To go on with the samples that are not done yet, let `get_train_dataloader` return an
    `ElasticDataLoader`, and give it to this callback, too.
    """

    def __init__(
        self,
        loader: ElasticDataLoader | None = None,
        every: int | Literal["auto"] = "auto",
        durable: str | os.PathLike[str] | None = None,
    ) -> None:
        """`every`, `durable`: as of `State`."""
        self._every, self._durable, self._loader = every, durable, loader
        self._state: State | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **now: Any) -> None:
        """Restore."""
        del control
        objects = {"model": now["model"], "optimizer": unwrapped(now["optimizer"]), "scheduler": now["lr_scheduler"]}
        objects |= {"loader": self._loader, "scaler": getattr(now["optimizer"], "scaler", None)}
        kept = {name: thing for name, thing in objects.items() if thing is not None}
        self._state = State(every=self._every, durable=self._durable, **kept)
        if done := self._state.restore():
            state.global_step = done
            vars(state).update(self._state[_TRAINER])
            if self._loader is not None and args.max_steps <= 0:
                state.max_steps = done + _steps_left(self._loader.elastic_sampler, args, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **now: Any) -> None:
        """Commit."""
        del args, control, now
        if self._loader is not None:
            state.epoch = self._loader.elastic_sampler.epochs_done
        if self._state is not None:
            self._state[_TRAINER] = {name: getattr(state, name) for name in _KEPT}
            self._state.commit(state.global_step - 1)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **now: Any) -> None:
        """Report that evaluation gets on."""
        del args, state, control, now
        heartbeat()

    def on_train_end(self, args: Any, state: Any, control: Any, **now: Any) -> None:
        """Commit the last step."""
        del args, state, control, now
        if self._state is not None:
            self._state.finish()


def _steps_left(sampler: ElasticSampler, args: Any, most: int) -> int:
    """Return how many steps of the optimizer are left of the epochs, with this number of ranks.

    `most`: how many there would be from the beginning. The Trainer counts batches from 0 again, so batches at the end
    of this epoch that do not make a whole step go into the next one.
    """
    of_epoch: int = sampler.steps_left // args.gradient_accumulation_steps
    later: float = (args.num_train_epochs - sampler.epoch - 1) * most / args.num_train_epochs
    return max(0, of_epoch + math.ceil(later))


class CheckpointTrainerCallback(TrainerCallback):
    """Lets the Trainer write a checkpoint when nodes join or leave: see `raylaunch.worker.should_checkpoint`.

    The script goes on from it with `train(resume_from_checkpoint=...)`, as from any other.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **now: Any) -> None:
        """Request the checkpoint of the Trainer."""
        del args, now
        if should_checkpoint(state.global_step - 1):
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **now: Any) -> None:
        """Report it. If it was requested, the worker is ended here."""
        del args, control, now
        checkpointed(state.global_step - 1)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **now: Any) -> None:
        """Report that evaluation gets on."""
        del args, state, control, now
        heartbeat()
