"""A host on which workers fail again and again is left out for a while, and another takes its place if there is one."""

from __future__ import annotations

import signal

import pytest

from tests.hosts.conftest import STEPS
from tests.hosts.host import send
from tests.hosts.steps import hosts_by_rank, never_two_worlds

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

# A host that is alone is needed: it is not left out, and a slow start of the others must not make it so.
BAD = """
import os, signal, socket, threading
if socket.gethostname() == os.environ["BAD"] and os.environ["WORLD_SIZE"] != "1":
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGBUS)).start()
"""


def test_the_others_go_on_without_it(launcher, hosts):
    bad = hosts[2]
    run = launcher.start(BAD + STEPS, nnodes="1:3", max_restarts=5, exclude_after=2, env={"BAD": bad.name})
    run.wait_for(lambda: run.actions("Cordon"), name="the host to be left out")
    attempt = run.wait_for_world(2, after=max(event["attempt"] for event in run.events("WorkersExited")))
    assert bad.name not in hosts_by_rank(run, attempt)
    assert never_two_worlds(run)
    (cordoned,) = run.actions("Cordon")
    assert cordoned["host"] == bad.node_id
    assert "left out for 60 s after 2 failures" in cordoned["why"]
    run.wait_for(lambda: run.processes(bad) == [], name="its agent to end")
    run.stop()
    assert run.result["exit_code"] == 130


def test_a_job_of_fixed_size_takes_another_host(launcher, hosts):
    """If there are too few hosts without it, it is left out for as long as another one takes to come."""
    bad = hosts[1]
    run = launcher.start(BAD + STEPS, nnodes=2, spares=1, max_restarts=5, exclude_after=2, env={"BAD": bad.name})
    run.wait_for(lambda: bad.name not in hosts_by_rank(run, run.wait_for_world(2)), name="the other hosts to train")
    assert never_two_worlds(run)
    run.stop()


def test_a_host_that_is_lost_again_and_again_is_left_out(launcher, hosts):
    """The run is not interrupted each time it comes back."""
    bad = hosts[2]
    run = launcher.start(nnodes="1:3", exclude_after=2)
    attempt = 0
    for _ in range(2):
        attempt = run.wait_for_world(3, after=attempt)
        send((process.pid for process in run.processes(bad, "raylaunch: agent")), signal.SIGKILL)
    attempt = run.wait_for_world(2, after=attempt)
    (cordoned,) = run.actions("Cordon")
    assert cordoned["host"] == bad.node_id
    assert run.actions("Launch")[-1]["why"].endswith("is left out for 60 s after 2 failures")
    assert never_two_worlds(run)
    run.wait_for(lambda: run.processes(bad) == [], name="all there to end")
    run.stop()
