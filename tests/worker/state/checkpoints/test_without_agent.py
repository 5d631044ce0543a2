"""`State` under plain Python, where the memory is the process's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from raylaunch.worker.state.checkpoints.durable_folder import EVERY_VARIABLE, FOLDER_VARIABLE

pytestmark = pytest.mark.timeout(300)

CLOSES = """
import os
import threading
import torch
from raylaunch.worker import State

model = torch.nn.Linear(4, 4)
state = State(model=model, every=1, random_state=False)
done = state.restore()
assert done == 0
for step in range(6):
    if step == 3:
        for thread in threading.enumerate():
            if thread.name == "raylaunch-checkpoint":
                thread.join()  # or the files that it is writing would be closed, too
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        files = [open(f"mine-{number}", "w+b") for number in range(16)]
    with torch.no_grad():
        model.weight.fill_(step)
    state.commit(step)
"""


def test_a_script_that_closes_all_descriptors(tmp_path):
    """Nothing is written to its own files, and the checkpoints are whole."""
    (tmp_path / "train.py").write_text(CLOSES)
    root = Path(__file__).parents[4]
    env = os.environ | {"PYTHONPATH": str(root), FOLDER_VARIABLE: str(tmp_path / "kept"), EVERY_VARIABLE: "0.001"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=env, check=False, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.read_bytes() for path in sorted(tmp_path.glob("mine-*"))] == [b""] * 16
    assert (tmp_path / "kept" / "step-6" / ".metadata").exists()
