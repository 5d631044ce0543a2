"""`raylaunch.rank_env`: ranks for a caller's own actors, in its own placement group."""

from __future__ import annotations

from raylaunch.worker_group.rank_env import ranks_on


def test_ranks_of_one_node_follow_each_other() -> None:
    """LOCAL_RANK counts on a node, over all of its bundles."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    found = [tuple(int(env[name]) for name in names) for env in ranks_on(["a", "a", "b"])]
    assert found == [(0, 0, 3, 2, 0, 2), (1, 1, 3, 2, 0, 2), (2, 0, 3, 1, 1, 2)]
