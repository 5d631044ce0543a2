"""`--debug` on a Ray cluster: what is typed goes through the agent."""

from __future__ import annotations

import pytest

from tests.cli.output.test_raw_terminal import debug, start

__all__ = ["start"]

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_a_rank_of_a_cluster_is_debugged(start, cluster, tmp_path):
    debug(start("--debug", "1", rank=1, env=cluster.env()), tmp_path)
