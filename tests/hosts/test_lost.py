"""Hosts that die, fall silent and come back: the others go on, no two attempts train, no restart is spent."""

from __future__ import annotations

import pytest

from tests.hosts.steps import ended, hosts_by_rank, never_two_worlds

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

TIMEOUT = 6
"""`node_timeout` of these runs. Ray itself takes half a minute to notice that a host is gone, a minute for a cut."""


def test_the_world_goes_on_without_a_host_that_was_cut_off_which_stops_by_itself_and_comes_back_as_another_node(
    launcher, hosts, now
):
    run = launcher.start(nnodes="2:3", node_timeout=TIMEOUT)
    first = run.wait_for_world(3)
    lost = hosts[2]
    cut = now()
    hosts.cut(lost)
    run.wait_for(lambda: run.events("NodeLost"), name="the loss to be known")
    assert hosts.alive(lost), "Ray knew it first"
    second = run.wait_for_world(2, after=first)
    assert ended(run, first) > cut  # it went on for a while, as those that are cut off do
    assert lost.name not in hosts_by_rank(run, second)
    assert run.workers(lost) == []
    hosts.heal(lost)
    third = run.wait_for_world(3, after=second)
    assert never_two_worlds(run)
    assert hosts_by_rank(run, third)[-1] == lost.name
    assert len(set(run.nodes_on(lost))) == 2
    run.stop()
    assert run.result["exit_code"] == 130


def test_nobody_is_lost_by_way_of_a_bad_link(launcher, hosts, now):
    """Packets are late, out of order and sometimes lost, and yet there is one attempt."""
    run = launcher.start(node_timeout=5)
    run.wait_for_world(3)
    hosts.slow(hosts[2], 200, jitter=100, loss=0.05)
    since = now()
    run.wait_for(lambda: run.steps()[-1].at > since + 6, name="more time to pass than a node may be silent")
    run.stop()
    assert run.events("NodeLost") == []
    assert {step.attempt for step in run.steps()} == {1}


def test_a_host_that_stood_still_does_not_take_up_where_it_was(launcher, hosts):
    run = launcher.start(nnodes="2:3", node_timeout=TIMEOUT)
    first = run.wait_for_world(3)
    lost = hosts[2]
    before = {worker.pid for worker in run.workers(lost)}
    assert len(before) == 1
    hosts.pause(lost)
    second = run.wait_for_world(2, after=first)
    hosts.resume(lost)
    run.wait_for(lambda: not before & {worker.pid for worker in run.workers(lost)}, name="the stale workers to end")
    run.wait_for_world(3, after=second)
    assert never_two_worlds(run)
    run.stop()
