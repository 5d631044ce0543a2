"""The elastic example is the other one with `State` in place of its checkpoints."""

import ast
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.warm_command import WarmCommand
from tests.warm_python import WarmPython

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = "--steps 30 --log-every 1 --files 2 --context 32 --width 32 --layers 1".split()  # noqa: SIM905
ENV = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "LOCAL_", "MASTER_", "RAYLAUNCH"))}
ENV |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(EXAMPLES.parent)}

Start = Callable[..., WarmCommand]


@pytest.fixture
def start(warm_torch: WarmPython) -> Iterator[Start]:
    """Return a function that starts a rank; the ranks that still run are killed at the end."""
    started = []

    def one(*more: str, **variables: str) -> WarmCommand:
        arguments = ("train_charlm_elastic", *SMALL, *more)
        started.append(WarmCommand(warm_torch, *arguments, env=ENV | variables, cwd=EXAMPLES))
        return started[-1]

    yield one
    for rank in started:
        rank.kill()
        rank.wait()


def definitions(name: str) -> dict[str, str]:
    """Return the code of each function and each method of a script."""
    found = {}
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text("utf-8"))
    for one in tree.body:
        inner = one.body if isinstance(one, ast.ClassDef) else [one]
        found |= {
            f"{getattr(one, 'name', '')}.{part.name}": ast.unparse(part) for part in inner if hasattr(part, "name")
        }
    return found


def test_only_the_checkpoints_are_different() -> None:
    """What trains is the same in both scripts; what reads and writes checkpoints is in one of them only."""
    plain, elastic = definitions("train_charlm"), definitions("train_charlm_elastic")
    assert elastic.keys() < plain.keys()
    assert {name.split(".")[1] for name in plain.keys() - elastic.keys()} == {
        "step_of",
        "checkpoints",
        "write_checkpoint",
        "read_newest",
        "save",
    }
    changed = {name for name in elastic if elastic[name] != plain[name]}
    assert changed == {"parse_args.parse_args", "Trainer.__init__", "Trainer.start", "train.train", "main.main"}


def test_goes_on_from_a_folder_on_disk_as_if_it_had_not_been_killed(start: Start, tmp_path: Path) -> None:
    """A rank that is killed and started again, under plain Python, has the losses of one that was not killed."""
    whole, err = start().communicate(timeout=250)
    assert len(losses(whole)) == 30, err

    durable = {"RAYLAUNCH_DURABLE": str(tmp_path / "durable"), "RAYLAUNCH_DURABLE_EVERY": "0.01"}
    killed = start(**durable)
    while not any(path.suffix == "" for path in (tmp_path / "durable").glob("step-*")):
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.01)
    killed.kill()
    killed.communicate()

    rest, err = start("--save", str(tmp_path / "model.pt"), **durable).communicate(timeout=250)
    found = re.match(r"resuming after step (\d+) ", rest)
    assert found, rest + err
    assert losses(rest) == losses(whole)[int(found[1]) :]
    assert rest.splitlines()[-2:] == whole.splitlines()[-2:]
    assert (tmp_path / "model.pt").stat().st_size > 0


def losses(output: str) -> list[str]:
    return re.findall(r"^step .* loss ([\d.]+)", output, re.MULTILINE)
