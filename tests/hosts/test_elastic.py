"""Hosts that come and hosts that are taken away with notice: planned changes, in which no step is lost."""

from __future__ import annotations

import pytest

from tests.hosts.conftest import STEPS
from tests.hosts.steps import hosts_by_rank, lost_steps, never_two_worlds

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def test_a_host_that_comes_is_taken_in_and_leaves_again_when_it_is_drained_with_no_step_lost(launcher, hosts):
    run = launcher.start(STEPS, "--saving", nnodes="1:4")
    first = run.wait_for_world(3)
    added = hosts.add()
    second = run.wait_for_world(4, after=first)
    assert hosts_by_rank(run, second) == [*hosts_by_rank(run, first), added.name]
    hosts.drain(added, 200)
    third = run.wait_for_world(3, after=second)
    assert hosts_by_rank(run, third) == hosts_by_rank(run, first)
    assert lost_steps(run) == []
    assert never_two_worlds(run)
    run.stop()
