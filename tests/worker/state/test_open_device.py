"""`State` with a device of torch that is not CUDA's, `tests/open_device`: what is committed there comes back there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.node.harness import mark, no_leaks, pipe, shared_state_node, state_node
from tests.worker.state.test_elastic_state import attempt

__all__ = ["mark", "no_leaks", "pipe", "shared_state_node", "state_node"]

TRAINS = """
import torch
from torch import nn
from raylaunch.worker import State

device = torch.device("open_device", int(sys.argv[1]))
torch.open_device.set_device(device)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
state = State(model=model, optimizer=optimizer, every=1)
done = state.restore()

def step():
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8, device=device)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()

if not done:
    for done in range(3):
        step()
        state.commit(done)
    state.finish()
print([step() for _ in range(3)])
tensors = [value for group in optimizer.state.values() for name, value in group.items() if name != "step"]
print({one.device.index for one in (*model.parameters(), *tensors)}, torch.ops.open_device.most_bytes(1 - device.index))
raise SystemExit(1)
"""


def test_training_goes_on_as_it_would_have(state_node, open_device):
    """The same losses, bit for bit, with the device's own random numbers; on another device, the current one, and on no other."""
    script = state_node.script(open_device + TRAINS)
    first = attempt(state_node, script, "1")
    assert first[1] == "{1} 0", first
    second = attempt(state_node, script, "0")
    assert second[:2] == [first[0], "{0} 0"], second


KINDS = """
import torch
from raylaunch.worker import State
on = {"device": "open_device"}
state = State(every=1)
kinds = [
    torch.tensor(3.5, dtype=torch.bfloat16, **on), torch.zeros(0, 4, **on), torch.tensor([True, False], **on),
    torch.arange(6, **on).reshape(2, 3).t(), torch.tensor([1 + 2j], **on), torch.tensor([1 + 2j], **on).conj(),
    torch.nn.Parameter(torch.ones(2, **on)), torch.ones(1, **on).expand(4), torch.arange(9.0, **on)[::2],
    torch.arange(432.0, **on).reshape(1, 3, 12, 12).to(memory_format=torch.channels_last),
    torch.arange(3, device="open_device:1"), torch.arange(3),
]
if state.restore():
    for found, kind in zip(state["kinds"], kinds, strict=True):
        same = torch.equal(found, kind), found.dtype == kind.dtype, found.device == kind.device
        assert all(same), (same, found, kind)
    print(len(state["kinds"]), state["kinds"][9].stride() == kinds[9].stride(), type(state["kinds"][6]).__name__)
state["kinds"] = kinds
state.commit(0)
state.finish()
raise SystemExit(1)
"""


def test_tensors_of_all_kinds_come_back(state_node, open_device):
    script = state_node.script(open_device + KINDS)
    assert attempt(state_node, script) == [""]
    assert attempt(state_node, script)[0] == "12 True Parameter"


WAITS = """
import time
import torch
from raylaunch.worker import State
from raylaunch.worker.state import device_copies

hold, release = torch.ops.open_device.hold, torch.ops.open_device.release

class Weights:
    tensor = torch.zeros(100_000, device="open_device:0")
    def state_dict(self):
        return {"tensor": self.tensor}
    def load_state_dict(self, state):
        self.tensor.copy_(state["tensor"])

weights = Weights()
state = State(weights=weights, every=1)
done = state.restore()
print(done, {*weights.tensor.tolist()}, flush=True)
if not done:
    weights.tensor += 1
    state.commit(0)
    streams = {"script": 0, "copies": device_copies._streams[weights.tensor.device].stream_id}
    held = hold(0, streams[sys.argv[1]])
    weights.tensor += 1
    state.commit(1)
    weights.tensor += 1  # none of this waits for the stream that stands
    time.sleep(0.2)
    print("went on", flush=True)
    release(held)
    weights.tensor += 1
    state.commit(2)
raise SystemExit(1)
"""


@pytest.mark.parametrize("held", ["script", "copies"])
def test_a_commit_is_of_its_step_and_the_script_does_not_wait_for_it(state_node, open_device, held):
    """Though the stream of the script, or the one of the copies, stands meanwhile; the last commit is not sealed."""
    script = state_node.script(open_device + WAITS)
    assert attempt(state_node, script, held) == ["0 {0.0}", "went on", ""]
    assert attempt(state_node, script, held) == ["2 {2.0}", ""]


ON_THE_DEVICE = """
import pytest, torch
torch.set_default_device("open_device")
raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1], "-k", sys.argv[2]]))
"""


def test_light_commits_of_tensors_on_the_device(open_device):
    """The tests of what a survivor completes, with its model and optimizer on the device."""
    cases = Path(__file__).parents[1] / "survivors" / "test_light_commits.py"
    words = "bitwise or take_turns or is_completed_if or others_have_not_made or samples_notice"
    command = [sys.executable, "-c", open_device + ON_THE_DEVICE, str(cases), words]
    done = subprocess.run(command, cwd=cases.parents[3], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout
    assert "13 passed" in done.stdout, done.stdout
