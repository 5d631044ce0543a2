"""Whether the ranks go on to share what was equal on all of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from raylaunch.worker.state.rank_commits import RankSnapshots


@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_commit_whose_digests_differ_nothing_is_shared_and_rank_0_says_so_once(rank, capsys):
    equal = {1: True, 2: False}
    agreement = SimpleNamespace(had_same_digest=equal.__getitem__)
    snapshots = RankSnapshots(rank, agreement, does_share=True)
    assert [snapshots.were_equal(number) for number in (1, 2)] == [True, False]
    assert not snapshots.does_share
    assert snapshots.were_equal(3)  # it has nothing to compare
    said = capsys.readouterr().err
    assert said.count("each rank commits its own") == (rank == 0)


def test_ranks_that_share_nothing_compare_nothing():
    snapshots = RankSnapshots(0, SimpleNamespace(), does_share=False)
    assert snapshots.were_equal(1)
    assert (snapshots.find_digest(), [*snapshots.moves()]) == (0, [])
