"""Which connection a run has, how long it stays open, and which runs leave no agents. Without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raylaunch.cluster.session import ray_session
from raylaunch.cluster.session.local_session import LocalSession
from raylaunch.cluster.session.ray_session import RaySession, SharedConnection
from raylaunch.core.job.job import Job
from raylaunch.core.placement.plan import NodeFacts, make_plan


def test_runs_at_one_time_share_a_connection():
    """It is closed after the last of them. A run with other options gets a view of it."""
    made: list[str] = []
    ended: list[str] = []
    connection: SharedConnection[str] = SharedConnection(ended.append)

    def make() -> str:
        made.append(str(len(made)))
        return made[-1]

    for number in ("0", "1"):
        with connection.used("a", make) as first:
            with connection.used("a", make) as second:
                assert first == second == connection.made == number
            assert ended == made[:-1]
        assert ended == made
        assert connection.made is None
    with connection.used("a", make):
        with connection.used("b", make) as view:
            assert view == "3"
        assert ended == ["0", "1"]
    assert ended == ["0", "1", "2"]


def test_a_connection_that_cannot_be_made_leaves_none():
    connection: SharedConnection[str] = SharedConnection(lambda _: None)
    with pytest.raises(ZeroDivisionError), connection.used("a", lambda: str(1 / 0)):
        pass
    assert connection.made is None


def test_runs_that_leave_no_agents(monkeypatch):
    """With GPUs, which Ray gives to who sits in a bundle, with other environments, and where the cluster ends."""
    environment: dict[str, Any] = {}
    context = SimpleNamespace(runtime_env=environment)
    monkeypatch.setattr(ray_session, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    node = NodeFacts(node_id="a", address="10.0.0.1", cpus=4, gpus=2, free_cpus=4, free_gpus=2)
    job = Job(nproc_per_node=2)
    plain = make_plan(
        job, (NodeFacts(node_id="a", address="10.0.0.1", cpus=4, gpus=0, free_cpus=4, free_gpus=0),), local=False
    )
    session = RaySession(address="10.0.0.1:6379", local=False, brings_files=False, job_id="1")
    assert session.why_not_warm(plain) == ""
    assert "GPUs" in session.why_not_warm(make_plan(job, (node,), local=False))
    environment["env_vars"] = {"A": "1"}
    assert "ray.working_dir" in session.why_not_warm(plain)
    local = RaySession(address="127.0.0.1:6379", local=True, brings_files=False, job_id="1")
    assert "ends with it" in local.why_not_warm(plain)
    assert "on a Ray cluster only" in LocalSession().why_not_warm(plain)
