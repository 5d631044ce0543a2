"""Which CPUs `--numa-binding` binds a worker to, with a stand-in for torch's choice."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from raylaunch.worker.runtime import numa
from raylaunch.worker.runtime.spec import WorkerSpec


def choose(*, gpu_index, numa_options):
    """Each GPU has a CPU, which is found by the name that CUDA knows it by."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    return {int(visible[gpu_index]) + 4}


@pytest.fixture
def bound(monkeypatch):
    """The CPUs that a worker is bound to, instead of being bound."""
    found = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: found.append(cpus))
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
def test_the_gpu_is_that_of_the_local_rank_on_the_node(monkeypatch, bound, own, devices, cpu):
    """Whatever the worker itself sees of the node's GPUs; its own environment stays."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if own is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    more = {"cwd": "/", "stdout": "", "stderr": "", "numa_binding": "node", "node_devices": devices}
    numa.bind(WorkerSpec(rank=2, local_rank=2, gpus=range(2, 3), kind="script", target="a.py", env={}, **more))
    assert bound == [{cpu}]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == own
