"""TensorBoard, W&B and MLflow that go on in the same run after a restart, without a network.

raylaunch --nproc-per-node 2 --max-restarts 3 examples/trackers.py
RAYLAUNCH_DURABLE=durable torchrun --nproc-per-node 2 --max-restarts 3 examples/trackers.py
"""

import os
from pathlib import Path

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")

import mlflow
import torch
import torch.distributed as dist
import wandb
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

from raylaunch.worker import State, context

STEPS = 300


class Trackers:
    """All three, on rank 0. What they need over restarts is in one folder."""

    def __init__(self, done: int) -> None:
        run_id, folder = context().run_id, Path(context().run_dir or "tracked")
        folder.mkdir(exist_ok=True)
        # Steps after the last commit are done again: they are not to be shown twice.
        self.tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=done)
        # The same id in each attempt is the same run.
        self.wandb = wandb.init(project="digits", id=run_id, resume="allow", dir=folder)
        # The server makes the id, so the first attempt notes it for the next ones.
        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", (folder / "mlruns").absolute().as_uri()))
        note = folder / "mlflow-run-id"
        self.mlflow = mlflow.start_run(run_id=note.read_text() if note.exists() else None)
        note.write_text(self.mlflow.info.run_id)

    def log(self, step: int, loss: float) -> None:
        self.tensorboard.add_scalar("loss", loss, step)
        self.wandb.log({"loss": loss}, step=step)
        mlflow.log_metric("loss", loss, step=step)

    def finish(self) -> None:
        self.tensorboard.close()
        self.wandb.finish()
        mlflow.end_run()


def main() -> None:
    dist.init_process_group("gloo")
    is_first = dist.get_rank() == 0
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    state = State(every=1, model=model, optimizer=optimizer)
    done = state.restore()
    trackers = Trackers(done) if is_first else None
    if is_first and done:
        print(f"resuming after step {done}", flush=True)

    for step in range(done, STEPS):
        data = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        loss = (model(data)[:, 0] - data.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.commit(step)
        if trackers is not None:
            trackers.log(step, loss.item())
            if step % 20 == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
    state.finish()
    if trackers is not None:
        trackers.finish()
        print(f"final loss {loss.item()!r}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
