"""Hosts that come and hosts that are taken away with notice: planned changes, in which no step is lost."""

from __future__ import annotations

import os
import signal

import pytest

from tests.cluster.conftest import wait_until
from tests.hosts.conftest import STEPS
from tests.hosts.steps import ended, hosts_by_rank, lost_steps, never_two_worlds

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


def test_notices_that_come_together_are_one_change_and_are_obeyed_before_the_deadline(launcher, hosts, now):
    """One drain by Ray's API, one as Kubernetes does it. The script does not cooperate and gets SIGTERM."""
    run = launcher.start(nnodes="1:3", node_timeout=100)
    first = run.wait_for_world(3)
    head, one, other = hosts.hosts
    run.signal(signal.SIGSTOP)
    noticed = now()
    hosts.drain(one, 100)
    hosts.sigterm(other)
    wait_until(lambda: {one.node_id, other.node_id} <= hosts.ask("draining").keys(), 100, "Ray to know of both")
    run.signal(signal.SIGCONT)
    os.kill(run.entered.pid, signal.SIGCONT)  # it stops when what it started does
    second = run.wait_for_world(1, after=first)
    assert second == first + 1
    assert hosts_by_rank(run, second) == [head.name]
    assert ended(run, first) < noticed + 100
    run.stop()
    assert run.result["exit_code"] == 130
