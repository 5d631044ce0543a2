"""Callbacks for Lightning's `Trainer`: `State` in place of its checkpoints, or its checkpoints on request."""

from __future__ import annotations

import os
from typing import Any, Literal

from lightning.pytorch import Callback

from raylaunch.integrations.data import ElasticDataLoader
from raylaunch.worker import State, checkpointed, heartbeat, should_checkpoint


class _LoopParts:
    """What of a Trainer has state besides its model and its loop: schedulers, precision and other callbacks."""

    def __init__(self, trainer: Any, own: Callback) -> None:
        self._parts = {
            **{f"scheduler {number}": config.scheduler for number, config in enumerate(trainer.lr_scheduler_configs)},
            **{f"callback {other.state_key}": other for other in trainer.callbacks if other is not own},
            "precision": trainer.precision_plugin,
        }

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        for name, state in states.items():
            if state and name in self._parts:
                self._parts[name].load_state_dict(state)


class _ElasticEpochs:
    """The position of an `ElasticDataLoader`, and how many epochs the loop does for those that it has.

    Lightning counts the batches of an epoch before it tells the loader its position, so with other ranks the
    rest of an epoch may be another one for it. It does not tell the position if the epoch before was just done.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._epochs = trainer.max_epochs
        self._restored: dict[str, int] = {}

    @property
    def _loader(self) -> ElasticDataLoader | None:
        loader = self._trainer.train_dataloader
        return loader if isinstance(loader, ElasticDataLoader) else None

    def begin(self) -> None:
        """Go on where the loader was."""
        if self._loader is not None and self._restored:
            self._loader.load_state_dict(self._restored)
        self.count()

    def count(self) -> None:
        """Let the loop do what is left of the epochs."""
        epoch = self._restored.get("epoch") if self._loader is None else self._loader.epoch
        if epoch is not None and self._epochs > 0 and self._trainer.limit_train_batches == 1:
            loop = self._trainer.fit_loop
            loop.max_epochs = loop.epoch_progress.current.processed + max(0, self._epochs - epoch)

    def state_dict(self) -> dict[str, int]:
        return {} if self._loader is None else {**self._loader.state_dict(), "epoch": self._loader.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._restored = state


class StateCallback(Callback):
    """Commits to a `State` after each step of the optimizer, and goes on from there after a failure.

        Trainer(strategy="ddp", callbacks=[StateCallback()]).fit(module, loader)

    The Trainer goes on in its epoch. A loader with a `state_dict`, such as `ElasticDataLoader`, goes on
    where it was, since the loop's state contains it; any other begins the epoch's samples anew.
    """

    def __init__(self, every: int | Literal["auto"] = "auto", durable: str | os.PathLike[str] | None = None) -> None:
        """`every`, `durable`: as of `State`."""
        self._every, self._durable = every, durable
        self._state: State | None = None
        self._epochs: _ElasticEpochs | None = None
        self._completed = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore."""
        del pl_module
        optimizers = {f"optimizer_{number}": optimizer for number, optimizer in enumerate(trainer.optimizers)}
        objects = {"model": trainer.strategy.model, "parts": _LoopParts(trainer, self), "loop": trainer.fit_loop}
        self._epochs = objects["epochs"] = _ElasticEpochs(trainer)
        self._state = State(every=self._every, durable=self._durable, **optimizers, **objects)
        self._completed = self._state.restore()
        self._epochs.count()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Go on with the next sample."""
        del trainer, pl_module
        if self._epochs is not None:
            self._epochs.begin()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Commit, if the optimizer has done a step: with accumulated gradients, not each batch has one."""
        if self._state is not None and trainer.global_step > self._completed:
            self._completed = trainer.global_step
            self._state.commit(self._completed - 1)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Find out how many epochs are left."""
        del trainer, pl_module
        if self._epochs is not None:
            self._epochs.count()

    def on_validation_batch_end(self, *_: Any) -> None:
        """Report that validation gets on."""
        heartbeat()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Commit the last step."""
        del trainer, pl_module
        if self._state is not None:
            self._state.finish()


class CheckpointCallback(Callback):
    """Lets the Trainer write a checkpoint when nodes join or leave: see `raylaunch.worker.should_checkpoint`.

    The script goes on from it with `fit(..., ckpt_path=path)`, as from any other.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """`path`: of the checkpoint."""
        self._path = path
        self._completed = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Write it and report it, if it is requested. Then the worker is ended here."""
        if trainer.global_step > self._completed:
            self._completed = trainer.global_step
            if should_checkpoint(self._completed - 1):
                trainer.save_checkpoint(self._path)
                checkpointed(self._completed - 1)

    def on_validation_batch_end(self, *_: Any) -> None:
        """Report that validation gets on."""
        heartbeat()
