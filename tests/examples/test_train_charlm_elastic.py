"""The elastic example differs in three lines, and loses no step in a planned resize."""

import difflib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from raylaunch.worker.heartbeats import shared_page
from raylaunch.worker.heartbeats.shared_page import SharedPage, slot_offset
from tests.warm_command import WarmCommand
from tests.warm_python import WarmPython

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_charlm_elastic.py"
SMALL = "--checkpoint-every 1000 --log-every 1 --files 2 --context 32 --width 32 --layers 1".split()  # noqa: SIM905
ENV = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD", "LOCAL_", "MASTER_", "RAYLAUNCH"))}
ENV |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(EXAMPLES.parent)}


def body(path: Path) -> list[str]:
    """Return the lines of a script without its docstring."""
    return path.read_text("utf-8").split('"""\n\n', maxsplit=1)[1].splitlines()


Start = Callable[..., WarmCommand]


@pytest.fixture
def start(warm_torch: WarmPython, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a rank; the ranks that still run are killed at the end."""
    started = []

    def one(steps: int, **variables: str) -> WarmCommand:
        arguments = [SCRIPT.stem, *SMALL, "--steps", str(steps), "--checkpoint-dir", str(tmp_path)]
        started.append(WarmCommand(warm_torch, *arguments, env=ENV | variables, cwd=EXAMPLES))
        return started[-1]

    yield one
    for rank in started:
        rank.kill()
        rank.wait()


@pytest.fixture
def node() -> Iterator[tuple[SharedPage, str]]:
    """Return a heartbeat page as an agent has it, and the variables that tell the workers of it."""
    shared, fd = SharedPage.create()
    yield shared, f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


def test_three_lines_are_different() -> None:
    """One imports, one calls `should_checkpoint`, one calls `checkpointed`."""
    lines = difflib.ndiff(body(EXAMPLES / "train_charlm.py"), body(SCRIPT))
    changed = [line for line in lines if line[0] in "+-" and line[2:].strip()]
    assert changed == [
        "+ from raylaunch.worker import checkpointed, should_checkpoint",
        "-         if last or at.step % args.checkpoint_every == 0:",
        "+         if should_checkpoint(at.step) or last or at.step % args.checkpoint_every == 0:",
        "+             checkpointed(at.step)",
    ]


def test_a_planned_resize_loses_no_step(node: tuple[SharedPage, str], start: Start) -> None:
    """Two ranks save the step that is proposed and wait for SIGTERM; a single rank then continues with the next step.

    The ranks run under plain Python; the test writes into the page what an agent would write.
    """
    shared, path = node
    shared.reset(1, 2)
    shared.numbers[shared_page.PROPOSED_STEP] = shared.numbers[shared_page.COMMITTED_STEP] = 7 + 1
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    world |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "RAYLAUNCH_ATTEMPT": "1"}
    ranks = [start(10_000, **world, RANK=str(rank), RAYLAUNCH_PAGE=f"{path}:{rank}") for rank in (0, 1)]
    while not all(shared.numbers[slot_offset(rank) + shared_page.WAITING_FOR_STOP] for rank in (0, 1)):
        assert [rank.poll() for rank in ranks] == [None, None], ranks[0].communicate()
        time.sleep(0.02)
    assert [shared.numbers[slot_offset(rank) + shared_page.SAVED_STEP] for rank in (0, 1)] == [8, 8]
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    outputs = [rank.communicate(timeout=250)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [-signal.SIGTERM] * 2

    alone = start(10)  # outside a launch
    after, err = alone.communicate(timeout=250)
    assert alone.returncode == 0, err
    assert "step-000007.pt (epoch" in after
    assert steps(outputs[0]) == [1, 2, 3, 4, 5, 6, 7]
    assert steps(after) == [8, 9, 10]


def steps(output: str) -> list[int]:
    return [int(step) for step in re.findall(r"^step +(\d+)/", output, re.MULTILINE)]
