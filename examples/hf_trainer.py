"""The `Trainer` of transformers on a small GPT-2, made from scratch, that reads Python's own source byte by byte.

As it is, the script knows nothing of raylaunch: the Trainer writes checkpoints, and goes on from the last one. With
`--state` a callback keeps everything in the nodes' memory instead, and a loader goes on with the next sample.

    raylaunch --nproc-per-node 2 --max-restarts 3 examples/hf_trainer.py [--state]
    torchrun --nproc-per-node 2 --max-restarts 3 examples/hf_trainer.py
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

CONTEXT, STEPS = 64, 80


class Text(torch.utils.data.Dataset):
    """Windows of the standard library's text."""

    def __init__(self, pattern: str) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob(pattern))
        text = bytearray(b"".join(file.read_bytes() for file in files))
        self.windows = torch.frombuffer(text, dtype=torch.uint8).unfold(0, CONTEXT, CONTEXT).long()

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", action="store_true", help="keep the state of training in memory, not in checkpoints")
    with_state = parser.parse_args().state

    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2))
    args = TrainingArguments(
        output_dir="checkpoints",
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        logging_steps=10,
        save_strategy="no" if with_state else "steps",
        save_steps=20,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
    train, test = Text("[a-c]*.py"), Text("token*.py")
    if with_state:
        trainer = trainer_with_state(model, args, train, test)
        trainer.train()
    else:
        trainer = Trainer(model, args, train_dataset=train, eval_dataset=test)
        checkpoint = get_last_checkpoint("checkpoints") if Path("checkpoints").is_dir() else None
        if checkpoint and trainer.is_world_process_zero():
            print(f"resuming after step {checkpoint.rpartition('-')[2]}", flush=True)
        trainer.train(resume_from_checkpoint=checkpoint)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"final loss {loss!r}")


def trainer_with_state(model: GPT2LMHeadModel, args: TrainingArguments, train: Text, test: Text) -> Trainer:
    from raylaunch.integrations.data import ElasticDataLoader  # noqa: PLC0415  so that the rest does without
    from raylaunch.integrations.transformers import StateTrainerCallback  # noqa: PLC0415

    loader = ElasticDataLoader(train, batch_size=args.per_device_train_batch_size)

    class ElasticTrainer(Trainer):
        def get_train_dataloader(self) -> ElasticDataLoader:
            return loader

    class SaysStep(TrainerCallback):
        def on_train_begin(self, _: object, state: TrainerState, *__: object, **___: object) -> None:
            if state.global_step and state.is_world_process_zero:
                print(f"resuming after step {state.global_step}", flush=True)

    callbacks = [StateTrainerCallback(loader), SaysStep()]
    return ElasticTrainer(model, args, train_dataset=train, eval_dataset=test, callbacks=callbacks)


if __name__ == "__main__":
    main()
