"""Scripts of `make gpu`, without a GPU: what would make their first run on one tell nothing."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.warm_command import WarmCommand
from tests.warm_python import WarmPython

pytestmark = pytest.mark.timeout(200)

TESTS = Path(__file__).parents[1]
SCRIPTS = TESTS / "gpu" / "scripts"
SECONDS = 120


def started(warm_torch: WarmPython, program: str, folder: Path, **environ: str) -> WarmCommand:
    path = folder / "program.py"
    path.write_text(f"import sys\nsys.path[:0] = {[str(TESTS), str(SCRIPTS)]}\n{program}")
    env = os.environ | {"RAYLAUNCH_GPU_SIMULATED": os.devnull} | environ
    return WarmCommand(warm_torch, str(path), env=env, cwd=folder)


LIMITS = f"""
import contextlib, resource, runpy, sys
sys.argv = ["faults.py"]
with contextlib.suppress(BaseException):
    runpy.run_path({str(SCRIPTS / "faults.py")!r})
print(resource.getrlimit(resource.RLIMIT_CORE))
"""


def test_faults_leave_no_core(warm_torch, tmp_path):
    """That of a process with CUDA has gigabytes, and takes as long as writing them."""
    process = started(warm_torch, LIMITS, tmp_path)
    out, err = process.communicate(timeout=SECONDS)
    assert out.splitlines()[-1] == "(0, 0)", err


HANGS = """
import faulthandler, runpy, signal, sys
import fake_nccl
import rank
fake_nccl.install()
rank.BACKEND = "fakenccl"
faulthandler.register(signal.SIGUSR1)
sys.argv = ["hangs.py", "collective"]
runpy.run_path({path!r}, run_name="__main__")
"""


def test_a_rank_hangs_in_the_call_of_a_collective_of_nccl(warm_torch, tmp_path):
    """Since torch 2.8 a barrier is the only one whose call waits: others return, and the hang is somewhere else."""
    script = SCRIPTS / "hangs.py"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "FAKE_NCCL": str(tmp_path)}
    program = HANGS.format(path=str(script))
    ranks = [started(warm_torch, program, tmp_path, RANK=str(rank), LOCAL_RANK=str(rank), **env) for rank in range(2)]
    until = time.monotonic() + SECONDS
    try:
        while len([*tmp_path.glob("hangs-1-?.json")]) < 2 and time.monotonic() < until:
            assert all(process.poll() is None for process in ranks), ranks[1].communicate()[1]
            time.sleep(0.05)
        time.sleep(1)  # the calls come after the notes
        ranks[1].send_signal(signal.SIGUSR1)
        time.sleep(1)
    finally:
        for process in ranks:
            process.kill()
        stack = [process.communicate()[1] for process in ranks][1].splitlines()
    frames = [line for line in stack if line.startswith("  File ")]
    assert any(line.endswith(" in barrier") for line in frames), stack
    (place,) = [line for line in frames if str(script) in line]
    number = int(place.split("line ")[1].split(" ")[0])
    assert script.read_text().splitlines()[number - 2].strip() == 'elif kind == "collective" and rank.RANK > 0:'
