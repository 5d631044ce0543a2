"""On a machine with CUDA: an agent on a GPU bundle, nccl, a restart, and the GPU's memory free before the next start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def _why_not() -> str:
    none = "this machine has no CUDA device"
    if not any(Path("/dev").glob("nvidia[0-9]*")):  # to ask torch takes 2.5 s
        return none
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return "" if done.stdout.strip() not in ("", "0") else none


WHY_NOT = _why_not()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

SCRIPT = """
import json, os, torch, torch.distributed as dist
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
free, _ = torch.cuda.mem_get_info()
dist.init_process_group("nccl", device_id=device)
total = torch.ones(1 << 28, device=device)  # one GiB
dist.all_reduce(total)
assert total[0] == dist.get_world_size()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(json.dumps({"attempt": attempt, "free": free, "visible": os.environ["CUDA_VISIBLE_DEVICES"]}), flush=True)
if attempt == "0" and dist.get_rank() == dist.get_world_size() - 1:
    os.kill(os.getpid(), 9)
dist.barrier()
dist.destroy_process_group()
"""


def test_restart_on_gpus(tmp_path: Path):
    """Every worker of a node sees all its GPUs; after a kill the next attempt finds the memory free."""
    (tmp_path / "train.py").write_text(SCRIPT)
    job = {
        "entrypoint": {"script": "train.py"},
        "nproc_per_node": "gpu",
        "gpus_per_worker": 1,
        "max_restarts": 1,
        "ray": {"address": "local"},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "raylaunch", "job.yaml"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = [json.loads(line) for line in done.stdout.splitlines()]
    assert (first["attempt"], second["attempt"]) == ("0", "1")
    assert second["free"] >= first["free"] - (1 << 28), "memory of the first attempt was still held"


def test_function_gets_nccl(tmp_path: Path):
    """For functions raylaunch chooses nccl where the workers have GPUs."""
    program = (
        "import raylaunch, json\n"
        "def which():\n"
        "    import torch.distributed as dist\n"
        "    return dist.get_backend()\n"
        "print(json.dumps(raylaunch.launch(which, nproc_per_node='gpu', ray={'address': 'local'})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == {"nccl"}
