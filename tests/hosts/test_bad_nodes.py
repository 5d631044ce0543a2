"""A host on which workers fail again and again is left out for a while.

What else makes it so, and when it is needed all the same, is shown in tests/core/machine.
"""

from __future__ import annotations

import pytest

from tests.hosts.conftest import STEPS
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
