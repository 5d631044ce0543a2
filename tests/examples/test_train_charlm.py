"""The character model learns under torchrun, and goes on from a folder on disk as if it had not been killed."""

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.private_cluster import free_ports
from tests.warm_command import WarmCommand
from tests.warm_python import WarmPython

SCRIPT = Path(__file__).parents[2] / "examples" / "train_charlm.py"
SMALL = "--steps 30 --log-every 1 --files 2 --context 32 --width 32 --layers 1 --lr 1e-2".split()  # noqa: SIM905
ENV = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "LOCAL_", "MASTER_", "RAYLAUNCH"))}
ENV |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(SCRIPT.parents[1])}

Start = Callable[..., list[WarmCommand]]


@pytest.fixture
def start(warm_torch: WarmPython, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts the ranks of a world; those that still run are killed at the end."""
    started: list[WarmCommand] = []
    durable = {"RAYLAUNCH_DURABLE": str(tmp_path / "durable"), "RAYLAUNCH_DURABLE_EVERY": "0.01"}

    def world(size: int, *more: str) -> list[WarmCommand]:
        (port,) = free_ports(1)
        env = ENV | durable | {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            WarmCommand(warm_torch, SCRIPT.stem, *SMALL, *more, env=env | {"RANK": str(rank)}, cwd=SCRIPT.parent)
            for rank in range(size)
        ]
        started.extend(ranks)
        return ranks

    yield world
    for rank in started:
        rank.kill()
        rank.wait()


def finished(ranks: list[WarmCommand]) -> str:
    """Return the output of rank 0 of a run that succeeds."""
    outputs = [rank.communicate(250) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), outputs
    return outputs[0][0]


def losses(output: str) -> list[str]:
    return re.findall(r"^step .* loss ([\d.]+)", output, re.MULTILINE)


@pytest.fixture(scope="module")
def whole(warm_torch: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the model and the output of a run of two ranks under torchrun that nobody kills."""
    folder = tmp_path_factory.mktemp("whole")
    model = folder / "model.pt"
    arguments = ("--standalone", "--nproc-per-node", "2", str(SCRIPT), *SMALL, "--save", str(model))
    env = ENV | {"PYTHON_EXEC": str(warm_torch.executable())}
    return model, finished([WarmCommand(warm_torch, "torch.distributed.run", *arguments, env=env, cwd=folder)])


def test_learns_under_plain_torchrun(whole: tuple[Path, str]) -> None:
    output = whole[1]
    assert output.startswith("starting from scratch\n")
    assert re.search(r"^final loss [\d.]+$", output, re.MULTILINE)
    assert float(losses(output)[-1]) < float(losses(output)[0]) - 0.3


def test_killed_and_started_again_is_the_same_run(start: Start, whole: tuple[Path, str], tmp_path: Path) -> None:
    """Two ranks that are killed and started again have the losses and, bit by bit, the parameters of that run."""
    killed = start(2)
    while not any(path.suffix == "" for path in (tmp_path / "durable").glob("step-*")):
        assert [rank.poll() for rank in killed] == [None, None], killed[0].communicate()
        time.sleep(0.01)
    for rank in killed:
        rank.kill()
        rank.communicate()

    model = tmp_path / "model.pt"
    rest = finished(start(2, "--save", str(model)))
    resumed = re.match(r"resuming after step (\d+) ", rest)
    assert resumed, rest
    assert (tmp_path / "durable" / "step-30" / ".metadata").exists()
    assert losses(rest) == losses(whole[1])[int(resumed[1]) :]
    assert rest.splitlines()[-2:] == whole[1].splitlines()[-2:]
    left, right = (torch.load(path, weights_only=True) for path in (model, whole[0]))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
