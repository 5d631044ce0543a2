"""What raylaunch does with torch's private parts, where torch itself is not needed."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from raylaunch.worker import torch_internals

ABORT = "_abort_process_group"


def test_functions_whose_defaults_are_instances_are_removed():
    """Of extension modules made with nanobind, and no others: the instances are freed, and nanobind reports nothing."""
    meta: Any = type("nb_type_0", (type,), {"__module__": "nanobind"})
    base = meta("base", (), {})
    function: Any = type("nb_method", (), {"__nb_signature__": (("def g(x: base = \\0)", None, (None, base())),)})
    plain: Any = type(
        "nb_func", (), {"__nb_signature__": (("def f(x: int = \\0)", None, (1,)), ("def f()", None, None))}
    )
    child = meta("child", (base,), {"g": function(), "f": plain(), "value": 3})
    lookalike = type("lookalike", (), {"g": function()})
    torch_internals.release_default_arguments()
    assert not hasattr(child, "g")
    assert hasattr(child, "f")
    assert child.value == 3
    assert hasattr(lookalike, "g")


def test_without_such_modules_nothing_happens():
    """It runs at the end of every worker."""
    torch_internals.release_default_arguments()


@pytest.mark.parametrize(
    "choose",
    [
        lambda *, gpu_index, numa_options: {gpu_index, numa_options.affinity_mode},
        lambda *, device_index, numa_options: {device_index, numa_options.affinity_mode},
    ],
    ids=["torch 2.9", "torch 2.15"],
)
def test_cpus_near_a_gpu(choose, monkeypatch):
    """The parameter for the GPU has another name in newer torch."""
    module = SimpleNamespace(NumaOptions=SimpleNamespace, AffinityMode=len, _get_logical_cpus_to_bind_to=choose)
    monkeypatch.setitem(sys.modules, "torch.numa.binding", module)
    assert torch_internals.cpus_near_gpu("node", 3) == {3, len("node")}


@pytest.mark.parametrize("shape", ["aborts", "does nothing", "missing"])
def test_an_aborted_group_is_forgotten(monkeypatch: pytest.MonkeyPatch, shape: str) -> None:
    """Torch 2.6 has the function for NCCL only."""
    group = ["group"]
    c10d = ModuleType("torch.distributed.distributed_c10d")
    c10d.is_initialized = lambda: bool(group)
    c10d.destroy_process_group = lambda: group.remove("group")  # which fails if there is none
    if shape != "missing":
        setattr(c10d, ABORT, group.clear if shape == "aborts" else lambda: None)
    for name in ("torch", "torch.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, c10d.__name__, c10d)
    torch_internals.abort_process_groups()
    assert group == []


def test_the_default_timeout_of_process_groups():
    """Both defaults are replaced; where there is none of that name, or none that is a time, nothing happens."""
    module: Any = ModuleType("c10d")
    module.default_pg_timeout, module.default_pg_nccl_timeout = timedelta(minutes=30), None
    torch_internals.set_default_timeout(module, timedelta(days=7))
    assert module.default_pg_timeout == timedelta(days=7)
    assert module.default_pg_nccl_timeout is None
    torch_internals.set_default_timeout(ModuleType("other"), timedelta(days=7))


class Inference:
    """As a tensor that was made in inference mode."""

    @property
    def _version(self) -> int:
        raise RuntimeError("Inference tensors do not track version counter.")


@pytest.mark.parametrize(
    ("tensor", "version"), [(SimpleNamespace(_version=3), 3), (SimpleNamespace(), 0), (Inference(), 0)]
)
def test_how_often_a_tensor_was_changed(tensor, version):
    assert torch_internals.version(tensor) == version
