"""Each library writes its checkpoint when a restart is requested, and goes on from it after that and after a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STEPS = 60
LIGHTNING = f"""
import time
from pathlib import Path
import lightning, torch
from raylaunch.integrations.lightning import CheckpointCallback
from raylaunch.worker import context

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def on_train_start(self):
        self.print("from step", self.global_step, flush=True)
    def training_step(self, batch):
        time.sleep(0.05)
        self.print("at step", self.global_step, flush=True)
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

kept, world = Path("last.ckpt"), context()
trainer = lightning.Trainer(
    max_steps={STEPS}, accelerator="cpu", strategy="ddp", devices=world.local_world_size, num_nodes=world.nnodes,
    callbacks=[CheckpointCallback(kept)], logger=False, enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(1000, 4)), ckpt_path=kept if kept.exists() else None)
"""
TRANSFORMERS = f"""
import time
from pathlib import Path
import torch
from raylaunch.integrations.transformers import CheckpointTrainerCallback
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x):
        time.sleep(0.05)
        return {{"loss": self.layer(x).square().mean()}}

class SaysStep(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        if state.is_world_process_zero:
            print("from step", state.global_step, flush=True)
    def on_step_begin(self, args, state, control, **_):
        if state.is_world_process_zero:
            print("at step", state.global_step, flush=True)

args = TrainingArguments(
    output_dir="kept", max_steps={STEPS}, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
)
data = [{{"x": torch.ones(4)}}] * 1000
trainer = Trainer(Model(), args, train_dataset=data, callbacks=[CheckpointTrainerCallback(), SaysStep()])
trainer.train(resume_from_checkpoint=get_last_checkpoint("kept") if Path("kept").is_dir() else None)
"""
ACCELERATE = f"""
import time
from pathlib import Path
import torch
from accelerate import Accelerator
from raylaunch.integrations.accelerate import save_on_request

accelerator = Accelerator(cpu=True)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which counts the steps
model, optimizer = accelerator.prepare(net, optimizer)
accelerator.register_for_checkpointing(scheduler)
if Path("last").is_dir():
    accelerator.load_state("last")
accelerator.print("from step", scheduler.last_epoch, flush=True)
for step in range(scheduler.last_epoch, {STEPS}):
    time.sleep(0.05)
    accelerator.print("at step", step, flush=True)
    accelerator.backward(model(torch.ones(4)).square().mean())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    save_on_request(accelerator, step, "last")
accelerator.end_training()
"""


@pytest.mark.parametrize(
    ("library", "script"), [("lightning", LIGHTNING), ("transformers", TRANSFORMERS), ("accelerate", ACCELERATE)]
)
def test_training_goes_on_from_the_step_at_which_a_restart_was_requested(
    tmp_path: Path, library: str, script: str
) -> None:
    pytest.importorskip(library)
    (tmp_path / "train.py").write_text(script)
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAYLAUNCH_")}
    env |= {"XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    raylaunch = [sys.executable, "-m", "raylaunch"]
    with (tmp_path / "said").open("w") as file:
        words = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--progress", "off", "train.py")
        run = subprocess.Popen(
            [*raylaunch, *words], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        wait_for(run, tmp_path, r"at step 5$")
        subprocess.run([*raylaunch, "restart", "--yes"], cwd=tmp_path, env=env, check=True, timeout=120)
        wait_for(run, tmp_path, r"(?s:from step .*){2}at step \d+$")
        (record,) = tmp_path.glob("runs/train/latest/events.jsonl")
        os.kill(pids(record)[1], signal.SIGKILL)
        assert run.wait(200) == 0, said(tmp_path)
    finally:
        run.terminate()
        run.wait(60)
    first, second, third = map(int, re.findall(r"^from step (\d+)$", said(tmp_path), re.MULTILINE))
    assert first == 0
    assert 5 < second == third < STEPS
    steps = [int(step) for step in re.findall(r"^at step (\d+)$", said(tmp_path), re.MULTILINE)]
    assert steps[:second] == [*range(second)], "no step was lost by the restart"
    assert steps[-1] == STEPS - 1


def said(folder: Path) -> str:
    return (folder / "said").read_text()


def wait_for(run: subprocess.Popen[bytes], folder: Path, line: str) -> None:
    """Until the output has a match."""
    until = time.monotonic() + 200
    while not re.search(line, said(folder), re.MULTILINE):
        assert run.poll() is None, said(folder)
        assert time.monotonic() < until, said(folder)
        time.sleep(0.05)


def pids(journal: Path) -> list[int]:
    """The workers that were started last."""
    events = [json.loads(line).get("event") for line in journal.read_text().splitlines()]
    return [event for event in events if event and event["is"] == "WorkersStarted"][-1]["pids"]
