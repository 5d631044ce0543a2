"""The example runs under torchrun, and a resumed run gives the same result as an uninterrupted run.

Only the uninterrupted run is torchrun's. The ranks of all runs are forked from a process that has imported torch.
"""

import ast
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.private_cluster import free_ports
from tests.warm_command import WarmCommand
from tests.warm_python import WarmPython

SCRIPT = Path(__file__).parents[2] / "examples" / "train_charlm.py"
SMALL = "--steps 40 --checkpoint-every 10 --keep 3 --files 2 --context 32 --width 32 --lr 1e-2".split()  # noqa: SIM905
LAUNCHER_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
ENV = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
ENV |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def start(warm_torch: WarmPython) -> Callable[..., list[WarmCommand]]:
    """Return a function that starts the ranks of a world as torchrun would."""

    def world(folder: Path, *more: str, size: int = 1) -> list[WarmCommand]:
        (port,) = free_ports(1)
        env = ENV | {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        arguments = [SCRIPT.stem, *SMALL, "--checkpoint-dir", str(folder), *more]
        return [
            WarmCommand(warm_torch, *arguments, env=env | {"RANK": str(rank)}, cwd=SCRIPT.parent)
            for rank in range(size)
        ]

    return world


def finished(ranks: list[WarmCommand]) -> str:
    """Return the output of rank 0 of a run that succeeds."""
    outputs = [rank.communicate(250) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), outputs
    assert "warn" not in "".join(err for _, err in outputs).lower()
    return outputs[0][0]


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


@pytest.fixture(scope="module")
def whole(warm_torch: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder and the output of an uninterrupted run of two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = ("--standalone", "--nproc-per-node", "2", str(SCRIPT), *SMALL, "--checkpoint-dir", str(folder))
    env = ENV | {"PYTHON_EXEC": str(warm_torch.executable())}
    return folder, finished([WarmCommand(warm_torch, "torch.distributed.run", *arguments, env=env, cwd=folder)])


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


def test_killed_and_resumed_is_the_same_run(start, whole: tuple[Path, str], tmp_path: Path) -> None:
    """A run of two ranks that is killed and started again ends with bitwise the same parameters."""
    last = tmp_path / "step-000040.pt"
    last.mkdir()  # so that it cannot come to its end before it is killed
    ranks = start(tmp_path, size=2)
    while not any(path.is_file() for path in tmp_path.glob("step-*.pt")):
        assert [rank.poll() for rank in ranks] == [None, None]
        time.sleep(0.01)
    for rank in ranks:
        rank.kill()
        rank.communicate()
    last.rmdir()

    output = finished(start(tmp_path, size=2))
    assert re.match(r"resuming from \S+/step-0000[123]0.pt \(epoch \d, step [123]0\)\n", output)
    assert state(tmp_path, 40)["progress"]["epoch"] > 0
    assert_same(state(tmp_path, 40), state(whole[0], 40))
    assert output.splitlines()[-2:] == whole[1].splitlines()[-2:]


def test_damaged_checkpoints_are_skipped(start, folder: Path) -> None:
    """Damaged checkpoints are skipped, and the newest intact one also works with another world size."""
    torn = (folder / "step-000040.pt").read_bytes()
    (folder / "step-000040.pt").write_bytes(torn[: len(torn) // 2])
    (folder / "step-000030.pt").write_bytes(b"")
    (folder / "step-1000000.pt").write_bytes(torn[:500] + bytes(500) + torn[1000:2000])
    output = finished(start(folder))
    assert re.findall(r"skipping \S+/step-(\d+).pt,", output) == ["1000000", "000040", "000030"]
    assert "step-000020.pt (epoch 0, step 20)" in output
    assert len(state(folder, 40)["random"]) == 1


def test_finished_run_says_so(start, folder: Path) -> None:
    """A finished run that is started again trains no step and succeeds."""
    output = finished(start(folder))
    assert re.search(r"already finished: step 40 of 40; remove \S+ to begin anew\n", output)
    assert output.endswith("done\n")
    assert losses(output) == []


def test_another_shape_is_refused(start, folder: Path) -> None:
    """The error for a checkpoint of another model names it and both shapes."""
    (rank,) = start(folder, "--width", "64")
    _, err = rank.communicate(250)
    assert rank.returncode == 1
    assert re.search(r"step-000040.pt holds a model of another shape: .*32.*, not .*64", err)


def test_knows_nothing_of_raylaunch() -> None:
    """The example imports only torch and the standard library."""
    modules = set()
    for node in ast.walk(ast.parse(SCRIPT.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add((node.module or "").partition(".")[0])
    assert modules - sys.stdlib_module_names == {"torch"}
