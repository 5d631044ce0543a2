"""Who rests, for whom, and until when; which connection a run has. Without Ray."""

from __future__ import annotations

import os
import threading
from dataclasses import fields, replace
from typing import Any

import pytest

from raylaunch.cluster import warm
from raylaunch.cluster.agent import AgentSettings
from raylaunch.cluster.connection import Connection
from raylaunch.cluster.lease import Lease
from raylaunch.cluster.lifeline import Anchor, Line
from raylaunch.cluster.warm import Pool, Rester
from raylaunch.core import streams
from raylaunch.core.job import Job, RayOptions
from raylaunch.core.layout import NodeFacts
from raylaunch.core.plan import make_plan
from raylaunch.node.settings import NodeSettings

SETTINGS = NodeSettings(
    node="node-1",
    address="",
    run_dir="/runs/1",
    run_id="1",
    max_restarts=0,
    kind="script",
    target="train.py",
    args=("--lr", 1),
    env={"A": "1"},
    cwd="",
    backend=None,
    preload=("torch",),
    start_method="forkserver",
)
TOLD = AgentSettings(
    settings=SETTINGS,
    address=None,
    nproc=2,
    rules={},
    submitter_env={"B": "2", "COLUMNS": "80"},
    cwd="/home/me",
    ray_address="10.0.0.1:6379",
    view=streams.view(Job()),
    node_timeout=5.0,
)


def differs(before: AgentSettings, after: AgentSettings) -> bool:
    return warm.key(before) != warm.key(after)


def test_another_run_of_the_same_kind_has_the_same_key():
    """Another script, other arguments, another folder for logs, another window."""
    settings = replace(SETTINGS, node="node-2", run_dir="/runs/2", run_id="2", target="eval.py", args=(), payload=b"f")
    told = replace(TOLD, settings=settings, submitter_env={"B": "2", "COLUMNS": "120"}, node_timeout=9.0)
    assert not differs(TOLD, replace(told, anchor=Anchor(address="", port=1, secret="")))


@pytest.mark.parametrize("name", ["env", "preload", "start_method", "kept"])
def test_what_a_fork_server_was_started_with_is_in_the_key(name):
    settings = replace(SETTINGS, **{name: object()})
    assert differs(TOLD, replace(TOLD, settings=settings))


@pytest.mark.parametrize("name", ["nproc", "rules", "cwd", "ray_address"])
def test_what_an_agent_makes_its_environment_of_is_in_the_key(name):
    assert differs(TOLD, replace(TOLD, **{name: object()}))
    assert differs(TOLD, replace(TOLD, submitter_env={"B": "3"}))


def test_what_is_not_in_the_key_is_known_by_name():
    """A field that is added to what an agent is told is in the key, until somebody says that it need not be."""
    names = {field.name for kind in (AgentSettings, NodeSettings) for field in fields(kind)}
    assert names >= warm._OF_A_RUN
    assert set(warm.key(TOLD)) == names - warm._OF_A_RUN


class Agents:
    """A pool, and what became of those who were in it."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.empty = threading.Event()
        self.pool = Pool(self.ended.extend, self.empty.set)

    def rest(self, *names: str, seconds: float = 60.0, **changes: Any) -> None:
        self.pool.put([rester(name, **changes) for name in names], seconds)

    def resting(self) -> list[str]:
        return [str(one.pid) for one in self.pool.resting()]


def rester(name: str, *, host: str = "a", key: Any = None) -> Rester:
    """Its fork server's process id is its name."""
    key = warm.key(TOLD) if key is None else key
    return Rester(name=name, agent=name, key=key, host=host, address="", nproc=2, pid=int(name), memory=0)


@pytest.fixture
def agents():
    found = Agents()
    yield found
    found.pool.close()


def test_a_run_takes_what_rests_on_its_host_and_has_its_key(agents):
    """Each once."""
    agents.rest("1", "2")
    key = warm.key(TOLD)
    assert agents.pool.take("b", key) is None
    assert agents.pool.take("a", warm.key(replace(TOLD, nproc=3))) is None
    assert [agents.pool.take("a", key) for _ in range(3)] == ["1", "2", None]
    assert agents.ended == []


def test_only_those_of_the_last_run_rest(agents, until):
    """And of those, only who can serve the run that begins."""
    agents.rest("1")
    agents.rest("2", "3")
    assert agents.ended == ["1"]
    agents.pool.keep([warm.key(TOLD)])
    assert agents.resting() == ["2", "3"]
    agents.pool.keep([{}])
    assert agents.resting() == []
    until(lambda: agents.ended == ["1", "2", "3"], 10, "their end")


def test_their_time_is_over(agents):
    """Then nothing is kept open for them; nor where a run leaves none."""
    agents.rest("1", seconds=0.05)
    assert agents.empty.wait(10)
    assert agents.ended == ["1"]
    agents.empty.clear()
    agents.rest()
    assert agents.empty.is_set()


def test_the_time_of_those_who_were_taken_is_their_runs(agents):
    agents.rest("1", seconds=0.05)
    agents.pool.take("a", warm.key(TOLD))
    assert not agents.empty.wait(0.2)


def test_one_whose_process_is_gone_rests_no_more(agents, until):
    """As its line tells; the others do. When all are closed, their lines end."""
    anchor = agents.pool.anchor(Anchor(address="127.0.0.1", port=1, secret="of the run"))
    first, second = agents.pool.names(2)
    ends = threading.Event()
    lines = [Line(anchor, first, ends.set), Line(anchor, second, lambda: None)]
    until(lambda: all(map(agents.pool._lines.holds, (first, second))), 10, "the lines")
    agents.pool.put([replace(rester("1"), name=first), replace(rester("2"), name=second)], 60.0)
    lines[1].release()
    until(lambda: agents.resting() == ["1"], 10, "the word of its end")
    agents.pool.close()
    assert ends.wait(10)
    assert agents.ended == ["1"]


def test_a_fork_of_the_process_leaves_them_alone(agents):
    """Its exit is not the process's."""
    agents.rest("1")
    pid = os.fork()
    if pid == 0:
        agents.pool.close()
        os._exit(len(agents.ended))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert agents.resting() == ["1"]


def test_where_nobody_can_rest():
    """With GPUs, which Ray gives to who sits in a bundle, and where each run brings its own files."""
    node = NodeFacts(node_id="a", address="10.0.0.1", cpus=4, gpus=2, free_cpus=4, free_gpus=2)
    job = Job(keep_warm=60.0, nproc_per_node=2)
    assert "GPUs" in warm.forbidden(job, make_plan(job, (node,), local=False), in_process=False)
    plain = make_plan(job, (replace(node, gpus=0, free_gpus=0),), local=False)
    assert warm.forbidden(job, plain, in_process=False) == ""
    assert "own files" in warm.forbidden(replace(job, ray=RayOptions(working_dir=".")), plain, in_process=False)
    assert warm.forbidden(replace(job, keep_warm=0.0, ray=RayOptions(working_dir=".")), plain, in_process=False) == ""


def test_a_connection_outlives_a_run_until_it_is_ended():
    """It is not made twice for the same, and ended before another is made; never under a run."""
    ended: list[str] = []
    connection: Connection[str] = Connection(ended.append)
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
    connection: Connection[str] = Connection(lambda _: None)
    with pytest.raises(ZeroDivisionError), connection.used("a", lambda: str(1 / 0)):
        pass
    assert not connection.serves("a")


def test_an_agent_that_rests_may_be_left_alone_longer():
    """As long as it is told, and no longer; unless what it had was over before, or another run has begun."""
    renewed: list[int] = []
    ended = threading.Event()
    lease = Lease(0.2, renewed.append, ended.set)
    lease.answering()
    lease.start()
    lease.rest(1.5)
    assert renewed[-1] - renewed[0] > 1e9
    assert not ended.wait(0.4)
    assert ended.wait(10)
    lease.rest(60.0)
    assert lease.over

    relieved = threading.Event()
    before = Lease(0.1, renewed.append, relieved.set)
    before.answering()
    before.start()
    before.release()
    assert not relieved.wait(0.3)
