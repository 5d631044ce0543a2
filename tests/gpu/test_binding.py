"""`--numa-binding` binds workers to the CPUs that torch names for their GPU, as torchrun does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.gpu import gpu_runs
from tests.gpu.gpu_runs import SCRIPTS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(100)]


@pytest.mark.parametrize("kind", ["node", "exclusive"])
def test_as_torchrun(tmp_path, launch, record_property, kind):
    """`--numa-binding` binds to the CPUs that torchrun binds to, or says why it cannot, as torchrun does."""
    if gpu_runs.simulated():
        pytest.skip("torch asks the GPU which CPUs are near it")
    words = ("--standalone", f"--nproc-per-node={gpu_runs.count()}", f"--numa-binding={kind}", str(SCRIPTS / "look.py"))
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    env = gpu_runs.environment()
    theirs = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    ours = launch("look.py", numa_binding=kind)
    ours.process.wait(gpu_runs.SECONDS)
    record_property("torchrun", f"exit code {theirs.returncode}")
    record_property("raylaunch", f"exit code {ours.process.returncode}")
    if ours.process.returncode:
        assert "cannot bind local rank" in ours.err, ours.err[-3000:]
        assert theirs.returncode != 0, ours.err[-3000:]
    else:  # torchrun needs the program numactl besides, though it does not use it here
        assert theirs.returncode == 0 or "numactl" in theirs.stderr, theirs.stderr[-3000:]
    if theirs.returncode == 0:
        bound = gpu_runs.Run(ours.process, tmp_path, "").notes("look")
        assert [note["cpus"] for note in ours.notes("look")] == [note["cpus"] for note in bound]
        record_property("CPUs of rank 0", len(bound[0]["cpus"]))
