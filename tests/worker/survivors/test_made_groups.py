"""Whether a worker can stay, by what its script has done before it calls its elastic function."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from raylaunch.worker.heartbeats import heartbeat_writer
from raylaunch.worker.survivors.made_groups import MadeGroups


class Torch:
    """The parts of torch that are watched: group and model count the collectives that are called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, syncs: bool = True) -> None:
        self.called = 0
        self.options: dict[str, Any] = {}
        c10d = ModuleType("torch.distributed.distributed_c10d")
        group = SimpleNamespace(_get_sequence_number_for_group=lambda: self.called)
        facts = {"group": SimpleNamespace(WORLD=group), "is_initialized": lambda: bool(self.options)}
        vars(c10d).update(facts, _new_process_group_helper=self.new_group)
        self.c10d = c10d
        torch = self

        class Synchronized:
            def __init__(self, module: object, init_sync: bool = True) -> None:
                torch.called += 3 if init_sync else 0

        class Plain:
            def __init__(self, module: object) -> None:
                torch.called += 3

        self.ddp = ModuleType("torch.nn.parallel.distributed")
        vars(self.ddp)["DistributedDataParallel"] = Synchronized if syncs else Plain
        for module in (c10d, self.ddp):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def new_group(self, size: int, global_ranks_in_group: list[int], backend: str, timeout: object = None) -> None:
        if not global_ranks_in_group:
            self.options = {"backend": backend, "timeout": timeout}

    def make_group(self, *ranks: int) -> None:
        vars(self.c10d)["_new_process_group_helper"](2, list(ranks), "gloo", timeout=7)

    def make_model(self) -> object:
        return self.ddp.DistributedDataParallel(object())


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    return Torch(monkeypatch)


def watched() -> MadeGroups:
    made = MadeGroups()
    made.watch()
    return made


def test_nccl_can_be_aborted_and_made_again(monkeypatch, torch):
    """torch's watchdog ends no process and waits for no reports for long, and NCCL uses no NVLink SHARP (NVLS)."""
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"})
    watched()
    zeros = ("ASYNC_ERROR_HANDLING", "RETHROW_CUDA_ERRORS", "DUMP_ON_TIMEOUT")
    expected = {f"TORCH_NCCL_{name}": "0" for name in zeros} | {"NCCL_NVLS_ENABLE": "0"}
    expected["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "100"  # the watchdog sleeps four times as long after an error
    assert os.environ.items() >= expected.items()


def test_a_script_may_make_the_default_group_and_models(torch):
    """A model's constructor compares and broadcasts it, which a worker that is started beside survivors leaves out."""
    made = watched()
    torch.make_group()
    model = torch.make_model()
    assert model is not None
    assert torch.called == 3
    assert made.end_preparation() == ""
    assert made.options == {"backend": "gloo", "timeout": 7}


def test_beside_survivors_models_are_made_without_communication(torch, monkeypatch):
    """Survivors would not answer. In the function, all ranks make their models at the same time."""
    monkeypatch.setenv(heartbeat_writer.WITH_SURVIVORS_VARIABLE, "1")
    made = watched()
    torch.make_group()
    torch.make_model()
    assert torch.called == 0
    made.end_preparation()
    torch.make_model()
    assert torch.called == 3


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda torch: torch.make_group(0, 1), "makes process groups"),
        (lambda torch: setattr(torch, "called", 1), "communicates"),
    ],
)
def test_other_communication_in_the_preparation_is_named(torch, prepare, why):
    """A worker that is started again would wait for survivors, which do not do it again."""
    made = watched()
    torch.make_group()
    prepare(torch)
    assert why in made.end_preparation()


def test_a_group_that_was_made_too_early_is_named(torch):
    """Nobody has seen which sockets were opened for it."""
    torch.make_group()
    assert "before `raylaunch.worker.elastic` was imported" in watched().end_preparation()


@pytest.mark.parametrize("lacks", ["init_sync", "makes process groups in another way"])
def test_another_torch_is_named(monkeypatch, lacks):
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    torch = Torch(monkeypatch, syncs=lacks != "init_sync")
    if lacks != "init_sync":
        del vars(torch.c10d)["_new_process_group_helper"]
    assert lacks in watched().end_preparation()
