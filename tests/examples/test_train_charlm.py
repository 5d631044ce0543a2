"""The example runs under torchrun, and a resumed run gives the same result as an uninterrupted run."""

import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "train_charlm.py"
SMALL = "--steps 40 --checkpoint-every 10 --keep 3 --files 2 --context 32 --width 32 --lr 1e-2".split()  # noqa: SIM905
LAUNCHER_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
ENV = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
ENV |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def command(folder: Path, *more: str, workers: int = 0) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    script = [str(SCRIPT), *SMALL, "--checkpoint-dir", str(folder), *more]
    return [sys.executable, *(launcher if workers else []), *script]


def run(folder: Path, *more: str, workers: int = 0) -> subprocess.CompletedProcess[str]:
    arguments = command(folder, *more, workers=workers)
    return subprocess.run(arguments, env=ENV, capture_output=True, text=True, timeout=250, check=False)


def finished(folder: Path, *more: str, workers: int = 0) -> str:
    result = run(folder, *more, workers=workers)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "warn" not in result.stderr.lower()
    return result.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step .* loss ([\d.]+)", output)]


def state(folder: Path, step: int) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / f"step-{step:06}.pt", weights_only=True)
    return loaded


def assert_same(left: Any, right: Any) -> None:
    """Return whether two nested values are equal, tensors bit by bit."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    else:
        assert left == right


def workers_of(launcher: int) -> list[int]:
    """Return the pids of the workers that a torchrun started."""
    children = Path(f"/proc/{launcher}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [pid for pid in pids if SCRIPT.name in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder and the output of an uninterrupted run of two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, finished(folder, workers=2)


@pytest.fixture
def folder(whole: tuple[Path, str], tmp_path: Path) -> Path:
    """Return a folder with a copy of that run's checkpoints."""
    return Path(shutil.copytree(whole[0], tmp_path / "checkpoints"))


def test_learns_under_plain_torchrun(whole: tuple[Path, str]) -> None:
    """With two workers under torchrun, the loss falls."""
    output = whole[1]
    assert output.startswith("starting from scratch\n")
    assert output.endswith("done\n")
    assert losses(output)[-1] < losses(output)[0] - 0.3


def test_keeps_the_last_few(whole: tuple[Path, str]) -> None:
    """Only the newest checkpoints are kept, and no unfinished file remains."""
    names = sorted(path.name for path in whole[0].iterdir())
    assert names == ["step-000020.pt", "step-000030.pt", "step-000040.pt"]


def test_killed_and_resumed_is_the_same_run(whole: tuple[Path, str], tmp_path: Path) -> None:
    """A run of two ranks that is killed and started again ends with bitwise the same parameters."""
    last, quiet = tmp_path / "step-000040.pt", subprocess.DEVNULL
    last.mkdir()  # so that it cannot come to its end before it is killed
    with subprocess.Popen(command(tmp_path, workers=2), env=ENV, stdout=quiet, stderr=quiet) as launcher:
        while not any(path.is_file() for path in tmp_path.glob("step-*.pt")) and launcher.poll() is None:
            time.sleep(0.01)
        for worker in workers_of(launcher.pid)[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        assert launcher.wait() == 1
    last.rmdir()

    output = finished(tmp_path, workers=2)
    assert re.match(r"resuming from \S+/step-0000[123]0.pt \(epoch \d, step [123]0\)\n", output)
    assert state(tmp_path, 40)["progress"]["epoch"] > 0
    assert_same(state(tmp_path, 40), state(whole[0], 40))
    assert output.splitlines()[-2:] == whole[1].splitlines()[-2:]


def test_damaged_checkpoints_are_skipped(whole: tuple[Path, str], folder: Path) -> None:
    """Damaged checkpoints are skipped, and the newest intact one also works with another world size."""
    torn = (folder / "step-000040.pt").read_bytes()
    (folder / "step-000040.pt").write_bytes(torn[: len(torn) // 2])
    (folder / "step-000030.pt").write_bytes(b"")
    (folder / "step-1000000.pt").write_bytes(torn[:500] + bytes(500) + torn[1000:2000])
    output = finished(folder)
    assert re.findall(r"skipping \S+/step-(\d+).pt,", output) == ["1000000", "000040", "000030"]
    assert "step-000020.pt (epoch 0, step 20)" in output
    assert len(state(folder, 40)["random"]) == 1


def test_finished_run_says_so(whole: tuple[Path, str], folder: Path) -> None:
    """A finished run that is started again trains no step and succeeds."""
    output = finished(folder)
    assert "already finished: step 40 of 40\n" in output
    assert output.endswith("done\n")
    assert losses(output) == []


def test_another_shape_is_refused(folder: Path) -> None:
    """The error for a checkpoint of another model names it and both shapes."""
    result = run(folder, "--width", "64")
    assert result.returncode == 1
    assert re.search(r"step-000040.pt holds a model of another shape: .*32.*, not .*64", result.stderr)


def test_knows_nothing_of_raylaunch() -> None:
    """The example imports only torch and the standard library."""
    modules = set()
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").partition(".")[0])
    assert modules - sys.stdlib_module_names == {"torch"}
