"""Which CPUs `--numa-binding` binds a worker to, with a stand-in for torch's choice."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from raylaunch.worker.runtime import numa
from raylaunch.worker.runtime.files_wait import FOLDER_VARIABLE
from raylaunch.worker.runtime.spec import WorkerSpec


def choose(*, gpu_index, numa_options):
    """Each GPU has a CPU, which is found by the name that CUDA knows it by."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    return {int(visible[gpu_index]) + 4}


@pytest.fixture
def bound(monkeypatch):
    """The CPUs that a worker is bound to, instead of being bound."""
    found = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: found.append(set(cpus)))
    binding = SimpleNamespace(NumaOptions=dict, AffinityMode=str, _get_logical_cpus_to_bind_to=choose)
    monkeypatch.setitem(sys.modules, "torch.numa.binding", binding)
    return found


@pytest.mark.parametrize(
    ("own", "devices", "cpu"),
    [
        (None, {}, 6),  # all GPUs of the machine, under torchrun's rules
        ("1,2,3", {"CUDA_VISIBLE_DEVICES": "1,2,3"}, 7),  # those of a bundle
        ("2", {}, 6),  # with `virtual_local_rank`: its own, and the node has all
        ("3", {"CUDA_VISIBLE_DEVICES": "1,2,3"}, 7),
    ],
)
def test_the_gpu_is_that_of_the_local_rank_on_the_node(monkeypatch, tmp_path, bound, own, devices, cpu):
    """Whatever the worker itself sees of the node's GPUs; its own environment stays."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if own is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    numa.bind(spec(tmp_path, devices))
    assert bound == [{cpu}]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == own


def spec(folder: Path, devices: dict[str, str], *, gpu: int = 2) -> WorkerSpec:
    more = {"cwd": "/", "stdout": "", "stderr": "", "numa_binding": "node", "node_devices": devices}
    env = {FOLDER_VARIABLE: str(folder / "files")}
    return WorkerSpec(rank=2, local_rank=2, gpus=range(gpu, gpu + 1), kind="script", target="a.py", env=env, **more)


def test_torch_is_asked_once_for_each_gpu_of_a_node(monkeypatch, tmp_path, bound):
    """To ask initializes CUDA, which takes seconds, and a restart a tenth of one."""
    asked = []
    query = numa._query_in_child  # noqa: SLF001
    monkeypatch.setattr(numa, "_query_in_child", lambda *args: asked.append(args) or query(*args))
    for gpu in (2, 3, 2, 3):
        numa.bind(spec(tmp_path, {}, gpu=gpu))
    numa.bind(spec(tmp_path, {"CUDA_VISIBLE_DEVICES": "1,2,3"}))
    assert bound == [{6}, {7}, {6}, {7}, {7}]
    assert len(asked) == 3
