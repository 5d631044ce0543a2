"""`State` under plain Python, where the memory is the process's own."""

from __future__ import annotations

import atexit
import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from raylaunch.worker.state.buffer_client import Request
from raylaunch.worker.state.checkpoints import checkpoint_writer
from raylaunch.worker.state.checkpoints.durable_folder import EVERY_VARIABLE, FOLDER_VARIABLE, DurableFolder
from raylaunch.worker.state.checkpoints.without_agent import OwnFiles
from raylaunch.worker.state.commit_buffer import DURABLE_BUFFER, HEADER_BYTES
from tests.private_cluster import free_ports
from tests.warm_command import WarmCommand
from tests.warm_python import WarmPython

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


@pytest.mark.parametrize("is_full_at_end", [False, True])
def test_why_the_last_checkpoint_is_missing_begins_with_the_first_cause(tmp_path, monkeypatch, capsys, is_full_at_end):
    """The other ranks have written their parts, and write no others at their end."""

    def write_checkpoint(*_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_newest(*_: object) -> str:
        if is_full_at_end:
            raise TimeoutError("there is no commit")
        return ""

    monkeypatch.setattr(checkpoint_writer, "write_checkpoint", write_checkpoint)
    monkeypatch.setattr(checkpoint_writer, "write_newest", write_newest)
    files = OwnFiles(DurableFolder.of(tmp_path, {}))
    atexit.unregister(files.write_last)
    request = Request(attempt=1, rank=0, index=DURABLE_BUFFER, bytes=2 * HEADER_BYTES)
    os.close(files.ask(request)[0])
    os.close(files.ask(replace(request, bytes=0, write=1))[0])
    files.write_last()
    os.close(vars(files)["_files"][DURABLE_BUFFER][0])
    cause = f"the state could not be written to {tmp_path}: No space left on device"
    wait = f"the state could not be written to {tmp_path}: there is no commit"
    said = [f"raylaunch: {why}" for why in (cause, wait)] if is_full_at_end else []
    assert capsys.readouterr().err.splitlines() == said


WAITS = """
import os
import time
from pathlib import Path
import torch
import torch.distributed as dist
from raylaunch.worker import State
from raylaunch.worker.state.checkpoints.durable_folder import DurableFolder

complete = DurableFolder.complete

def wait_for(pattern):
    deadline = time.monotonic() + 100.0
    while not [*Path().glob(pattern)] and time.monotonic() < deadline:
        time.sleep(0.01)
"""


LEAVES = f"""
import atexit
{WAITS}
def complete_later(*args):
    Path("completing").touch()
    wait_for("left")
    return complete(*args)

DurableFolder.complete = complete_later
rank = int(os.environ["RANK"])
if rank:
    atexit.register(Path("left").touch)  # before that of `State`, so it is called after it
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
state = State(model=model, every=1)
assert state.restore() == 0
state.commit(0)
state.commit(1)  # to disk: rank 0 proposes that with the commit before
state.finish()
dist.barrier()
dist.destroy_process_group()
if rank:
    wait_for("completing")
"""


GOES_ON = f"""
{WAITS}
def complete_later(*args):
    Path("completing").touch()
    wait_for("kept/step-3.*/.plan-1")
    time.sleep(0.5)  # rank 1 would tell at once what else it has to write
    DurableFolder.complete = complete
    return complete(*args)

DurableFolder.complete = complete_later
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
state = State(model=model, every=1)
assert state.restore() == 0
state.commit(0)
state.commit(1)  # to disk: rank 0 proposes that with the commit before
state.commit(2)
state.finish()
dist.barrier()
dist.destroy_process_group()
if int(os.environ["RANK"]):
    wait_for("completing")
"""


def test_a_rank_that_has_written_its_part_leaves(warm_torch, tmp_path):
    """It does not begin again with the commit that rank 0 is about to complete."""
    end_of_two_ranks(warm_torch, tmp_path, LEAVES)
    assert {*(tmp_path / "kept").glob("step-*")} == {tmp_path / "kept" / "step-2"}


def test_a_rank_that_has_written_its_part_of_the_commit_before_the_last(warm_torch, tmp_path):
    """It begins with the last one, and not again with the one that rank 0 is about to complete."""
    end_of_two_ranks(warm_torch, tmp_path, GOES_ON)
    assert (tmp_path / "kept" / "step-3" / ".metadata").exists()
    assert not [*(tmp_path / "kept").glob("step-2/.plan-*")]


def end_of_two_ranks(warm_torch: WarmPython, tmp_path: Path, script: str) -> None:
    """Run a script on two ranks whose checkpoints are in `kept`; they must end well, and write the one of step 2."""
    (tmp_path / "train.py").write_text(script)
    (port,) = free_ports(1)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[4]), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": str(port), FOLDER_VARIABLE: str(tmp_path / "kept"), EVERY_VARIABLE: "0.0001"}
    ranks = [
        WarmCommand(warm_torch, str(tmp_path / "train.py"), env=env | {"RANK": str(rank)}, cwd=tmp_path)
        for rank in (0, 1)
    ]
    errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    assert ([rank.returncode for rank in ranks], errors) == ([0, 0], ["", ""])
    assert (tmp_path / "kept" / "step-2" / ".metadata").exists()
