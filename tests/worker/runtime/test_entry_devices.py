"""The process group and the device that a function finds, with stand-ins for torch and its GPUs."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from raylaunch.worker.runtime import entry
from raylaunch.worker.runtime.spec import WorkerSpec


@pytest.fixture
def made(monkeypatch):
    """What a function finds: the backend of its group, and the index of its device if one was chosen."""
    found = {"backend": None, "device": None}

    def accelerator():
        if kind == "old":
            raise RuntimeError("cannot access accelerator device when none is available.")
        return kind and SimpleNamespace(type=kind)

    def set_kind(new):
        nonlocal kind
        kind = new

    kind = "cuda"
    distributed = SimpleNamespace(
        get_default_backend_for_device=lambda device: {"cuda": "nccl", "xpu": "xccl"}[device.type],
        is_backend_available=lambda backend: backend != "nccl" or kind == "cuda",
        init_process_group=lambda backend: found.update(backend=backend),
    )
    torch = SimpleNamespace(
        distributed=distributed,
        accelerator=SimpleNamespace(current_accelerator=accelerator),
        get_device_module=lambda _: SimpleNamespace(set_device=lambda index: found.update(device=index)),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
    return SimpleNamespace(found=found, on=set_kind)


def init(monkeypatch, gpus, backend, local_rank=1):
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    spec = {"kind": "function", "target": "a:b", "env": {}, "cwd": "/", "stdout": "", "stderr": ""}
    entry._init_process_group(WorkerSpec(rank=1, local_rank=1, gpus=gpus, backend=backend, **spec))  # noqa: SLF001


@pytest.mark.parametrize(
    ("gpus", "backend", "local_rank", "expected"),
    [
        (range(1, 2), None, 1, ("nccl", 1)),
        (range(2, 4), None, 1, ("nccl", 2)),  # two for each worker
        (range(2, 4), None, 0, ("nccl", 0)),  # with `virtual_local_rank`, where it sees only these
        (range(1, 1), "gloo", 1, ("gloo", None)),  # a context would take memory of a GPU that it has not
        (range(1), "gloo", 1, ("gloo", 0)),  # half a GPU
        (range(1, 1), "nccl", 1, ("nccl", 1)),  # as the user says
    ],
)
def test_a_function_s_group_and_device(monkeypatch, made, gpus, backend, local_rank, expected):
    init(monkeypatch, gpus, backend, local_rank)
    assert (made.found["backend"], made.found["device"]) == expected


def test_a_device_that_is_not_cuda(monkeypatch, made):
    made.on("xpu")
    init(monkeypatch, range(1, 2), None)
    assert made.found == {"backend": "xccl", "device": 1}


@pytest.mark.parametrize("kind", [None, "old"])
def test_a_torch_for_cpus_alone_on_a_node_with_gpus(monkeypatch, made, kind):
    """It is said: other ranks wait for this one with nccl. Torch 2.6 raises an error where it has no accelerator."""
    made.on(kind)
    with pytest.raises(entry.CannotBeginError, match="this torch has no `nccl` backend"):
        init(monkeypatch, range(1, 2), None)
