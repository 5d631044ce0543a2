"""RayFleet on a real Ray with three nodes on this machine, and agents that only report that they are up."""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private.authentication_test_utils import reset_auth_token_state
from ray._raylet import GcsClient
from ray.core.generated import autoscaler_pb2
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from raylaunch.cluster import named_resources
from raylaunch.cluster.agent import ray_actor, serialization
from raylaunch.cluster.agent.agent import AgentReport
from raylaunch.cluster.agent.agent_session import Adoption, AgentSession
from raylaunch.cluster.driver.succession import LedgerKeepers
from raylaunch.cluster.fleet import ray_fleet
from raylaunch.cluster.fleet.ray_fleet import RayFleet
from raylaunch.cluster.fleet_api import AgentLost, AgentsAdopted, FleetFailed, HostDraining, ReportReceived, SlotGranted
from raylaunch.cluster.ray_api.placement_groups import PlacementGroups
from raylaunch.cluster.registry_key import NAMESPACE
from raylaunch.cluster.session.ray_session import nodes
from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.placement.plan import make_plan
from raylaunch.errors import ClusterError
from raylaunch.node.protocol.node_goal import OpenStore
from raylaunch.node.protocol.node_spec import AgentSpec
from raylaunch.node.protocol.node_status import AgentReady, NodeStatus
from tests.cluster.conftest import left_in_ray, wait_until
from tests.fakes import READY
from tests.private_cluster import Cluster, private_cluster

pytestmark = [pytest.mark.ray, pytest.mark.own_cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    """A cluster that this process is connected to."""
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


SPEC = AgentSpec(
    job=Job(entrypoint=Entrypoint(script="train.py"), preload=[], gpus_per_worker=0),
    run_dir="",
    address=None,
    submitter_env={"API_KEY": "the environment of the submitter"},
    cwd=None,
    ray_address="",
)


class Agent:
    """An agent that reports that it is up."""

    def __init__(self, _title: str = "") -> None:
        self.begun = asyncio.Event()

    async def begin(self, message: bytes) -> None:
        host = ray.get_runtime_context().get_node_id()
        up = AgentReady(host=host, address="", nproc=serialization.load_spec(message).nproc, ready=READY)
        self.unsaid = [NodeStatus().after(up)]
        self.begun.set()

    async def next_report(self, _epoch: int = 0) -> bytes:
        await self.begun.wait()
        if not self.unsaid:
            await asyncio.sleep(1000)
        return serialization.dump_report(AgentReport(sent_at=float(os.getpid()), status=self.unsaid.pop()))

    async def close(self, _epoch: int | None = None) -> None:
        pass

    async def leave(self, _epoch: int) -> None:
        os._exit(0)


class Freeing(Agent):
    """An agent that takes a while to free its memory, and leaves a file when it has."""

    async def close(self, epoch: int | None = None) -> None:
        await asyncio.sleep(0.5)
        os.close(os.open(f"{FREED}-{os.getpid()}-{epoch}", os.O_CREAT))

    async def leave(self, epoch: int) -> None:
        await asyncio.sleep(0.5)
        os.close(os.open(f"{LEFT}-{os.getpid()}-{epoch}", os.O_CREAT))
        os._exit(0)


class Staying(Agent):
    """An agent that leaves a file when it is to leave, and stays."""

    async def leave(self, epoch: int) -> None:
        os.close(os.open(f"{LEFT}-{os.getpid()}-{epoch}", os.O_CREAT))
        await asyncio.sleep(1000)


class Unable(Agent):
    def __init__(self, _title: str = "") -> None:
        raise FileNotFoundError("no such folder")


class Finished(Agent):
    """An agent that has the result of its rank, and dies when it is asked for another."""

    async def read_result(self, rank: int, offset: int) -> bytes:
        if rank != 0:
            os._exit(1)
        return b"value"[offset:]


class Older(Agent):
    """As of raylaunch 0.1, whose agents get their specification otherwise."""

    def __init__(self, _title: str = "") -> None:
        raise TypeError("AgentActor.__init__() missing 1 required positional argument: 'spec'")


class UnableToBegin(Agent):
    async def begin(self, message: bytes) -> None:
        pass

    async def next_report(self, _epoch: int = 0) -> bytes:
        raise ray_actor.AgentStartError("FileNotFoundError: no such folder")


class OtherVersion(UnableToBegin):
    async def next_report(self, _epoch: int = 0) -> bytes:
        raise ray_actor.AgentVersionError("its host 10.0.0.5 has raylaunch 1.0, and the driver has raylaunch 2.0")


class Garbled(Agent):
    """An agent whose second report cannot be read."""

    async def next_report(self, _epoch: int = 0) -> bytes:
        await self.begun.wait()
        return await super().next_report() if self.unsaid else b"!garbage"


class Unstarted(Agent):
    """The first process does not start, as if Ray had forgotten it: it does not even hear that it is to end."""

    def __init__(self, title: str = "") -> None:
        if "node-1 " in title:
            time.sleep(10_000)
        super().__init__(title)


class Kept(Agent):
    """An agent of a detached run. The first message to node-3 is lost, as that of a driver that has died."""

    def __init__(self, title: str = "") -> None:
        super().__init__(title)
        if "node-1 " in title and os.path.exists(UNSTARTED):
            time.sleep(10_000)
        self.session = AgentSession()
        self.misses = "node-3" in title
        self.told: set[int] = set()

    async def begin(self, message: bytes) -> None:
        if self.misses:
            self.misses = False
        elif not self.begun.is_set():
            await super().begin(message)

    async def next_report(self, epoch: int = 0) -> bytes:
        await self.begun.wait()
        self.session.check(epoch)
        if epoch in self.told:
            await asyncio.sleep(1000)
        self.told.add(epoch)
        return serialization.dump_report(AgentReport(sent_at=float(os.getpid()), status=self.unsaid[0]))

    async def obey(self, epoch: int, goal: bytes, ledger: bytes = b"") -> None:
        self.session.check(epoch)
        self.session.keep(epoch, serialization.load_goal(goal).generation, ledger)

    async def look(self) -> Adoption:
        return replace(self.session.look(), has_begun=self.begun.is_set())

    async def adopt(self, epoch: int, _link: object) -> tuple[Adoption, bytes]:
        found = await self.look()
        if not self.begun.is_set():
            return found, b""
        self.session.adopt(epoch)
        return found, serialization.dump_report(AgentReport(sent_at=float(os.getpid())))


class Obedient(Kept):
    """An agent that returns the attempts of all orders that it has carried out."""

    def __init__(self, title: str = "") -> None:
        super().__init__(title)
        self.carried_out: list[int] = []

    async def obey(self, epoch: int, goal: bytes, ledger: bytes = b"") -> None:
        await super().obey(epoch, goal, ledger)
        self.carried_out += [order.attempt for order in self.session.new_orders(epoch, serialization.load_goal(goal))]

    async def read_result(self, _rank: int, _offset: int) -> bytes:
        return pickle.dumps(self.carried_out)


class Dying(Agent):
    def __init__(self, _title: str = "") -> None:
        os._exit(1)


@dataclass
class Crew:
    """A fleet with a minimal driver."""

    fleet: RayFleet
    inbox: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    items: list[Any] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    #: By node, what is up: its host and its process.
    up: dict[str, tuple[str, int]] = field(default_factory=dict)

    def tell(self, item: Any) -> None:
        self.inbox.put(item)

    def until(self, done: Callable[[], object], seconds: float = 100) -> None:
        """Handle items until the condition is true."""
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, "\n".join(map(str, self.items))
            try:
                item = self.inbox.get(timeout=0.05)
            except queue.Empty:
                continue
            self.items.append(item)
            if isinstance(item, ReportReceived):
                self.reported(item)
                status = item.report.status
                if status is not None and item.node not in self.up and self.fleet.joined(item.node, status.up.host):
                    self.up[item.node] = (status.up.host, int(item.report.sent_at))
            elif isinstance(item, AgentLost):
                self.up.pop(item.node, None)
                self.fleet.replace(item)
            self.dealt_with()

    def reported(self, _: ReportReceived) -> None:
        """Tell the fleet of a report."""

    def dealt_with(self) -> None:
        """Take note that an item was dealt with."""

    def count(self, number: int) -> None:
        """Handle items until so many nodes are up."""
        self.until(lambda: len(self.up) == number)

    def told(self, kind: type) -> list[Any]:
        return [item for item in self.items if isinstance(item, kind)]


TOKEN = "0123456789abcdef"
FREED = f"/tmp/raylaunch-tests-freed-{os.getpid()}"
LEFT = f"{FREED}-left"
"""The beginnings of the names of files."""
UNSTARTED = f"/tmp/raylaunch-tests-unstarted-{os.getpid()}"
"""While this file exists, node-1 of a detached run does not start."""


@dataclass
class DetachedCrew(Crew):
    """A fleet whose agents outlive it, and its ledger as it was when an item was dealt with for the last time."""

    ledger: bytes = b""
    plan: Any = None
    keepers: Any = None

    def reported(self, item: ReportReceived) -> None:
        self.keepers.reported(item.node, item.report.kept)

    def dealt_with(self) -> None:
        with self.fleet.allocator() as allocator:
            self.ledger = pickle.dumps(allocator)
        self.keepers.flush(self.ledger)

    def die(self) -> None:
        """Do nothing any more, as if the process were gone."""
        self.fleet._stop()  # noqa: SLF001
        self.fleet._tell = self.fleet.agents.tell = lambda _: None  # noqa: SLF001
        self.fleet.agents.hand_over([*self.fleet.agents])


@pytest.fixture
def detached(hosts: Cluster) -> Iterator[Callable[..., DetachedCrew]]:
    """Start the fleet of a detached run, or that of the next driver, and check that nothing of the run is left."""
    crews: list[DetachedCrew] = []

    def start(nnodes: str = "", agent: type = Kept, *, after: DetachedCrew | None = None, **job: Any) -> DetachedCrew:
        wanted = Job(entrypoint=Entrypoint(script="train.py"), nnodes=nnodes, **job)
        plan = after.plan if after else make_plan(wanted, nodes(local=False), local=False)
        spec = replace(SPEC, token=TOKEN)
        lines: list[str] = []
        allocator = pickle.loads(after.ledger) if after else None
        epoch = 2 if after else 1
        fleet = RayFleet(plan, spec, lines.append, epoch=epoch, leave=lambda _: None, allocator=allocator)
        keepers = LedgerKeepers(fleet, spec, epoch)
        found = DetachedCrew(fleet, lines=lines, plan=plan, keepers=keepers, up={**after.up} if after else {})
        fleet.agents.actor_class = ray.remote(max_restarts=0)(agent)
        crews.append(found)
        fleet.start(found.tell)
        return found

    yield start
    for each in crews:
        each.fleet.close()
    named_resources.remove(TOKEN)
    wait_until(lambda: left_in_ray(hosts) == [], 100, "actors and placement groups to be gone")


@pytest.fixture
def crew(hosts: Cluster) -> Iterator[Callable[..., Crew]]:
    """Start fleets, and check that nothing of them is left."""
    crews: list[Crew] = []

    def start(nnodes: str, agent: type = Agent, **job: Any) -> Crew:
        wanted = Job(entrypoint=Entrypoint(script="train.py"), nnodes=nnodes, **job)
        plan = make_plan(wanted, nodes(local=False), local=False)
        lines: list[str] = []
        found = Crew(RayFleet(plan, SPEC, lines.append), lines=lines)
        found.fleet.agents.actor_class = ray.remote(max_restarts=0)(agent)
        crews.append(found)
        found.fleet.start(found.tell)
        return found

    yield start
    for each in crews:
        each.fleet.close()
    wait_until(lambda: left_in_ray(hosts) == [], 100, "actors and placement groups to be gone")


def test_a_gang_with_further_nodes_and_a_spare(crew):
    """Each on a host of its own, and announced before it is up."""
    found = crew("1:2", spares=1)
    found.count(3)
    assert len({host for host, _ in found.up.values()}) == 3
    assert {item.node: item.host for item in found.told(SlotGranted)} == {
        node: host for node, (host, _) in found.up.items()
    }
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    assert all(item.address == addresses[item.host] for item in found.told(SlotGranted))


def test_an_agent_that_ray_does_not_start(crew, monkeypatch):
    """It is killed, and another one is started in its place."""
    monkeypatch.setattr(ray_fleet, "_START_SECONDS", 2.0)
    found = crew("1", agent=Unstarted, placement="pack")
    found.count(1)
    gone = found.told(AgentLost)
    assert gone[0].node == "node-1"
    assert gone[0].why.startswith("Ray has not started its agent within ")
    assert "node-1" not in found.up
    wait_until(lambda: groups("CREATED") == 1, 100, "no other slot to be held")


def test_an_agent_that_ray_does_not_start_in_a_detached_run(detached, monkeypatch):
    """It is killed: it would not obey. The next driver has the time from then on."""
    monkeypatch.setattr(ray_fleet, "_START_SECONDS", 2.0)
    Path(UNSTARTED).touch()
    try:
        first = detached("1", placement="pack")
        first.until(lambda: first.told(SlotGranted))
        first.die()
        second = detached(after=first)
        second.count(1)
    finally:
        Path(UNSTARTED).unlink()
    assert [*second.up] != ["node-1"]
    assert second.told(AgentLost)[0].why.startswith("Ray has not started its agent within ")
    wait_until(lambda: len(named_resources.agents(TOKEN)) == 1, 100, "the actor to be gone")


def test_an_agent_that_died_comes_back(crew):
    """On the same host if there is no other, as a new node. The slot requested elsewhere is released."""
    found = crew("3")
    found.count(3)
    host, pid = found.up["node-2"]
    os.kill(pid, signal.SIGKILL)
    found.until(lambda: found.told(AgentLost))
    assert [(item.node, item.why, item.silent) for item in found.told(AgentLost)] == [
        ("node-2", "its agent died", False)
    ]
    found.count(3)
    assert host in {where for where, _ in found.up.values()}
    assert "node-2" not in found.up
    wait_until(lambda: groups("PENDING") == 0, 100, "what was asked for elsewhere to be taken back")


def test_an_agent_that_is_silent_is_replaced_on_another_host(crew):
    """It cannot be stopped, since it does not run, and its end is not awaited."""
    found = crew("2")
    found.count(2)
    host, pid = found.up["node-2"]
    os.kill(pid, signal.SIGSTOP)
    other = {node["NodeID"] for node in ray.nodes()} - {where for where, _ in found.up.values()}
    found.inbox.put(AgentLost(node="node-2", why="nothing was heard of it", silent=True))
    found.until(lambda: "node-2" not in found.up)
    found.count(2)
    assert other | {host} >= {where for where, _ in found.up.values()} - {found.up["node-1"][0]}


def test_a_host_that_is_cordoned_and_uncordoned(crew):
    """Its agent stays up beside its replacement. Nothing more starts there until it is uncordoned."""
    found = crew("1:2")
    found.count(2)
    here = found.up["node-1"][0]
    (third,) = {node["NodeID"] for node in ray.nodes()} - {where for where, _ in found.up.values()}
    found.fleet.cordon(third)
    found.fleet.cordon(here)
    wait_until(lambda: groups("PENDING") == 1, 100, "another place to be asked for")
    assert len(found.up) == 2
    found.fleet.uncordon(third)
    found.count(3)
    assert third in {where for where, _ in found.up.values()}


def test_agents_that_cannot_start(crew):
    """If none ever came up, the run fails: at once if the constructor raised, else after the third death."""
    for agent, tries, why in (
        (Unable, 1, "no such folder"),
        (UnableToBegin, 1, "no such folder"),
        (OtherVersion, 1, "its host 10.0.0.5 has raylaunch 1.0, and the driver has raylaunch 2.0"),
        (Older, 1, "its host has a raylaunch that does not say its version, and the driver has raylaunch "),
        (Dying, 3, "its agent died"),
    ):
        found = crew("2", agent)
        with pytest.raises(ClusterError, match=rf"node-\d \([\d.]+\) cannot start: .*{why}"):
            found.count(2)
        found.fleet.close()
        assert tries <= len(found.told(AgentLost)) <= tries + 1


def test_an_agent_whose_report_cannot_be_read_is_lost(crew):
    found = crew("1", Garbled)
    found.until(lambda: found.told(AgentLost))
    assert found.told(AgentLost)[0].why == "its report cannot be read: UnpicklingError: invalid load key, '!'."
    assert found.told(ReportReceived) != []


def test_the_result_of_a_rank_is_read_from_its_agent(crew):
    """From any byte on. An agent that dies is an error that says so, as is one that is gone already."""
    found = crew("1", Finished)
    found.count(1)
    assert found.fleet.read_result("node-1", 0, 2).result(100) == b"lue"
    with pytest.raises(ClusterError, match=r"^its agent died$"):
        found.fleet.read_result("node-1", 1, 0).result(100)
    with pytest.raises(LookupError, match="it has no agent any more"):
        found.fleet.read_result("node-7", 0, 0).result(100)


def test_a_request_to_a_head_that_does_not_answer_is_repeated(crew, monkeypatch):
    """Later requests wait for it."""
    monkeypatch.setattr(ray_fleet, "LOOK_SECONDS", 0.1)
    one, tries = PlacementGroups.reserve, []

    def answer(self: PlacementGroups, *asked: Any) -> None:
        tries.append(asked)
        if len(tries) < 3:
            raise GetTimeoutError("no answer")
        one(self, *asked)

    monkeypatch.setattr(PlacementGroups, "reserve", answer)
    crew("1:2").count(2)
    assert len(tries) == 3


def test_an_error_in_the_fleets_thread_ends_the_run(crew, monkeypatch):
    """No nodes would be requested any more, and nobody would know."""
    monkeypatch.setattr(PlacementGroups, "reserve", None)
    found = crew("1:2")
    found.until(lambda: found.told(FleetFailed))
    (said,) = found.told(FleetFailed)
    assert "no more nodes can be asked for: TypeError" in str(said.error)


def test_orders_are_carried_out_in_the_order_in_which_they_were_sent(crew):
    """Of two calls of an asynchronous actor that are made at once, Ray starts the second one first now and then."""
    found = crew("1", Obedient)
    assert_ordered(found, lambda: None)


def test_orders_are_carried_out_in_the_order_in_which_they_were_flushed(detached):
    """As in an attached run."""
    found = detached("1", Obedient)
    assert_ordered(found, lambda: found.keepers.flush(b""))


def assert_ordered(found: Crew, flush: Callable[[], None]) -> None:
    """Send many orders, two at a time, and see what the agent of the only node has done."""
    found.count(1)
    (node,) = found.up
    sent = range(1, 201)
    for number in sent:
        found.fleet.send(node, OpenStore(attempt=number))
        flush()
        if number % 2 == 0:
            time.sleep(0.002)

    def carried_out() -> list[int]:
        return pickle.loads(found.fleet.read_result(node, 0, 0).result(100))

    wait_until(lambda: len(carried_out()) == len(sent), 30, "all orders to be carried out")
    assert carried_out() == [*sent]


def test_a_gang_that_is_not_needed_any_more_is_released(crew):
    """Its node is up in another slot."""
    found = crew("1")
    found.count(1)
    found.fleet.cordon(found.up["node-1"][0])
    found.count(2)
    found.fleet.release("node-1")
    wait_until(lambda: groups("CREATED") == 1, 100, "the gang's host to be given back")


@pytest.fixture
def _no_files() -> Iterator[None]:
    """Agents write some when they are closed, also at the end of a test."""
    yield
    for path in Path(FREED).parent.glob(f"{Path(FREED).name}-*"):
        path.unlink()


@pytest.mark.usefixtures("_no_files")  # before `crew`, whose end closes agents
@pytest.mark.parametrize("frees_memory", [False, True])
def test_an_agent_may_free_its_memory_or_leave_it_before_it_is_killed(crew, frees_memory):
    """Its group is removed after that, too: then Ray ends the agent, and its children first."""
    found = crew("1:2", Freeing)
    found.count(2)
    node = next(node for node in found.up if node != "node-1")
    pid = found.up.pop(node)[1]
    found.fleet.release(node, frees_memory=frees_memory)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), 100, "the agent to be gone")
    assert (Path(f"{FREED}-{pid}-0").exists(), Path(f"{LEFT}-{pid}-0").exists()) == (frees_memory, not frees_memory)


@pytest.mark.usefixtures("_no_files")
def test_agents_that_are_released_together_are_asked_together(crew, monkeypatch):
    """The second one is not asked only after the first one, which does not answer, was given up."""
    monkeypatch.setattr(ray_fleet, "_END_NODE_SECONDS", 1000.0)
    found = crew("2", Staying)
    found.count(2)
    for node in found.up:
        found.fleet.release(node)
    asked = Path(LEFT).parent
    wait_until(lambda: len([*asked.glob(f"{Path(LEFT).name}-*")]) == 2, 100, "both agents to be asked")


def test_close_with_an_agent_that_does_not_answer(crew, monkeypatch):
    """It gets a little time, then it is killed."""
    monkeypatch.setattr(ray_actor, "CLOSE_SECONDS", 0.5)
    found = crew("2")
    found.count(2)
    pids = [pid for _, pid in found.up.values()]
    os.kill(pids[0], signal.SIGSTOP)
    found.fleet.close()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), 100, "the agents to be gone")


def test_nodes_that_come_and_go_while_there_is_no_driver(detached):
    """One agent dies; another starts, but the driver was gone before it had told it what to do."""
    occupied = placement_group([{"CPU": 1}])
    ray.get(occupied.ready())
    first = detached("1:3")
    first.count(2)
    wait_until(lambda: groups("PENDING") == 1, 100, "another place to be asked for")
    first.die()
    os.kill(first.up["node-2"][1], signal.SIGKILL)
    remove_placement_group(occupied)
    late = ray.get_actor(named_resources.agent_name(TOKEN, 1, "node-3"), NAMESPACE)
    assert not ray.get(late.look.remote()).has_begun
    second = detached(after=first)
    second.until(lambda: "node-2" not in second.up)
    second.count(3)
    assert second.up["node-1"] == first.up["node-1"]
    assert "node-3" in second.up
    assert [item.node for item in second.told(AgentLost)] == ["node-2"]
    assert len(second.told(AgentsAdopted)) == 1


def test_a_drain_notice(crew, hosts):
    """It is told with its deadline; another host is asked for at once, while the agent there stays as long as it can.

    The host does not come back.
    """
    found = crew("2")
    found.count(2)
    head = next(node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"])
    leaving = next(node for node, (host, _) in found.up.items() if host != head)
    host = found.up[leaving][0]
    deadline = time.monotonic() + 300
    drain(hosts, host)
    found.until(lambda: found.told(HostDraining))
    (notice,) = found.told(HostDraining)
    assert (notice.host, notice.ours) == (host, False)
    assert notice.deadline == pytest.approx(deadline, abs=100)
    found.count(3)
    assert len({where for where, _ in found.up.values()}) == 3
    assert found.told(AgentLost) == []


def test_a_drain_notice_while_there_is_no_driver(detached, hosts):
    """The next driver is told, also of those that the last one was told of. The last test: there is one host left."""
    first = detached("1:2")
    first.count(2)
    head = next(node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"])
    (host,) = {where for where, _ in first.up.values()} - {head}
    known = {item.host for item in first.told(HostDraining)}
    first.die()
    drain(hosts, host)
    second = detached(after=first)

    def is_told() -> bool:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # one of an earlier test may go just now
        return {host, *known & alive} <= {item.host for item in second.told(HostDraining)}

    second.until(is_told)
    assert {item.host for item in second.told(HostDraining)} <= known | {host}
    assert second.told(AgentLost) == []


def drain(hosts: Cluster, host: str) -> None:
    """Tell Ray that a host will be taken away in five minutes."""
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    GcsClient(address=hosts.address).drain_node(host, reason, "spot", int((time.time() + 300) * 1000))


def groups(state: str) -> int:
    """Return how many placement groups are in this state."""
    return sum(group["state"] == state for group in placement_group_table().values())
