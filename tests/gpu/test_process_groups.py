"""Process groups on GPUs: nccl with one rank on each, gloo with several ranks on one, and what is built on them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.gpu import gpu_runs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
WORKERS = "1" if gpu_runs.simulated() else "gpu"
BACKEND = "gloo" if gpu_runs.simulated() else "nccl"


def raylaunch(*words, cwd):
    command = [sys.executable, "-m", "raylaunch", *words]
    env = gpu_runs.environment()
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100, check=False)


def test_check_nccl(tmp_path, record_property):
    """`raylaunch check` finds every operation of nccl right, with one rank on each GPU."""
    words = ("check", "--standalone", "--nproc-per-node", WORKERS, "--", "--backends", BACKEND)
    done = raylaunch(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in (
        "init env://",
        "init tcp://",
        "all_reduce",
        "all_gather_into_tensor",
        "barrier",
        "DDP step",
        "FSDP2 step",
    ):
        assert any(line.startswith(f"  {name}  ") and " ok, " in line for line in done.stdout.splitlines()), (
            name,
            done.stdout,
        )
    record_property("ranks", gpu_runs.count())
    record_property("result", done.stdout.strip().splitlines()[-1])


def test_check_refuses_a_shared_gpu(tmp_path):
    """`raylaunch check` says that nccl does not take two ranks on one GPU, instead of failing in each operation."""
    if gpu_runs.simulated():
        pytest.skip("nccl is needed")
    words = ("check", "--standalone", "--nproc-per-node", str(gpu_runs.count() + 1), "--", "--backends", "nccl")
    done = raylaunch(*words, cwd=tmp_path)
    assert "share GPUs, which NCCL does not take" in done.stdout, done.stdout + done.stderr


def test_gloo_on_one_gpu(launch):
    """gloo reduces CUDA tensors of four ranks on one GPU."""
    run = launch("look.py", "gloo", nproc_per_node=4).wait()
    found = run.notes("look")
    assert [note["rank"] for note in found] == [0, 1, 2, 3]
    assert len({note["gpu"] for note in found}) == 1


def test_ddp_with_gloo_on_one_gpu(launch, record_property):
    """DDP trains with gloo on CUDA tensors, two ranks on one GPU."""
    run = launch("models.py", "gloo", nproc_per_node=2).wait()
    losses = run.notes("ddp")
    assert len(losses) == 2
    record_property("loss", f"{losses[0]['first']:.3g} to {losses[0]['last']:.3g}")


def test_ddp_and_fsdp2(launch, record_property):
    """DDP and FSDP2 train with nccl."""
    run = launch("models.py").wait()
    for name in ("ddp", "fsdp2"):
        found = run.notes(name)
        assert len(found) == gpu_runs.count()
        record_property(name, f"{found[0]['first']:.3g} to {found[0]['last']:.3g}")


def test_each_rank_has_its_gpu(launch):
    """LOCAL_RANK is the index of a rank's GPU, and the process group is nccl's."""
    found = launch("look.py").wait().notes("look")
    assert [note["local_rank"] for note in found] == list(range(gpu_runs.count()))
    assert {note["devices"] for note in found} == {gpu_runs.count()}
    assert {note["backend"] for note in found} == {BACKEND}
    assert len({note["gpu"] for note in found}) == gpu_runs.count()


def test_function_gets_nccl(tmp_path):
    """A function gets an nccl process group, without being told, where the workers have GPUs."""
    program = (
        "import raylaunch, json\n"
        "def which():\n"
        "    import torch, torch.distributed as dist\n"
        "    total = torch.ones(1, device='cuda' if torch.cuda.is_available() else 'cpu')\n"
        "    dist.all_reduce(total)\n"
        "    return dist.get_backend(), int(total)\n"
        f"print(json.dumps(raylaunch.launch(which, nproc_per_node={WORKERS!r}, ray={{'address': 'none'}})))\n"
    )
    env = gpu_runs.environment()
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[BACKEND, gpu_runs.count()]] * gpu_runs.count()


def test_functions_that_share_gpus_get_gloo(tmp_path):
    """With more workers than GPUs a function gets gloo, and no worker has a CUDA context."""
    program = (
        "import raylaunch, json\n"
        "def which():\n"
        "    import torch, torch.distributed as dist\n"
        "    return dist.get_backend(), torch.cuda.is_initialized()\n"
        f"print(json.dumps(raylaunch.launch(which, nproc_per_node={gpu_runs.count() + 1}, ray={{'address': 'none'}})))\n"
    )
    env = gpu_runs.environment()
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["gloo", False]] * (gpu_runs.count() + 1)


def test_two_ranks_on_one_gpu_with_nccl(launch):
    """A script whose ranks share a GPU fails with nccl's error, and the report has a hint."""
    if gpu_runs.simulated():
        pytest.skip("nccl is needed")
    run = launch("look.py", "shared", nproc_per_node=2)
    run.process.wait(gpu_runs.SECONDS)
    assert run.process.returncode not in (0, None), run.out
    assert "two ranks use one GPU" in run.err, run.err[-4000:]
