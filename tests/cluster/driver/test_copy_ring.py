"""To which agent each one copies what its ranks have committed."""

from __future__ import annotations

from types import SimpleNamespace

from raylaunch.cluster.driver.copy_ring import CopyRing, over, targets
from raylaunch.cluster.driver.node_registry import NodeRegistry
from raylaunch.cluster.fleet_api import AgentLost
from raylaunch.core.machine.commits import CopyAddress
from raylaunch.core.placement.environment import Member
from raylaunch.node.protocol.copy_messages import HoldingStatus
from raylaunch.node.protocol.messages import Ready
from raylaunch.node.protocol.node_status import AgentReady, NodeStatus

READY = Ready(start_method="forkserver", why=(), torch=True, pid=1)


def machine_of(*members: Member) -> SimpleNamespace:
    world = SimpleNamespace(members=members, roster=tuple(one.node for one in members), replacements=())
    return SimpleNamespace(attempt=1, nodes=set("abcd"), world=world, leaving=set())


def member(node: str, host: str) -> Member:
    return Member(node=node, address="", nproc=1, host=host)


def test_each_node_copies_to_one_of_the_next_host():
    world = [member("a", "1"), member("b", "2"), member("c", "2"), member("d", "3"), member("e", "1")]
    assert targets(world) == {"a": "b", "e": "c", "b": "d", "c": "d", "d": "a"}


def test_nodes_of_one_host_make_no_copies():
    assert targets([member("a", "1"), member("b", "1")]) == {}


def test_hosts_that_are_drained_get_no_copies_if_others_are_left():
    world = [member("a", "1"), member("b", "2"), member("c", "3")]
    assert targets(world, {"b"}) == {"a": "c", "b": "c", "c": "a"}
    assert targets(world, {"a", "b", "c"}) == {"a": "b", "b": "c", "c": "a"}


def test_before_nodes_of_the_only_host_go_each_one_copies_to_another_one_that_stays():
    """The only one that stays makes no copies."""
    world = [member(node, "1") for node in "abc"]
    assert targets(world, {"b"}) == {"a": "c", "b": "c", "c": "a"}
    assert targets(world, {"b", "c"}) == {"b": "a", "c": "a"}
    assert targets(world, {"a", "b", "c"}) == {}
    assert targets(world[:1], {"a"}) == {}


def ring_of(machine: SimpleNamespace) -> tuple[CopyRing, NodeRegistry]:
    nodes = NodeRegistry(5.0, None)
    return CopyRing(machine, nodes), nodes


def told(nodes: NodeRegistry, *names: str, has_files: bool = False) -> None:
    """Nodes say that they are up, and give and take copies at ports 1, 2, 3, ..."""
    for number, node in enumerate(names):
        up = AgentReady(host="", address="10.0.0.1", nproc=1, ready=READY, copies_port=number + 1)
        nodes.told(node, NodeStatus(up=up, holding=HoldingStatus(has_files=has_files)))


def names(found: dict[str, CopyAddress]) -> dict[str, str]:
    return {node: target.node for node, target in found.items()}


def test_the_nodes_of_an_attempt_copy_to_those_whose_address_is_known():
    world = [member("a", "1"), member("b", "2"), member("c", "3")]
    machine = machine_of(*world)
    ring, nodes = ring_of(machine)
    assert ring.targets(world) == {}
    told(nodes, "a", "b")
    assert names(ring.targets(world)) == {"a": "b", "c": "a"}
    assert ring.targets(world)["a"] == CopyAddress(node="b", host="10.0.0.1", port=2)
    told(nodes, "a", "b", "c")
    machine.leaving = {"b"}
    assert names(ring.targets(world)) == {"a": "c", "b": "c", "c": "a"}


def test_before_nodes_leave_all_copy_to_those_that_stay_or_to_those_that_replace_the_whole_world():
    machine = machine_of(member("a", "1"), member("b", "2"), member("c", "3"))
    ring, nodes = ring_of(machine)
    told(nodes, "a", "b", "c", "d")
    assert ring.targets_before_leaving() == {}
    machine.leaving = {"b"}
    assert names(ring.targets_before_leaving()) == {"a": "c", "b": "c", "c": "a"}
    machine.leaving, machine.world.replacements = {"a", "b", "c"}, ("d",)
    assert names(ring.targets_before_leaving()) == {"a": "d", "b": "d", "c": "d"}


def test_if_one_node_has_files_all_are_told_where_to_ask():
    ring, nodes = ring_of(machine_of(member("a", "1"), member("b", "2")))
    told(nodes, "a", "b")
    assert ring.peers() == ()
    told(nodes, "a", has_files=True)
    assert {one.node for one in ring.peers()} == {"a", "b"}


def test_several_nodes_replace_others_in_turn():
    assert over("abc", "de") == {"a": "d", "b": "e", "c": "d"}
    assert over("abc", "") == {}


def test_a_few_attempts_ask_what_a_killed_agent_has_left():
    """None asks one that was silent, which may be alive."""
    machine = machine_of(member("a", "1"), member("b", "2"))
    ring, nodes = ring_of(machine)
    told(nodes, "a", "b")
    ring.note_lost(AgentLost(node="a", why="silent", silent=True))
    ring.note_lost(AgentLost(node="c", why="it was never up"))
    ring.note_lost(AgentLost(node="b", why="its agent died"))
    found = [ring.lost() for _ in range(4)]
    assert [[(one.node, one.port, one.orphaned) for one in each] for each in found] == [[("b", 2, True)]] * 3 + [[]]
