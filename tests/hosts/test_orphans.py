"""No orphans: whatever is killed, the fixtures find no process, actor, group, socket or file on any host.

Of a driver whose workers simply run, and of one that stands still, it is shown in tests/cluster.
"""

from __future__ import annotations

import signal

import pytest

from tests.cluster.conftest import wait_until
from tests.hosts.steps import never_two_worlds

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
time.sleep(120)
"""


def test_a_driver_killed_while_it_waits_for_nodes(launcher, hosts):
    run = launcher.start(nnodes=4)
    run.wait_for(lambda: any("group" in line for line in hosts.ask("left")), name="the nodes to be asked for")
    run.signal(signal.SIGKILL)


def test_a_driver_killed_while_agents_start(launcher, hosts):
    run = launcher.start(preload=["torch"])
    run.wait_for(lambda: run.events("NodeGranted"), name="the first place")
    run.signal(signal.SIGKILL)


def test_a_driver_killed_while_workers_are_to_stop(launcher, hosts):
    run = launcher.start(DEAF)
    run.wait_for(lambda: len(run.events("WorkersStarted")) == 3, name="the workers")
    run.signal(signal.SIGINT)
    run.wait_for(lambda: run.actions("Stop"), name="the workers to be told")
    run.signal(signal.SIGKILL)


def test_an_agent_whose_raylet_was_killed(launcher, hosts):
    """A raylet is killed on a healthy host: what ran there ends, and the others go on."""
    run = launcher.start(nnodes="2:3")
    first = run.wait_for_world(3)
    hosts.kill_raylet(hosts[2])
    run.wait_for(lambda: run.processes(hosts[2]) == [], name="all there to end")
    run.wait_for_world(2, after=first)
    assert never_two_worlds(run)
    run.stop()


def test_a_run_ends_when_the_head_does_not_answer_its_driver_any_more(launcher, hosts):
    """A host that is cut off from the driver ends its part by itself. Ray would do so after minutes."""
    head, one, _ = hosts.hosts
    run = launcher.start(nnodes="2:3", node_timeout=3, on=one, around={"RAY_gcs_rpc_server_reconnect_timeout_s": "4"})
    run.wait_for_world(3)
    hosts.cut(head, to=one)
    hosts.cut(one, to=head)
    run.wait()
    assert run.code == run.result["exit_code"] == 3, run.err
    assert "error: the head of the Ray cluster is gone: it does not answer for 2 s" in run.err
    wait_until(lambda: run.everywhere() == [], 100, "all hosts to be clean")
    assert never_two_worlds(run)


def test_a_driver_that_was_cut_off_from_all_others_trains_again_when_it_is_healed(launcher, hosts):
    run = launcher.start(nnodes="2:3", node_timeout=6)
    first = run.wait_for_world(3)
    hosts.cut(hosts.head)
    run.wait_for(lambda: not any(run.workers(host) for host in hosts.hosts), name="all workers to end")
    hosts.heal(hosts.head)
    run.wait_for_world(3, after=first)
    assert never_two_worlds(run)
    run.stop()
