"""Who rests, for whom, and until when; which connection a run has. Without Ray."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any

import pytest

from raylaunch.cluster.agent.lease import Lease
from raylaunch.cluster.agent.link import Link, LinkServer
from raylaunch.cluster.fleet import agent_pool
from raylaunch.cluster.fleet.agent_pool import AgentPool, PooledAgent
from raylaunch.cluster.session.ray_session import SharedConnection
from raylaunch.core.job.job import Entrypoint, Job, RayOptions
from raylaunch.core.placement.packing import NodeFacts
from raylaunch.core.placement.plan import make_plan
from raylaunch.node.protocol.acceptor import SecretAddress
from raylaunch.node.protocol.node_spec import AgentSpec

JOB = Job(entrypoint=Entrypoint(script="train.py", args=["--lr", 1]), env={"A": "1"}, preload=["torch"])
TOLD = AgentSpec(
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
    return agent_pool.key_of(before) != agent_pool.key_of(after)


def test_another_run_of_the_same_kind_has_the_same_key():
    """Another script, other arguments, another folder for logs, another window."""
    job = replace(JOB, entrypoint=Entrypoint(script="eval.py"), node_timeout=9.0)
    told = replace(TOLD, job=job, run_dir="/runs/2", payload=b"f", node="node-2")
    told = replace(told, submitter_env={"B": "2", "COLUMNS": "120"})
    assert not differs(TOLD, replace(told, link_address=SecretAddress(host="", port=1, secret="")))


@pytest.mark.parametrize("name", ["env", "durable", "preload", "start_method", "nodes", "cpus_per_worker"])
def test_what_a_fork_server_was_started_with_is_in_the_key(name):
    changed = {"env": {"A": "2"}, "durable": "/checkpoints"}.get(name, object())
    assert differs(TOLD, replace(TOLD, job=replace(JOB, **{name: changed})))
    assert differs(TOLD, replace(TOLD, run_dir="")), "logs go to a folder of the fork server's"


@pytest.mark.parametrize("name", ["nproc", "niceness", "cwd", "ray_address"])
def test_what_an_agent_makes_its_environment_of_is_in_the_key(name):
    assert differs(TOLD, replace(TOLD, **{name: object()}))
    assert differs(TOLD, replace(TOLD, submitter_env={"B": "3"}))


class Agents:
    """A pool, and what became of those who were in it."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.empty = threading.Event()
        self.pool = AgentPool(self.ended.extend, self.empty.set)

    def put(self, *names: str, seconds: float = 60.0, **changes: Any) -> None:
        self.pool.put([idle(name, **changes) for name in names], seconds)

    def idle(self) -> list[str]:
        return [str(one.pid) for one in self.pool.agents()]


def idle(name: str, *, host: str = "a", key: Any = None) -> PooledAgent:
    """Its fork server's process id is its name."""
    key = agent_pool.key_of(TOLD) if key is None else key
    return PooledAgent(name=name, handle=name, key=key, host=host, address="", nproc=2, pid=int(name), memory=0)


@pytest.fixture
def agents():
    found = Agents()
    yield found
    found.pool.close()


def test_a_run_takes_what_rests_on_its_host_and_has_its_key(agents):
    """Each once."""
    agents.put("1", "2")
    key = agent_pool.key_of(TOLD)
    assert agents.pool.take("b", key) is None
    assert agents.pool.take("a", agent_pool.key_of(replace(TOLD, nproc=3))) is None
    assert [agents.pool.take("a", key) for _ in range(3)] == ["1", "2", None]
    assert agents.ended == []


def test_only_those_of_the_last_run_rest(agents, until):
    """And of those, only who can serve the run that begins."""
    agents.put("1")
    agents.put("2", "3")
    assert agents.ended == ["1"]
    agents.pool.retain([agent_pool.key_of(TOLD)])
    assert agents.idle() == ["2", "3"]
    agents.pool.retain([{}])
    assert agents.idle() == []
    until(lambda: agents.ended == ["1", "2", "3"], 100, "their end")


def test_their_time_is_over(agents):
    """Then nothing is kept open for them; nor where a run leaves none."""
    agents.put("1", seconds=0.05)
    assert agents.empty.wait(200)
    assert agents.ended == ["1"]
    agents.empty.clear()
    agents.put()
    assert agents.empty.is_set()


def test_nothing_is_closed_while_agents_end(until):
    """Their time is over just when a run ends that leaves none. Ray would connect again for what they are told then."""
    may_end, found = threading.Event(), []

    def end(agents: list[str]) -> None:
        if agents:
            may_end.wait(200)
            found.append(agents)

    pool = AgentPool(end, lambda: found.append("empty"))
    pool.put([idle("1")], 0.01)
    until(lambda: not pool.agents(), 100, "the end of their time")
    run = threading.Thread(target=pool.close_if_empty)
    run.start()
    run.join(0.2)
    may_end.set()
    run.join(200)
    assert found == [["1"], "empty", "empty"]


def test_the_time_of_those_who_were_taken_is_their_runs(agents):
    agents.put("1", seconds=2.0)
    agents.pool.take("a", agent_pool.key_of(TOLD))
    assert not agents.empty.wait(2.2)


def test_an_agent_whose_process_ended_leaves_the_pool(agents, until, monkeypatch):
    """Its link tells. When the pool is closed, the links of the others end."""
    servers: list[LinkServer] = []

    class Server(LinkServer):
        def __init__(self, address: str) -> None:
            super().__init__(address)
            servers.append(self)

    monkeypatch.setattr(agent_pool, "LinkServer", Server)
    address = agents.pool.link_address(SecretAddress(host="127.0.0.1", port=1, secret="of the run"))
    first, second = agents.pool.new_names(2)
    ends = threading.Event()
    lines = [Link(address, first, ends.set), Link(address, second, lambda: None)]
    until(lambda: all(map(servers[0].is_up, (first, second))), 100, "the links")
    agents.pool.put([replace(idle("1"), name=first), replace(idle("2"), name=second)], 60.0)
    lines[1].release()
    until(lambda: agents.idle() == ["1"], 100, "the word of its end")
    agents.pool.close()
    assert ends.wait(200)
    assert agents.ended == ["1"]


def test_a_fork_of_the_process_leaves_them_alone(agents):
    """Its exit is not the process's."""
    agents.put("1")
    pid = os.fork()
    if pid == 0:
        agents.pool.close()
        os._exit(len(agents.ended))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert agents.idle() == ["1"]


def test_where_nobody_can_rest():
    """With GPUs, which Ray gives to who sits in a bundle, and where each run brings its own files."""
    node = NodeFacts(node_id="a", address="10.0.0.1", cpus=4, gpus=2, free_cpus=4, free_gpus=2)
    job = Job(keep_warm=60.0, nproc_per_node=2)
    assert "GPUs" in agent_pool.why_unusable(job, make_plan(job, (node,), local=False), in_process=False)
    plain = make_plan(job, (replace(node, gpus=0, free_gpus=0),), local=False)
    assert agent_pool.why_unusable(job, plain, in_process=False) == ""
    assert "own files" in agent_pool.why_unusable(
        replace(job, ray=RayOptions(working_dir=".")), plain, in_process=False
    )
    assert (
        agent_pool.why_unusable(replace(job, keep_warm=0.0, ray=RayOptions(working_dir=".")), plain, in_process=False)
        == ""
    )


def test_a_connection_outlives_a_run_until_it_is_ended():
    """It is not made twice for the same, and ended before another is made; never under a run."""
    ended: list[str] = []
    connection: SharedConnection[str] = SharedConnection(ended.append)
    for _ in range(2):
        with connection.used("a", lambda: "first") as made:
            assert made == "first"
            connection.end()
            assert ended == []
    assert connection.serves("a")
    with connection.used("b", lambda: "second") as made:
        assert (made, ended) == ("second", ["first"])
    connection.end()
    connection.end()
    assert ended == ["first", "second"]
    assert connection.made is None


def test_a_connection_that_cannot_be_made_leaves_none():
    connection: SharedConnection[str] = SharedConnection(lambda _: None)
    with pytest.raises(ZeroDivisionError), connection.used("a", lambda: str(1 / 0)):
        pass
    assert not connection.serves("a")


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
