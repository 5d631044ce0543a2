"""Lightning with `StateCallback`: it goes on in its epoch, with the next sample, after any rank has died.

raylaunch --nproc-per-node 2 --max-restarts 3 examples/lightning_digits.py
RAYLAUNCH_DURABLE=durable torchrun --nproc-per-node 2 --max-restarts 3 examples/lightning_digits.py
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from raylaunch.integrations.data import ElasticDataLoader
from raylaunch.integrations.lightning import StateCallback
from raylaunch.worker import context

EPOCHS, BATCH = 6, 16


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        if self.global_rank == 0 and self.global_step % 10 == 0:
            print(f"step {self.global_step} epoch {self.current_epoch} loss {loss.item():.3f}", flush=True)
        return loss

    def on_train_start(self) -> None:
        if self.global_rank == 0 and self.global_step:
            print(f"resuming after step {self.global_step}", flush=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def main() -> None:
    lightning.seed_everything(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    train, (images, labels) = torch.utils.data.Subset(data, range(1500)), data[1500:]

    module, world = Digits(), context()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        strategy="ddp",
        devices=world.local_world_size,
        num_nodes=world.nnodes,
        callbacks=[StateCallback(every=5)],
        use_distributed_sampler=False,  # the loader is elastic
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, ElasticDataLoader(train, batch_size=BATCH))

    module.eval()
    with torch.no_grad():
        loss = cross_entropy(module.net(images), labels).item()
    if trainer.is_global_zero:
        print(f"steps {trainer.global_step}")
        print(f"final loss {loss!r}")


if __name__ == "__main__":
    main()
