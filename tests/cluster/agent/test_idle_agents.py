"""What an idle agent can be used for, and for how long it is idle. Without Ray."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from raylaunch.cluster.agent.agent import per_process
from raylaunch.cluster.agent.lease import Lease
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.node.protocol.acceptor import SecretAddress
from raylaunch.node.protocol.node_spec import AgentSpec

JOB = Job(entrypoint=Entrypoint(script="train.py", args=["--lr", 1]), env={"A": "1"}, preload=["torch"])
SPEC = AgentSpec(
    job=JOB,
    run_dir="/runs/1",
    node="node-1",
    address=None,
    nproc=2,
    submitter_env={"B": "2", "COLUMNS": "80"},
    cwd="/home/me",
    ray_address="10.0.0.1:6379",
)


def differs(before: AgentSpec, after: AgentSpec) -> bool:
    return per_process(before) != per_process(after)


def test_another_run_of_the_same_kind():
    """Another script, other arguments, another folder for logs, another window."""
    job = replace(JOB, entrypoint=Entrypoint(script="eval.py"), node_timeout=9.0)
    told = replace(SPEC, job=job, run_dir="/runs/2", payload=b"f", node="node-2")
    told = replace(told, submitter_env={"B": "2", "COLUMNS": "120"})
    assert not differs(SPEC, replace(told, link_address=SecretAddress(host="", port=1, secret="")))


@pytest.mark.parametrize("name", ["env", "preload", "start_method", "nodes", "cpus_per_worker"])
def test_what_a_fork_server_was_started_with(name):
    changed = {"env": {"A": "2"}}.get(name, object())
    assert differs(SPEC, replace(SPEC, job=replace(JOB, **{name: changed})))
    assert differs(SPEC, replace(SPEC, run_dir="")), "logs go to a folder of the fork server's"


@pytest.mark.parametrize("name", ["nproc", "niceness", "cwd", "ray_address"])
def test_what_an_agent_makes_its_environment_of(name):
    assert differs(SPEC, replace(SPEC, **{name: object()}))
    assert differs(SPEC, replace(SPEC, submitter_env={"B": "3"}))


def test_an_idle_agent_has_a_longer_lease():
    """It expires all the same, and an expired one is not renewed; a released one does not end the process."""
    renewed: list[int] = []
    relieved = threading.Event()
    before = Lease(2.0, lambda _: None, relieved.set)
    before.report_sent()
    before.start()
    before.release()

    ended = threading.Event()
    lease = Lease(2.0, renewed.append, ended.set)
    lease.report_sent()
    lease.start()
    lease.agent_idle(5.0)
    assert renewed[-1] - renewed[0] > 2e9
    assert not ended.wait(2.5)
    assert ended.wait(200)
    lease.agent_idle(60.0)
    assert lease.expired
    assert not relieved.is_set(), "five seconds later"
