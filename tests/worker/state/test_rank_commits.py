"""Whether a rank waits until its last commit before a planned change is copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raylaunch.core.machine.commits import Commit
from raylaunch.worker.state import rank_commits
from raylaunch.worker.state.commit_agreement import Proposal
from raylaunch.worker.state.rank_commits import RankCommits, RankSnapshots


class Writer:
    """The page says that the commit is copied when it was asked so often; `withdrawn`: the request then is."""

    def __init__(self, *, awaits_copy: bool, withdrawn: bool = False, copies: bool = True) -> None:
        self.commits = self
        self.awaits_copy = awaits_copy
        self._copies = copies
        self._withdrawn = withdrawn
        self.asked = 0

    def copied_steps(self) -> int | None:
        self.asked += 1
        if not self._copies:
            return None
        return 7 if self.asked > 5 and not self._withdrawn else 3

    def is_save_committed(self, completed: int) -> bool:
        return completed == 7 and not (self._withdrawn and self.asked > 5)

    def record_alive(self) -> None:
        pass


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(rank_commits, "sleep", lambda _: None)
    found: Any = RankCommits()
    found.copies = SimpleNamespace(kept=None)
    found.to_restore = SimpleNamespace(interval=1)
    found.snapshots = RankSnapshots(0, found, does_share=False)
    return found


def test_the_digest_is_copied_from_its_device_with_the_commit(commits):
    commits.buffers = SimpleNamespace(write=lambda found, *, to_disk, moves: (found, to_disk, [*moves]))
    assert commits.write("found", to_disk=True) == ("found", True, [])
    vars(commits.snapshots)["_comparison"] = SimpleNamespace(moves=lambda: ["pair"])
    assert commits.write("found", to_disk=False) == ("found", False, ["pair"])


@pytest.mark.parametrize("withdrawn", [False, True])
def test_before_a_node_leaves_it_waits_until_it_is_copied_or_the_change_is_off(commits, withdrawn):
    writer = Writer(awaits_copy=True, withdrawn=withdrawn)
    commits.wait_for_copy(writer, 7)
    assert writer.asked > 5


def test_a_copy_that_is_not_made_is_not_waited_for_for_ever_and_that_is_said_once_per_node(
    commits, monkeypatch, capsys
):
    times = iter(range(100))
    monkeypatch.setattr(rank_commits, "monotonic", lambda: next(times))
    writer = Writer(awaits_copy=True)
    monkeypatch.setattr(writer, "copied_steps", lambda: 0)
    monkeypatch.setattr(writer, "is_save_committed", lambda _: True)
    commits.wait_for_copy(writer, 9)
    said = capsys.readouterr().err
    assert "the commit after 9 steps was not copied to another node within 10 s" in said
    monkeypatch.setenv("LOCAL_RANK", "1")
    commits.wait_for_copy(writer, 9)
    assert capsys.readouterr().err == ""


def test_it_does_not_wait_if_no_node_leaves(commits):
    """What it holds stays where it is."""
    writer = Writer(awaits_copy=False)
    commits.wait_for_copy(writer, 7)
    assert writer.asked == 0


def test_it_does_not_wait_for_a_commit_that_is_not_to_be_copied(commits):
    """The node makes no copies."""
    writer = Writer(awaits_copy=True, copies=False)
    commits.wait_for_copy(writer, 7)
    assert writer.asked == 1


def test_the_first_commit_goes_on_with_the_interval_that_was_restored(commits):
    """What is proposed comes with a commit, and before the first one there is none."""
    commits.to_restore.interval = 20
    commits.agreement = SimpleNamespace(wait=lambda number: Proposal(interval=3 if number else 1))
    assert [commits.wait_for_all(step).interval for step in (5, 25)] == [20, 3]


@pytest.mark.parametrize("kept", [None, Commit(1, 3)])
def test_the_first_commit_is_copied_at_once_if_what_is_restored_may_have_lost_its_second_host(commits, kept):
    """With `auto`, the second one may follow minutes later. A world of one host keeps nothing."""
    begun = []
    vars(commits)["_place"] = SimpleNamespace(attempt=2)
    commits.copies = SimpleNamespace(kept=kept, begin=begun.append)
    commits.agreement = SimpleNamespace(wait=lambda _: Proposal())
    assert [commits.wait_for_all(step).is_kept for step in (5, 6)] == [kept is not None, False]
    assert begun == ([Commit(2, 5)] if kept else [])


def test_a_commit_whose_shared_tensors_differ_is_dropped_and_not_copied(commits):
    dropped = []
    commits.agreement = SimpleNamespace(wait=lambda _: Proposal(), had_same_digest=lambda number: number != 1)
    commits.snapshots = RankSnapshots(1, commits.agreement, does_share=True)
    commits.buffers = SimpleNamespace(drop_newest=lambda: Commit(1, 5))
    commits.copies = SimpleNamespace(kept=None, drop=lambda commit, _: dropped.append(commit))
    commits.wait_for_all(5)
    assert dropped == []
    commits.wait_for_all(6)
    assert dropped == [Commit(1, 5)]
    commits.wait_for_all(7)
    assert dropped == [Commit(1, 5)]
