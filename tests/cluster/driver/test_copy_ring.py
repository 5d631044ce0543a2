"""To which agent each one copies what its ranks have committed."""

from __future__ import annotations

from types import SimpleNamespace

from raylaunch.cluster.driver.copy_ring import CopyRing, KnownCopies, over, targets
from raylaunch.core.machine.commits import Commit, PartFetch, RestoreCommit
from raylaunch.core.placement.environment import Member
from raylaunch.node.protocol.copy_messages import CopiesServed, CopyTo, ServeCopies


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


class Sent:
    def __init__(self) -> None:
        self.orders: list[tuple[str, CopyTo | ServeCopies]] = []

    def send(self, node: str, order: CopyTo | ServeCopies) -> None:
        self.orders.append((node, order))

    def take(self) -> list[tuple[str, str | None]]:
        """Return where nodes are told to copy to; None: they are to wait for that; "": to serve copies."""
        found, self.orders = self.orders, []
        return [(node, _target(order)) for node, order in found]


def _target(order: CopyTo | ServeCopies) -> str | None:
    if isinstance(order, ServeCopies):
        return ""
    return order.target.node if order.target is not None else None


def test_nodes_are_told_as_soon_as_their_target_is_known_and_again_when_it_changes():
    machine = machine_of(member("a", "1"), member("b", "2"), member("c", "3"))
    fleet = Sent()
    ring = CopyRing(machine, fleet, KnownCopies())
    ring.launched()
    assert (ring.known.has_state, fleet.take()) == (False, [])
    for number, node in enumerate("abc"):
        ring.served(node, CopiesServed(host="h", port=number, secret="s"))
    assert (ring.known.has_state, fleet.take()) == (True, [("c", "a"), ("a", "b"), ("b", "c")])
    ring.renew()
    assert fleet.take() == []
    machine.leaving = {"b"}
    ring.renew()
    assert fleet.take() == [("a", "c")]
    machine.attempt = 2
    ring.launched()
    assert len(fleet.take()) == 3


def test_nodes_that_all_leave_copy_to_those_that_replace_them_as_soon_as_these_serve():
    """Until then they copy nothing: a copy on a node that leaves would count as one."""
    machine = machine_of(member("a", "1"), member("b", "2"))
    fleet = Sent()
    ring = CopyRing(machine, fleet, KnownCopies())
    for number, node in enumerate("ab"):
        ring.served(node, CopiesServed(host="h", port=number, secret="s"))
    assert fleet.take() == [("b", "a"), ("a", "b")]
    machine.leaving, machine.world.replacements = {"a", "b"}, ("c",)
    ring.renew()
    assert fleet.take() == [("c", ""), ("a", None), ("c", ""), ("b", None)]
    ring.renew()
    assert fleet.take() == []
    ring.served("c", CopiesServed(host="h", port=3, secret="s", uses_state=False))
    assert fleet.take() == [("a", "c"), ("b", "c")]


def test_a_node_that_leaves_alone_begins_to_copy_and_one_without_state_does_not():
    machine = machine_of(member("a", "1"))
    fleet = Sent()
    ring = CopyRing(machine, fleet, KnownCopies())
    machine.leaving, machine.world.replacements = {"a"}, ("b", "c")
    ring.renew()
    assert fleet.take() == []
    ring.served("a", CopiesServed(host="h", port=1, secret="s"))
    assert fleet.take() == [("b", ""), ("a", None)]


def test_several_nodes_replace_others_in_turn():
    assert over("abc", "de") == {"a": "d", "b": "e", "c": "d"}
    assert over("abc", "") == {}


def test_a_node_is_told_where_to_fetch_what_it_lacks():
    machine = machine_of()
    machine.nodes = {"a"}
    ring = CopyRing(machine, Sent(), KnownCopies())
    ring.served("a", CopiesServed(host="h", port=7, secret="s"))
    fetches = (PartFetch(node="b", part=3, source="a"), PartFetch(node="c", part=4, source="a"))
    action = RestoreCommit(
        attempt=2, nodes=("a", "b", "c"), commit=Commit(1, 5), world_size=6, why="", fetches=fetches, kept=Commit(1, 5)
    )
    order = ring.announcement("b", action)
    assert [(part, source.node, source.port) for part, source in order.fetches] == [(3, "a", 7)]
    assert (order.attempt, order.commit, order.kept, order.world_size) == (2, Commit(1, 5), Commit(1, 5), 6)
    assert ring.announcement("a", action).fetches == ()
