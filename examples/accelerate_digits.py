"""accelerate with `State`, gradient accumulation and a loader that goes on with the next sample.

raylaunch --nproc-per-node 2 --max-restarts 3 examples/accelerate_digits.py
RAYLAUNCH_DURABLE=durable torchrun --nproc-per-node 2 --max-restarts 3 examples/accelerate_digits.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from raylaunch.integrations.accelerate import prepared_state
from raylaunch.integrations.data import ElasticDataLoader

EPOCHS, BATCH = 12, 8


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    set_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    loader = ElasticDataLoader(TensorDataset(images[:1504], labels[:1504]), batch_size=BATCH)  # not to be prepared

    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    set_seed(1, device_specific=True)

    state = prepared_state(accelerator, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    step = state.restore()
    accelerator.print(f"resuming after step {step}" if step else "starting from scratch", flush=True)
    while loader.epoch < EPOCHS:
        for batch in loader:
            mine = [tensor.to(accelerator.device) for tensor in batch]
            with accelerator.accumulate(model):
                loss = cross_entropy(model(mine[0]), mine[1])
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                state.commit(step)
                step += 1
                if step % 20 == 0:
                    accelerator.print(f"step {step} epoch {loader.epoch} loss {loss.item():.3f}", flush=True)
    state.finish()

    net = accelerator.unwrap_model(model).eval()
    with torch.no_grad():
        loss = cross_entropy(net(images[1504:].to(accelerator.device)), labels[1504:].to(accelerator.device))
    accelerator.print(f"final loss {loss.item()!r}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
