"""What the callbacks commit, restore and save, with the real libraries in one process and a `State` that is a list."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from raylaunch.integrations.data import ElasticDataLoader
from tests.warm_command import WarmCommand
from tests.warm_python import WarmPython


class FakeState:
    """Has a commit after `done` steps already, if that is not 0; remembers what is called."""

    done = 0
    values: dict[str, Any] = {}  # noqa: RUF012
    states: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, **objects: Any) -> None:
        self.objects, self.called = objects, []
        self.kept = dict(self.values)
        made.append(self)

    def __setitem__(self, key: str, value: Any) -> None:
        self.kept[key] = value

    def __getitem__(self, key: str) -> Any:
        return self.kept[key]

    def restore(self) -> int:
        self.called.append("restore")
        for name, state in self.states.items():
            self.objects[name].load_state_dict(state)
        return self.done

    def commit(self, step: int) -> None:
        self.called.append(step)

    def finish(self) -> None:
        self.called.append("finish")


made: list[FakeState] = []


@pytest.fixture(autouse=True)
def none_made() -> None:
    made.clear()


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), index / 40), "labels": torch.tensor(1.0)}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen += (40 * x[:, 0]).round().int().tolist()
        return {"loss": (self.layer(x)[:, 0] - labels).square().mean()}


def trainer(folder: Path, *callbacks: Any, loader: Any = None, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    args = transformers.TrainingArguments(
        **{"output_dir": str(folder), "max_steps": 6, "per_device_train_batch_size": 4, "use_cpu": True}
        | {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 2}
        | more
    )

    class Elastic(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return loader or super().get_train_dataloader()

    return Elastic(Model(), args, train_dataset=Samples(), callbacks=[*callbacks])


@pytest.fixture
def of_transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("transformers")
    from raylaunch.integrations import transformers

    monkeypatch.setattr(transformers, "State", FakeState)
    return transformers


def test_the_trainer_of_transformers_commits_each_step(of_transformers: Any, tmp_path: Path) -> None:
    trainer(tmp_path, of_transformers.StateTrainerCallback(), gradient_accumulation_steps=2).train()
    (state,) = made
    assert state.called == ["restore", 0, 1, 2, 3, 4, 5, "finish"]
    assert type(state.objects["optimizer"]).__module__.startswith("torch.optim."), "or the ranks share no work"
    assert {"model", "scheduler"} < state.objects.keys()
    assert state["trainer"].keys() >= {"best_metric", "num_input_tokens_seen"}


def test_the_trainer_of_transformers_goes_on_with_the_next_sample(
    of_transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeState, "done", 12)
    monkeypatch.setattr(FakeState, "values", {"trainer": {"best_metric": 0.5}})
    loader = ElasticDataLoader(Samples(), batch_size=4, shuffle=False, num_replicas=1, rank=0)
    loader.load_state_dict({"position": 48, "steps": 2})
    again = trainer(tmp_path, of_transformers.StateTrainerCallback(loader), loader=loader, max_steps=23)
    again.train()
    (state,) = made
    assert state.objects["loader"] is loader
    assert state.called == ["restore", *range(12, 23), "finish"]
    assert again.model.seen == [*range(8, 40), *range(12)]
    assert again.state.best_metric == 0.5


@pytest.mark.parametrize(("accumulated", "steps"), [(1, 14 + 20), (2, 7 + 10), (3, 4 + 7)])
def test_the_trainer_of_transformers_ends_after_its_epochs_with_another_number_of_ranks(
    of_transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulated: int, steps: int
) -> None:
    """Two ranks have done 3 steps of 8 samples; one is left, which takes 4 in each batch."""
    monkeypatch.setattr(FakeState, "done", 3)
    monkeypatch.setattr(FakeState, "values", {"trainer": {}})
    data = torch.utils.data.ConcatDataset([Samples(), Samples()])
    loader = ElasticDataLoader(data, batch_size=4, shuffle=False, num_replicas=1, rank=0)
    monkeypatch.setattr(FakeState, "states", {"loader": {"position": 24, "steps": 3}})
    more = {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": accumulated}
    again = trainer(tmp_path, of_transformers.StateTrainerCallback(loader), loader=loader, **more)
    again.train()
    assert again.state.global_step == 3 + steps
    assert again.model.seen == [*range(24, 40), *range(40), *range(40), *range(40)]
    assert (again.state.epoch, loader.epoch) == (2, 2)


def test_the_trainer_of_transformers_saves_on_request(
    of_transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[int] = []
    monkeypatch.setattr(of_transformers, "should_checkpoint", lambda step: step == 2)
    monkeypatch.setattr(of_transformers, "checkpointed", done.append)
    trainer(tmp_path, of_transformers.CheckpointTrainerCallback()).train()
    assert done == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


@pytest.fixture
def of_lightning(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("lightning")
    from raylaunch.integrations import lightning

    monkeypatch.setattr(lightning, "State", FakeState)
    return lightning


def fit(folder: Path, *callbacks: Any, loader: Any = None, **more: Any) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.inner(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    made_trainer = lightning.Trainer(
        callbacks=[*callbacks], max_epochs=2, default_root_dir=folder, enable_model_summary=False, **quiet, **more
    )
    made_trainer.fit(Module(), loader or torch.utils.data.DataLoader(Samples(), batch_size=4))
    return made_trainer


def test_lightning_commits_each_step_of_the_optimizer(of_lightning: Any, tmp_path: Path) -> None:
    """And not each batch, where gradients are accumulated."""
    trained = fit(tmp_path, of_lightning.StateCallback(), accumulate_grad_batches=2)
    (state,) = made
    assert state.called == ["restore", *range(10), "finish"]
    assert state.objects["model"] is not None
    assert state.objects["loop"] is trained.fit_loop
    assert state.objects["optimizer_0"] is trained.optimizers[0]


def test_other_callbacks_and_schedulers_of_lightning_are_kept(of_lightning: Any, tmp_path: Path) -> None:
    import lightning

    class Counts(lightning.Callback):
        batches = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.batches += 1

        def state_dict(self) -> dict[str, int]:
            return {"batches": self.batches}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.batches = state["batches"]

    counts = Counts()
    trained = fit(tmp_path, of_lightning.StateCallback(), counts)
    parts = made[0].objects["parts"]
    kept = parts.state_dict()
    counts.batches = 0
    rate = trained.lr_scheduler_configs[0].scheduler
    epochs, rate.last_epoch = rate.last_epoch, 0
    parts.load_state_dict(kept)
    assert counts.batches == 20
    assert rate.last_epoch == epochs == 2


class KilledError(Exception):
    pass


@pytest.mark.parametrize(("kills", "ranks"), [((13,), 2), ((10, 13), 1)])
def test_lightning_ends_after_the_epochs_of_an_elastic_loader(
    of_lightning: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: tuple[int, ...], ranks: int
) -> None:
    """With other ranks within an epoch; and after a kill at its end and another one, where Lightning forgets the sample."""

    class Dies(FakeState):
        def commit(self, step: int) -> None:
            if step + 1 in kills and step + 1 > self.done:
                held = {name: each for name, each in self.objects.items() if hasattr(each, "state_dict")}
                monkeypatch.setattr(FakeState, "states", {name: deepcopy(held[name].state_dict()) for name in held})
                monkeypatch.setattr(FakeState, "done", step + 1)
                raise KilledError

    monkeypatch.setattr(of_lightning, "State", Dies)
    for _ in kills:
        with pytest.raises(KilledError):
            fit(tmp_path, of_lightning.StateCallback(), loader=ElasticDataLoader(Samples(), 4, num_replicas=1, rank=0))
    loader = ElasticDataLoader(Samples(), 4, num_replicas=ranks, rank=0)
    fit(tmp_path, of_lightning.StateCallback(), loader=loader)
    assert loader.elastic_sampler.epochs_done == 2


def test_lightning_saves_on_request(of_lightning: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    monkeypatch.setattr(of_lightning, "should_checkpoint", lambda step: step == 2)
    monkeypatch.setattr(of_lightning, "checkpointed", done.append)
    fit(tmp_path, of_lightning.CheckpointCallback(tmp_path / "last.ckpt"))
    assert done == [2]
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 3


def test_what_accelerate_has_prepared_is_taken_out_of_its_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from raylaunch.integrations import accelerate

    monkeypatch.setattr(accelerate, "State", FakeState)
    accelerator, net = Accelerator(cpu=True), torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    assert type(optimizer) is not torch.optim.AdamW
    accelerator.scaler = torch.amp.GradScaler("cpu")
    accelerate.prepared_state(accelerator, model=model, optimizer=optimizer)
    (state,) = made
    assert type(state.objects["optimizer"]) is torch.optim.AdamW
    assert state.objects["model"] is model
    assert state.objects["scaler"] is accelerator.scaler


def test_accelerate_saves_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from raylaunch.integrations import accelerate

    done: list[Any] = []

    class Saves:
        save_state = staticmethod(done.append)

    monkeypatch.setattr(accelerate, "should_checkpoint", lambda step: step == 3)
    monkeypatch.setattr(accelerate, "checkpointed", done.append)
    for step in (2, 3):
        accelerate.save_on_request(Saves(), step, Path("folder"))
    assert done == ["folder", 3]


@pytest.mark.parametrize("module", ["raylaunch.integrations", "raylaunch.integrations.data"])
def test_what_needs_no_library_imports_none(module: str, warm_torch: WarmPython, tmp_path: Path) -> None:
    script = tmp_path / "imports.py"
    code = f"import {module}; print({{'lightning', 'transformers', 'accelerate'}} & set(sys.modules))"
    script.write_text(f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); {code}")
    done = WarmCommand(warm_torch, str(script), env=os.environ, cwd=tmp_path)
    assert done.communicate() == ("set()\n", "")
