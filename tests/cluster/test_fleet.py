"""The fleet on a real Ray whose three nodes share this machine. The agents only say that they are up."""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray
from ray._private.authentication_test_utils import reset_auth_token_state
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import placement_group_table

from raylaunch.cluster import actor, ray_fleet
from raylaunch.cluster.agent import AgentUp, Words
from raylaunch.cluster.fleet import Draining, Gone, Granted, Heard, Hopeless
from raylaunch.cluster.inventory import nodes
from raylaunch.cluster.placement import Reservation
from raylaunch.cluster.ray_fleet import RayFleet
from raylaunch.core.job import Entrypoint, Job
from raylaunch.core.plan import make_plan
from raylaunch.errors import ClusterError
from tests.cluster.conftest import left_in_ray, wait_until
from tests.fakes import READY
from tests.private_cluster import Cluster, private_cluster

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    """Connected to, from this process."""
    with private_cluster(cpus=1, lean=True) as cluster:
        for _ in range(2):
            cluster.add_node(cpus=1)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in cluster.env().items():
                patch.setenv(name, value)
            reset_auth_token_state()
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
            ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
            yield cluster
            ray.shutdown()
        reset_auth_token_state()


@dataclass
class Told:
    """As much of an agent's settings as the fleet touches."""

    address: str | None = None
    nproc: int = 0
    settings: Any = None


@dataclass
class Settings:
    node: str = ""


class Agent:
    """Comes up where it may."""

    def __init__(self, told: Told) -> None:
        host = ray.get_runtime_context().get_node_id()
        self.unsaid = [AgentUp(node_id=host, address="", nproc=told.nproc, ready=READY)]

    async def words(self) -> bytes:
        if not self.unsaid:
            await asyncio.sleep(1000)
        return pickle.dumps(Words(now=float(os.getpid()), events=[self.unsaid.pop()]))

    async def close(self) -> None:
        pass


class Unable(Agent):
    def __init__(self, told: Told) -> None:
        raise FileNotFoundError("no such folder")


class Busy(Agent):
    """Takes its time for its results, and says something meanwhile."""

    async def words(self) -> bytes:
        if not self.unsaid:
            await asyncio.sleep(0.1)
            return pickle.dumps(Words(now=0.0, events=[]))
        return await super().words()

    async def values(self) -> dict[int, bytes]:
        await asyncio.sleep(2.0)
        return {0: b"value"}


class Silent(Agent):
    async def values(self) -> dict[int, bytes]:
        await asyncio.sleep(1000)
        return {}


class Dying(Agent):
    def __init__(self, told: Told) -> None:
        os._exit(1)


@dataclass
class Crew:
    """A fleet, and a driver that does as much as must be done."""

    fleet: RayFleet
    inbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    items: list[Any] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    #: By node, what is up: its host and its process.
    up: dict[str, tuple[str, int]] = field(default_factory=dict)

    def until(self, done: Callable[[], object], seconds: float = 100) -> None:
        """Take what is told, until then."""
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, self.items
            try:
                item = self.inbox.get(timeout=0.05)
            except queue.Empty:
                continue
            self.items.append(item)
            if isinstance(item, Heard):
                for word in item.words.events:
                    if self.fleet.joined(item.node, word.node_id):
                        self.up[item.node] = (word.node_id, int(item.words.now))
            elif isinstance(item, Gone):
                self.up.pop(item.node, None)
                self.fleet.replace(item)

    def count(self, number: int) -> None:
        """Until so many are up."""
        self.until(lambda: len(self.up) == number)

    def told(self, kind: type) -> list[Any]:
        return [item for item in self.items if isinstance(item, kind)]


@pytest.fixture
def crew(hosts: Cluster) -> Iterator[Callable[..., Crew]]:
    """Start one; nothing is left of it."""
    crews: list[Crew] = []

    def start(nnodes: str, agent: type = Agent, **job: Any) -> Crew:
        wanted = Job(entrypoint=Entrypoint(script="train.py"), nnodes=nnodes, **job)
        plan = make_plan(wanted, nodes(local=False), local=False)
        lines: list[str] = []
        found = Crew(RayFleet(plan, Told(settings=Settings()), lines.append), lines=lines)
        found.fleet._actor_class = ray.remote(max_restarts=0)(agent)
        crews.append(found)
        found.fleet.start(found.inbox.put)
        return found

    yield start
    for each in crews:
        each.fleet.close()
    wait_until(lambda: left_in_ray(hosts) == [], 100, "actors and placement groups to be gone")


def test_as_many_as_there_are_hosts(crew):
    """Gang, further nodes and a spare one: each on a host of its own, announced before it is up."""
    found = crew("1:2", spares=1)
    found.count(3)
    assert len({host for host, _ in found.up.values()}) == 3
    assert {item.node: item.host for item in found.told(Granted)} == {
        node: host for node, (host, _) in found.up.items()
    }
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    assert all(item.address == addresses[item.host] for item in found.told(Granted))


def test_an_agent_that_died_comes_back(crew):
    """Where there is no other host, on the one it was on; as a new node. What was asked for elsewhere is taken back."""
    found = crew("3")
    found.count(3)
    host, pid = found.up["node-2"]
    os.kill(pid, signal.SIGKILL)
    found.until(lambda: found.told(Gone))
    assert [(item.node, item.why, item.silent) for item in found.told(Gone)] == [("node-2", "its agent died", False)]
    found.count(3)
    assert host in {where for where, _ in found.up.values()}
    assert "node-2" not in found.up
    wait_until(lambda: groups("PENDING") == 0, 100, "what was asked for elsewhere to be taken back")


def test_an_agent_that_is_silent_is_replaced_on_another_host(crew):
    """It cannot be ended, since it does not run; nobody waits for it, and the other host takes its place."""
    found = crew("2")
    found.count(2)
    host, pid = found.up["node-2"]
    os.kill(pid, signal.SIGSTOP)
    other = {node["NodeID"] for node in ray.nodes()} - {where for where, _ in found.up.values()}
    found.inbox.put(Gone(node="node-2", why="nothing was heard of it", silent=True))
    found.until(lambda: "node-2" not in found.up)
    found.count(2)
    assert other | {host} >= {where for where, _ in found.up.values()} - {found.up["node-1"][0]}


def test_a_host_that_is_shunned_and_readmitted(crew):
    """Its agent stays up beside another; what would start there waits until it is readmitted."""
    found = crew("1:2")
    found.count(2)
    here = found.up["node-1"][0]
    (third,) = {node["NodeID"] for node in ray.nodes()} - {where for where, _ in found.up.values()}
    found.fleet.shun(third)
    found.fleet.shun(here)
    wait_until(lambda: groups("PENDING") == 1, 100, "another place to be asked for")
    assert len(found.up) == 2
    found.fleet.readmit(third)
    found.count(3)
    assert third in {where for where, _ in found.up.values()}


def test_agents_that_cannot_start(crew):
    """While none ever came up, nothing is to be hoped for: at once where the reason is its own, else the third time."""
    for agent, tries, why in ((Unable, 1, "no such folder"), (Dying, 3, "its agent died")):
        found = crew("2", agent)
        with pytest.raises(ClusterError, match=f"cannot start: .*{why}"):
            found.count(2)
        found.fleet.close()
        assert tries <= len(found.told(Gone)) <= tries + 1


def test_results_are_awaited_from_nodes_that_are_heard_of(crew, monkeypatch):
    """However long they take; of a host that was cut off, Ray would say nothing for a minute."""
    monkeypatch.setattr(ray_fleet, "_VALUES_SECONDS", 1.0)
    monkeypatch.setattr(ray_fleet, "_LOOK_SECONDS", 0.1)
    found = crew("1", Busy)
    found.count(1)
    assert found.fleet.values(found.up) == {0: b"value"}
    found.fleet.close()
    found = crew("1", Silent)
    found.count(1)
    with pytest.raises(ClusterError, match="the results of node-1 could not be fetched: nothing was heard of it for"):
        found.fleet.values(found.up)


def test_a_head_that_does_not_answer_is_asked_again(crew, monkeypatch):
    """What follows waits for it."""
    monkeypatch.setattr(ray_fleet, "_LOOK_SECONDS", 0.1)
    one, tries = Reservation.one, []

    def answer(self: Reservation, *asked: Any) -> None:
        tries.append(asked)
        if len(tries) < 3:
            raise GetTimeoutError("no answer")
        one(self, *asked)

    monkeypatch.setattr(Reservation, "one", answer)
    crew("1:2").count(2)
    assert len(tries) == 3


def test_a_mistake_in_the_thread_ends_the_run(crew, monkeypatch):
    """Nobody would else ask for nodes any more, and nobody would know."""
    monkeypatch.setattr(Reservation, "one", None)
    found = crew("1:2")
    found.until(lambda: found.told(Hopeless))
    (said,) = found.told(Hopeless)
    assert "no more nodes can be asked for: TypeError" in str(said.error)


def test_a_gang_that_nobody_needs_any_more_is_given_back(crew):
    """Another has the node that it was asked for."""
    found = crew("1")
    found.count(1)
    found.fleet.shun(found.up["node-1"][0])
    found.count(2)
    found.fleet.release("node-1")
    wait_until(lambda: groups("CREATED") == 1, 100, "the gang's host to be given back")


def test_an_end_with_an_agent_that_does_not_answer(crew, monkeypatch):
    """It is waited for a little, then killed; nothing of it is left."""
    monkeypatch.setattr(actor, "_CLOSE_SECONDS", 0.5)
    found = crew("2")
    found.count(2)
    pids = [pid for _, pid in found.up.values()]
    os.kill(pids[0], signal.SIGSTOP)
    found.fleet.close()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 100, "the agents to be gone")


def test_a_drain_notice(crew, hosts):
    """It is told with its deadline; another host is asked for at once, while the agent there stays as long as it can.

    The last test: the host does not come back.
    """
    found = crew("2")
    found.count(2)
    head = next(node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"])
    leaving = next(node for node, (host, _) in found.up.items() if host != head)
    host = found.up[leaving][0]
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline = time.monotonic() + 300
    GcsClient(address=hosts.address).drain_node(host, reason, "spot", int((time.time() + 300) * 1000))
    found.until(lambda: found.told(Draining))
    (notice,) = found.told(Draining)
    assert (notice.host, notice.ours) == (host, False)
    assert notice.deadline == pytest.approx(deadline, abs=5)
    found.count(3)
    assert len({where for where, _ in found.up.values()}) == 3
    assert found.told(Gone) == []


def groups(state: str) -> int:
    """How many placement groups are in this state."""
    return sum(group["state"] == state for group in placement_group_table().values())
