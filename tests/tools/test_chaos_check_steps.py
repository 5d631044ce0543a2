"""The job of the chaos test ends at the same bits whatever happens to it, and the checker of its steps sees all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.warm_command import WarmCommand
from tests.warm_python import WarmPython
from tools.chaos.check_steps import Note, attempts, committed, problems, read, table

ROOT = Path(__file__).parents[2]
STEPS = 30
SECOND = 10**9


Start = Callable[..., list[WarmCommand]]


@pytest.fixture
def start(warm_torch: WarmPython) -> Iterator[Start]:
    """Starts the ranks of a world as a launcher would, and ends those that are left."""
    started, stores = [], []

    def world(folder: Path, attempt: int, size: int, *more: str) -> list[WarmCommand]:
        stores.append(torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(stores[-1].port), "WORLD_SIZE": str(size)}
        env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "RAYLAUNCH_ATTEMPT": str(attempt)}
        flags = ["--steps", str(STEPS), "--checkpoint-every", "5", "--samples", "7"]
        command = ["tools.chaos.train", str(folder), *flags, *more]
        ranks = [WarmCommand(warm_torch, *command, env=env | {"RANK": str(rank)}, cwd=ROOT) for rank in range(size)]
        started.extend(ranks)
        return ranks

    yield world
    for rank in started:
        rank.kill()
        rank.wait()


def finished(ranks: list[WarmCommand]) -> None:
    outputs = [rank.communicate() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), outputs


def test_the_job_ends_at_the_same_bits(start, tmp_path):
    """Alone and undisturbed, or killed in a world of two, which have unequal shares, and finished alone."""
    whole = start(tmp_path / "whole", 1, 1, "--step-seconds", "0")

    disturbed = tmp_path / "disturbed"
    ranks = start(disturbed, 1, 2, "--step-seconds", "0.2")
    while not (notes := read(disturbed)) or notes[-1].step < 7:
        assert [rank.poll() for rank in ranks] == [None, None]
        time.sleep(0.02)
    for rank in ranks:
        rank.kill()
        rank.wait()
    finished(start(disturbed, 2, 1, "--step-seconds", "0"))

    finished(whole)
    assert (disturbed / "final.bin").read_bytes() == (tmp_path / "whole" / "final.bin").read_bytes()
    notes = read(disturbed)
    assert problems(notes, STEPS) == []
    first, second = attempts(notes)
    assert (first.size, second.size, second.last) == (2, 1, STEPS)
    assert second.first % 5 == 1
    assert second.lost == first.last - second.first + 1


def steps(attempt: int, size: int, first: int, last: int, *, start: float | None = None) -> list[Note]:
    """What an attempt notes that does a step a second, the first when the run is that many seconds old."""
    at = [int(((first if start is None else start) + step - first) * SECOND) for step in range(first, last + 1)]
    return [
        Note(attempt=attempt, rank=rank, step=step, began=began, ended=began + SECOND // 2, world_size=size)
        for rank in range(size)
        for step, began in zip(range(first, last + 1), at, strict=True)
    ]


def test_a_run_as_it_should_be():
    """A planned resize loses nothing, a crash the steps since the checkpoint; some attempts do no step."""
    notes = [*steps(1, 2, 1, 9), *steps(2, 3, 10, 15), *steps(4, 2, 11, 20, start=30)]
    assert problems(notes, 20) == []
    assert [(one.attempt, one.size, one.lost, one.pause) for one in attempts(notes)] == [
        (1, 2, 0, 0.0),
        (2, 3, 0, 0.5),
        (4, 2, 5, 14.5),
    ]
    assert table(attempts(notes)).splitlines()[-1] == "      4      2  11-20           5  14.500 s"


def test_a_run_that_began_anew():
    """All hosts that had its state in memory were lost, so that fewer steps count than were done. Each is done again once."""
    notes = [*steps(1, 2, 1, 30), *steps(2, 2, 1, 10, start=40), *steps(3, 2, 11, 20, start=60)]
    assert problems(notes, 20) == []
    assert [one.lost for one in attempts(notes)] == [0, 10, 10]


def without(attempt: int, rank: int, *left_out: int) -> Callable[[Note], bool]:
    return lambda note: (note.attempt, note.rank) != (attempt, rank) or note.step not in left_out


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        (
            [*steps(1, 2, 1, 9), *steps(2, 2, 6, 20)],
            "attempt 1 did a step 3.500 s after attempt 2 had begun one",
        ),
        (
            [*steps(1, 1, 1, 9, start=50), *steps(2, 1, 10, 11), *steps(3, 1, 12, 20)],
            "attempt 1 did a step 46.500 s after attempt 3 had begun one",
        ),
        ([*steps(1, 2, 1, 9), *steps(2, 2, 11, 20)], "attempt 2 begins with step 11, but only 9 are done"),
        (steps(1, 2, 1, 19), "19 of 20 steps are done"),
        ([*steps(1, 2, 1, 20), *steps(2, 2, 11, 15, start=40)], "15 of 20 steps are done"),
        (filter(without(1, 1, 7), steps(1, 2, 1, 20)), "rank 1 of attempt 1 did not do one step after the other"),
        (filter(without(1, 1, 1), steps(1, 2, 1, 20)), "rank 1 of attempt 1 did not do one step after the other"),
        ([*steps(1, 2, 1, 20), *steps(1, 2, 20, 20)], "rank 0 of attempt 1 did not do one step after the other"),
        (filter(without(1, 1, 19, 20), steps(1, 2, 1, 20)), "rank 1 of attempt 1 is 2 steps behind"),
        ([*steps(1, 2, 1, 9), *steps(1, 3, 10, 20)], "attempt 1 has world sizes 2 and 3"),
        (
            [*steps(1, 1, 1, 20), Note(attempt=1, rank=1, step=9, began=9, ended=9, world_size=1)],
            "attempt 1 has a rank 1",
        ),
    ],
)
def test_what_must_not_be(notes, said):
    """Each is told, with who and when."""
    assert said in problems(sorted(notes), 20)


def test_a_rank_may_be_killed_before_it_tells_of_the_last_step():
    """The others have done it, so it was done."""
    assert problems(list(filter(without(1, 1, 20), steps(1, 2, 1, 20))), 20) == []


def test_a_line_that_was_cut_off_is_no_note(tmp_path):
    """A process may die while it writes."""
    (tmp_path / "1-0-host-7.steps").write_text("1 2 1 2 0 5\n3 4 1 2 0 6")
    assert read(tmp_path) == [Note(attempt=1, rank=0, step=5, began=1, ended=2, world_size=2)]


def test_a_step_is_committed_when_all_ranks_have_noted_it(tmp_path):
    """An attempt of which a rank has noted none has committed none."""
    (tmp_path / "1-0-a-7.commits").write_text("1 2 0 4\n1 2 0 5\n")
    (tmp_path / "1-1-a-8.commits").write_text("1 2 1 4\n1 2 1 5")
    (tmp_path / "2-0-a-9.commits").write_text("2 2 0 5\n")
    assert committed(tmp_path) == {1: 4}
