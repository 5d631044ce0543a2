"""Die again and again, and note when the ranks are past their first all_reduce: `marks.py FOLDER DEATHS`.

For raylaunch, torchrun and Ray Train alike: attempts are counted by the deaths. Rank 0 sends itself SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

SIMULATED = os.environ.get("RAYLAUNCH_GPU_SIMULATED", "")
BACKEND = "gloo" if SIMULATED else "nccl"


def work(folder: Path, deaths: int) -> None:
    """In a process group: reduce, then die or leave."""
    number = len(list(folder.glob("death-*")))
    device = torch.device("cpu") if SIMULATED else torch.device("cuda", torch.cuda.current_device())
    total = torch.ones(1 << 20, device=device)
    dist.all_reduce(total)
    assert float(total[0]) == dist.get_world_size()
    (folder / f"reduced-{number}-{dist.get_rank()}").write_text(str(time.monotonic()))
    until = time.monotonic() + 0.5
    while time.monotonic() < until or number < deaths:
        dist.all_reduce(total)
        time.sleep(0.01)
        if dist.get_rank() == 0 and number < deaths and time.monotonic() >= until:
            (folder / f"death-{number}").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """As raylaunch and torchrun start it."""
    if not SIMULATED:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(BACKEND)
    work(Path(sys.argv[1]), int(sys.argv[2]))
    dist.destroy_process_group()


def with_ray_train() -> None:
    """As Ray Train runs it, with the settings of tools/bench/ray_train.py."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer, get_device

    folder, deaths = sys.argv[1], int(sys.argv[2])

    def train() -> None:
        if not SIMULATED:
            torch.cuda.set_device(get_device())
        work(Path(folder), deaths)

    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.1"
    ray.init(log_to_driver=False)
    TorchTrainer(
        train,
        torch_config=TorchConfig(backend=BACKEND),
        scaling_config=ScalingConfig(num_workers=int(sys.argv[4]), use_gpu=not SIMULATED),
        run_config=RunConfig(
            name="gpu", storage_path=f"{folder}/storage", failure_config=FailureConfig(max_failures=deaths + 5)
        ),
    ).fit()


if __name__ == "__main__":
    with_ray_train() if sys.argv[3:4] == ["ray-train"] else main()
