"""Survivors whose models are on a device of torch that is not CUDA's, `tests/open_device`."""

from __future__ import annotations

import pytest

from tests.cluster.test_without_cluster import alone, alone_with_torch, start

__all__ = ["alone", "alone_with_torch"]

pytestmark = pytest.mark.timeout(200, func_only=True)  # the device may be compiled first, which has a limit of its own

TRAINS = """
import os, signal, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from raylaunch.worker import State, elastic
from tests.open_device import group

STEPS, DEVICE = 8, "open_device"
group.register()
torch.set_num_threads(1)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.5), nn.Linear(512, 1)).to(DEVICE)
    return model, lambda: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss(model):
    return model(torch.randn(4, 512, device=DEVICE)).square().mean()


@elastic(backend="hosted")
def train():
    attempt, rank = int(os.environ["RAYLAUNCH_ATTEMPT"]), dist.get_rank()
    model, make = build()
    model = DistributedDataParallel(model)
    optimizer = make()
    torch.open_device.manual_seed(rank)
    state = State(model=model, optimizer=optimizer, every={every!r})
    done = state.restore()
    print("restored", attempt, rank, done, os.getpid(), flush=True)
    for step in range(done, STEPS):
        if attempt == 1 and step == 5 and rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
        state.commit(step)
    return [one.detach().cpu() for one in model.parameters()]


found, states = train(), []
wanted, make = build()
optimizer = make()
for rank in range(2):
    torch.open_device.manual_seed(rank)
    states.append(torch.open_device.get_rng_state())
for step in range(STEPS):
    optimizer.zero_grad()
    for rank in range(2):
        torch.open_device.set_rng_state(states[rank])
        (loss(wanted) / 2).backward()
        states[rank] = torch.open_device.get_rng_state()
    optimizer.step()
wanted = [one.detach().cpu() for one in wanted.parameters()]
print("same", all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(found, wanted, strict=True)))
"""


@pytest.mark.parametrize("every", [1, "auto"])
def test_a_survivor_goes_on_when_a_rank_has_died(alone_with_torch, open_device, every):
    """With the weights and the device's random numbers of the same step on all ranks; with `auto` light commits too."""
    env, folder = alone_with_torch
    job = {"nnodes": 1, "max_restarts": 1, "preload": ["torch._dynamo", "torch.nn.parallel"], "show": "raw"}
    process = start(env, folder, open_device + TRAINS.format(every=every), **job)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    restored = sorted(line.split()[1:] for line in out.splitlines() if line.startswith("restored"))
    assert [line[:2] for line in restored] == [["1", "0"], ["1", "1"], ["2", "0"], ["2", "1"]], err
    done = {line[2] for line in restored[2:]}
    assert done == {"4"} if every == 1 else len(done) == 1, (restored, err)
    assert len({line[3] for line in restored}) == 3, restored  # one process was in both attempts
    assert out.count("same True") == 2, out
