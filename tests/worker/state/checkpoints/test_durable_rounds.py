"""When a commit is for the disk, and what is said if the disk is full or does not answer."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from raylaunch.worker.state.checkpoints.durable_folder import DurableFolder
from raylaunch.worker.state.checkpoints.durable_rounds import DurableRounds

FOLDER = DurableFolder("/shared", 600.0, 3)


@dataclass
class Buffers:
    """As much of `RankBuffers` as is looked at."""

    is_written: bool = True
    why: str = ""

    def failed_write(self) -> str:
        return self.why


def test_rank_0_proposes_one_after_a_while_if_the_last_one_is_on_disk():
    first, other = DurableRounds(FOLDER, 0, 0, now=0.0), DurableRounds(FOLDER, 1, 1, now=0.0)
    assert [first.is_due(Buffers(), now) for now in (599.0, 600.0)] == [False, True]
    assert not other.is_due(Buffers(), 1000.0)
    first.began(600.0, to_disk=True)
    first.began(601.0, to_disk=False)
    assert [first.is_due(Buffers(), now) for now in (1199.0, 1200.0)] == [False, True]
    assert not first.is_due(Buffers(is_written=False), 9999.0)


def test_the_ranks_agree_on_one_token_for_all_their_commits():
    agreement: Any = SimpleNamespace(agree=lambda _, value: value())
    rounds = DurableRounds(FOLDER, 0, 0, now=0.0)
    assert rounds.token(agreement) == rounds.token(agreement) > 0


def test_two_commits_in_a_row_are_never_for_the_disk():
    """They have one buffer, and the older one is needed until all ranks have the newer one."""
    rounds = DurableRounds(DurableFolder("/shared", 0.0, 3), 0, 0, now=0.0)
    rounds.began(1.0, to_disk=True)
    assert not rounds.is_due(Buffers(), 2.0)
    rounds.began(3.0, to_disk=False)
    assert rounds.is_due(Buffers(), 4.0)


def test_a_failure_is_said_once_for_each_node(capsys):
    rounds = [DurableRounds(FOLDER, rank, rank % 2, now=0.0) for rank in range(4)]
    for _ in range(2):
        for one in rounds:
            one.tell(Buffers(why="no space"), 1.0)
    assert capsys.readouterr().err == "raylaunch: no space; training goes on\n" * 2


def test_a_disk_that_does_not_answer_is_said_once(capsys):
    first, other = DurableRounds(FOLDER, 0, 0, now=0.0), DurableRounds(FOLDER, 2, 0, now=0.0)
    for now in (59.0, 61.0, 90.0):
        first.tell(Buffers(is_written=False), now)
        other.tell(Buffers(is_written=False), now)
    said = "writing a checkpoint to /shared takes longer than 61 seconds; no other one is begun before its end"
    assert capsys.readouterr().err.count(said) == 1
