"""The example that knows raylaunch: three lines are different, and a planned resize loses no step."""

import difflib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from raylaunch.worker import page
from raylaunch.worker.page import Page, slot

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_charlm_elastic.py"
SMALL = "--checkpoint-every 1000 --log-every 1 --files 2 --context 32 --width 32 --layers 1".split()  # noqa: SIM905
ENV = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "LOCAL_", "MASTER_", "RAYLAUNCH"))}
ENV |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(EXAMPLES.parent)}


def body(path: Path) -> list[str]:
    """All but the docstring."""
    return path.read_text("utf-8").split('"""\n\n', maxsplit=1)[1].splitlines()


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a rank, and ends it at last if it is still there."""
    started = []

    def one(steps: int, **variables: str) -> subprocess.Popen[str]:
        arguments = [sys.executable, str(SCRIPT), *SMALL, "--steps", str(steps), "--checkpoint-dir", str(tmp_path)]
        piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(arguments, env=ENV | variables, **piped))
        return started[-1]

    yield one
    for rank in started:
        rank.kill()
        rank.wait()


@pytest.fixture
def node() -> Iterator[tuple[Page, str]]:
    """A page as a node's agent keeps it for its workers, and what they are told of it."""
    shared, fd = Page.create()
    yield shared, f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


def test_three_lines_are_different() -> None:
    """One to import, one to ask, one to tell."""
    lines = difflib.ndiff(body(EXAMPLES / "train_charlm.py"), body(SCRIPT))
    changed = [line for line in lines if line[0] in "+-" and line[2:].strip()]
    assert changed == [
        "+ from raylaunch.worker import checkpointed, should_checkpoint",
        "-         if last or at.step % args.checkpoint_every == 0:",
        "+         if should_checkpoint(at.step) or last or at.step % args.checkpoint_every == 0:",
        "+             checkpointed(at.step)",
    ]


def test_a_planned_resize_loses_no_step(node: tuple[Page, str], start: Start) -> None:
    """Two ranks save the step they are told, and wait for their end; a world of one goes on with the next.

    By hand, under plain Python: what the launcher would say is written into the page.
    """
    shared, path = node
    shared.begin(1, 2)
    shared.numbers[page.ASK] = shared.numbers[page.SETTLED] = 7 + 1
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    world |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "RAYLAUNCH_ATTEMPT": "1"}
    ranks = [start(10_000, **world, RANK=str(rank), RAYLAUNCH_PAGE=f"{path}:{rank}") for rank in (0, 1)]
    while not all(shared.numbers[slot(rank) + page.WAITING] for rank in (0, 1)):
        assert [rank.poll() for rank in ranks] == [None, None], ranks[0].communicate()[0]
        time.sleep(0.02)
    assert [shared.numbers[slot(rank) + page.SAVED] for rank in (0, 1)] == [8, 8]
    for rank in ranks:
        rank.terminate()
    outputs = [rank.communicate(timeout=250)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [-signal.SIGTERM] * 2

    alone = start(10)  # outside a launch
    after, _ = alone.communicate(timeout=250)
    assert alone.returncode == 0, after
    assert "step-000007.pt (epoch" in after
    assert steps(outputs[0]) == [1, 2, 3, 4, 5, 6, 7]
    assert steps(after) == [8, 9, 10]


def steps(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step +(\d+)/", output, re.MULTILINE)]
