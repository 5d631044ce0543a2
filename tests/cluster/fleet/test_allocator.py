"""The allocator against a fake cluster: which slots it requests, where it starts agents, what it releases."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raylaunch.cluster.fleet.allocator import (
    Allocator,
    AnnounceNode,
    ReleaseSlot,
    ReserveGang,
    ReserveSlot,
    StartAgent,
    StopAgent,
)
from raylaunch.core.placement.plan import Bundle
from tests.profiles import examples

ONE = Bundle(nproc=1, gpus=0, cpus=1)
TWO = Bundle(nproc=2, gpus=0, cpus=2, avoid=("small",))


@dataclass
class Board:
    """A cluster that carries out the allocator's requests, and records what exists."""

    allocator: Allocator
    now: float = 0.0
    #: By slot: the hosts it avoids; None: it is in the gang.
    reserved: dict[int, frozenset[str] | None] = field(default_factory=dict)
    bundles: dict[int, Bundle] = field(default_factory=dict)
    #: By node: its slot.
    occupied: dict[str, int] = field(default_factory=dict)
    up: dict[str, str] = field(default_factory=dict)
    announced: dict[str, str] = field(default_factory=dict)
    announced_at: dict[str, float] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    #: Slots in which an agent was given up since its process had not started.
    unstarted: set[int] = field(default_factory=set)

    def do(self) -> None:
        for request in self.allocator.slots.take_requests():
            match request:
                case ReserveGang(bundles):
                    self.reserved |= dict.fromkeys(bundles)
                    self.bundles |= bundles
                case ReserveSlot(slot, bundle, avoid):
                    assert slot not in self.reserved
                    self.reserved[slot], self.bundles[slot] = avoid, bundle
                case StartAgent(slot, node, bundle):
                    assert self.bundles[slot] == bundle
                    assert slot not in self.occupied.values()
                    assert slot in self.reserved
                    self.occupied[node] = slot
                case AnnounceNode(node, host):
                    self.announced[node], self.announced_at[node] = host, self.now
                case StopAgent(node, why, never_started):
                    if never_started:
                        self.unstarted.add(self.occupied[node])
                    del self.occupied[node]
                    self.up.pop(node, None)
                    if why:
                        self.said[node] = why
                case ReleaseSlot(slot):
                    assert slot not in self.occupied.values()
                    self.reserved.pop(slot)
                    self.released.append(slot)

    # What happens in the cluster.

    def grant(self, node: str, host: str) -> None:
        self.allocator.granted({self.occupied[node]: host}, self.now)
        self.do()

    def join(self, node: str, host: str) -> bool:
        wanted = self.allocator.joined(node, host, self.now)
        if wanted:
            self.up[node] = host
        self.do()
        return wanted

    def lose(self, node: str, *, silent: bool = False) -> float:
        pause = self.allocator.lost(node, self.now, silent=silent)
        self.do()
        return pause

    def tell(self, event: str, argument: object = None) -> None:
        getattr(self.allocator, event)(*(() if argument is None else (argument,)), self.now)
        self.do()

    # What exists.

    def starting(self) -> list[str]:
        return [node for node in self.occupied if node not in self.up]

    def avoided(self, node: str) -> set[str]:
        return set(self.reserved[self.occupied[node]] or ())


def board(wanted: int, gang: int, *hosts: str, spread: bool = True, bundle: Bundle = ONE) -> Board:
    """Return a board with the first nodes up on these hosts."""
    found = Board(Allocator([bundle] * wanted, gang, spread=spread))
    found.tell("start")
    for index, host in enumerate(hosts[:gang], 1):
        found.allocator.granted({index: host}, 0.0)
        found.do()
        assert found.join(f"node-{index}", host)
    for host in hosts[gang:]:
        assert found.join(found.starting()[0], host)
    return found


# Requests.


def test_the_gang_comes_first():
    """A single slot might take a host that the gang needs. When the gang is granted, all others are requested at once."""
    found = board(4, 2)
    assert found.starting() == ["node-1", "node-2"]
    found.allocator.granted({1: "a", 2: "b"}, 0.0)
    found.do()
    assert found.starting() == ["node-1", "node-2", "node-3", "node-4"]
    assert found.avoided("node-3") == found.avoided("node-4") == {"a", "b"}
    assert found.announced == {"node-1": "a", "node-2": "b"}


def test_without_spread_no_host_is_avoided():
    """Nor is a slot released when two are on one host."""
    found = board(3, 1, "a", spread=False)
    assert found.avoided("node-2") == set()
    assert found.join("node-2", "a")
    assert found.join("node-3", "a")


def test_hosts_for_another_number_of_workers_are_avoided_too():
    """As the plan says, with spread and without."""
    assert board(2, 1, "a", bundle=TWO).avoided("node-2") == {"a", "small"}
    assert board(2, 1, "a", bundle=TWO, spread=False).avoided("node-2") == {"small"}


def test_each_number_of_workers_is_requested_separately():
    """A node with one worker does not replace one with two."""
    found = Board(Allocator([ONE, ONE, TWO], 1, spread=True))
    found.tell("start")
    found.grant("node-1", "a")
    assert Counter(found.bundles.values()) == {ONE: 2, TWO: 1}
    found.join("node-1", "a")
    found.lose("node-1")
    assert Counter(found.bundles[found.occupied[node]] for node in found.starting()) == {ONE: 3, TWO: 1}


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("comes_up", [False, True])
def test_memory_does_not_grow_with_nodes_that_come_and_go(spread, comes_up):
    """After 1,000 agents that were lost, up or while they started, the allocator holds what it held after 200."""
    found, sizes = board(2, 1, "a", "b", spread=spread), {}
    for number in range(1000):
        found.now += 100.0
        found.tell("tick")
        node = found.starting()[0] if found.starting() else [*found.up][-1]
        if comes_up and node not in found.up:
            assert found.join(node, "b")
        found.lose(node)
        sizes[number] = len(pickle.dumps(found.allocator))
    assert len(found.reserved) <= 4
    assert max(sizes[number] for number in range(700, 1000)) < 1.05 * max(sizes[number] for number in range(100, 300))


# Two on one host.


def test_two_groups_on_one_host():
    """The second is released at its grant, unannounced, and requested again, avoiding that host."""
    found = board(3, 1, "a")
    found.grant("node-2", "b")
    found.grant("node-3", "b")
    assert found.starting() == ["node-2", "node-4"]
    assert found.avoided("node-4") == {"a", "b"}
    assert (found.announced, found.said) == ({"node-1": "a", "node-2": "b"}, {})


def test_two_agents_on_one_host():
    """If that was not known before, the second agent to come up is not wanted."""
    found = board(3, 1, "a", "b")
    assert not found.join("node-3", "b")
    assert found.starting() == ["node-4"]
    assert found.avoided("node-4") == {"a", "b"}


def test_a_grant_after_the_agent_came_up():
    """There is nothing left to announce."""
    found = board(2, 1, "a", "b")
    found.grant("node-2", "b")
    assert found.announced == {"node-1": "a"}
    assert found.up == {"node-1": "a", "node-2": "b"}


def test_an_agent_of_the_gang_that_ray_moved_to_a_host_with_an_agent():
    """It is stopped, and started again when Ray has moved its slot to another host."""
    found = board(2, 2, "a", "b")
    found.lose("node-2")
    again, _ = found.starting()
    found.tell("moved", {2: "a"})
    assert again not in found.occupied
    (other,) = found.starting()
    assert found.avoided(other) == {"a"}  # not "a": another slot of the run may be placed there by now
    assert found.allocator.slots.may_gang_have_moved()
    found.tell("moved", {2: "c"})
    assert len(found.starting()) == 2


# Replacements.


def test_a_lost_node_is_replaced_in_its_slot_and_elsewhere():
    """The new slot avoids all other hosts, and the lost one too, where the old slot is."""
    found = board(3, 2, "a", "b", "c")
    assert found.lose("node-2") == 0.0
    again, other = found.starting()
    assert found.occupied[again] == 2
    assert found.avoided(other) == {"a", "b", "c"}


def test_the_old_slot_comes_up_first():
    """The new one is released; since its node was announced, the driver is told that it will not come."""
    found = board(2, 2, "a", "b")
    found.lose("node-2")
    again, other = found.starting()
    found.grant(other, "c")
    assert found.join(again, "b")
    assert found.starting() == []
    assert found.said == {other: "it is not needed any more"}
    assert set(found.reserved) == {1, 2}


def test_the_other_comes_up_first():
    """The old slot is released, unless it is in the gang: then it stays, empty."""
    found = board(3, 2, "a", "b", "c")
    for node, slot in (("node-3", 3), ("node-2", 2)):
        found.lose(node)
        again, other = found.starting()
        assert found.occupied[again] == slot
        assert found.join(other, f"instead of {node}")
        assert found.starting() == []
        assert not found.join(again, "late")
    assert set(found.reserved) == {1, 2, 4, 5}


def test_an_empty_slot_of_the_gang_is_used_for_the_next_missing_node():
    """It would otherwise hold a host that the run needs."""
    found = board(2, 2, "a", "b")
    found.lose("node-2")
    _, other = found.starting()
    found.join(other, "c")
    found.lose(other)
    assert {found.occupied[node] for node in found.starting()} >= {2}
    (idle,) = (node for node in found.starting() if found.occupied[node] == 2)
    assert found.join(idle, "b")


def test_several_nodes_lost_at_once_are_requested_at_once():
    found = board(4, 2, "a", "b", "c", "d")
    for node in ("node-2", "node-3", "node-4"):
        found.lose(node, silent=True)
    fresh = [node for node in found.starting() if "b" in found.avoided(node)]
    assert len(found.starting()) == 6
    assert [found.avoided(node) for node in fresh][-1] == {"a", "b", "c", "d"}
    assert len(fresh) == 3


def test_without_spread_a_lost_node_is_replaced_in_its_slot_only():
    """Another slot would be no better."""
    found = board(2, 1, "a", "a", spread=False)
    found.lose("node-2")
    assert len(found.starting()) == 1


def test_a_host_that_was_cut_off_is_avoided_until_ray_knows():
    """Ray might otherwise grant a slot there, and wait a minute for an answer."""
    found = board(3, 2, "a", "b", "c")
    found.lose("node-3", silent=True)
    _, other = found.starting()
    found.join(other, "d")
    found.lose("node-1")
    _, other = found.starting()
    assert found.avoided(other) == {"a", "b", "c", "d"}
    found.now = found.allocator.next_tick(0.0) or 0.0
    found.tell("tick")
    _, other = found.starting()
    assert found.avoided(other) == {"a", "b", "d"}


def test_a_host_that_was_cut_off_and_came_back():
    """It is used like any other."""
    found = board(3, 2, "a", "b", "c")
    found.lose("node-3", silent=True)
    again, _ = found.starting()
    assert found.join(again, "c")
    found.lose(again)
    _, other = found.starting()
    found.join(other, "d")
    found.lose("node-1")
    _, other = found.starting()
    assert found.avoided(other) == {"a", "b", "d"}


def test_an_agent_that_does_not_come_up():
    """Its host may be cut off: another slot is requested elsewhere, and the first agent to come up is used."""
    found = Board(Allocator([ONE, ONE], 1, spread=True))
    found.tell("start")
    found.join("node-1", "a")
    found.allocator.granted({1: "a"}, 0.0)
    found.do()
    found.grant("node-2", "b")
    assert found.allocator.next_tick(0.0) == 60.0
    found.now = 59.0
    found.tell("tick")
    assert found.starting() == ["node-2"]
    found.now = 60.0
    found.tell("tick")
    assert found.starting() == ["node-2", "node-3"]
    assert found.avoided("node-3") == {"a", "b"}
    assert found.allocator.next_tick(60.0) is None
    assert found.join("node-2", "b")
    assert found.starting() == []
    found.now = 200.0
    assert found.lose("node-2") == 0.0
    assert len(found.starting()) == 2


@pytest.mark.parametrize(("took", "slow_after"), [(1.0, 20.0), (8.0, 32.0), (30.0, 60.0)])
def test_an_agent_that_does_not_come_up_though_others_did(took, slow_after):
    """Its host may have been cut off between grant and start. It is not given much longer than the others took."""
    found = Board(Allocator([ONE, ONE], 2, spread=True))
    found.tell("start")
    found.allocator.granted({1: "a", 2: "b"}, 0.0)
    found.do()
    found.now = took
    found.join("node-1", "a")
    assert found.allocator.next_tick(took) == slow_after
    found.now = slow_after
    found.tell("tick")
    assert found.starting() == ["node-2", "node-3"]
    assert found.avoided("node-3") == {"a", "b"}


# The end of the gang.


def test_a_gang_that_is_not_needed_any_more_is_released():
    """As a whole, since Ray cannot shrink a group; and only when all nodes are up elsewhere."""
    found = board(2, 2, "a", "b")
    found.tell("draining", {"a", "b"})
    for host in "cd":
        assert found.join(found.starting()[0], host)
    found.lose("node-1")
    assert found.released == []
    found.lose("node-2")
    assert found.released == [1, 2]
    found.tell("moved", {1: "e", 2: "f"})
    assert (found.starting(), set(found.reserved)) == ([], {3, 4})


def test_a_gang_of_one_is_released_too():
    """Ray would otherwise have the cluster grow in place of a host whose node is up elsewhere."""
    found = board(3, 1, "a", "b", "c")
    found.lose("node-1")
    again, other = found.starting()
    assert found.occupied[again] == 1
    found.join(other, "d")
    assert found.released == [1]


def test_a_gang_in_backoff_stays():
    """A node is still missing."""
    found = board(1, 1, "a")
    found.lose("node-1")
    found.now = 0.5
    (again,) = (node for node in found.starting() if found.occupied[node] == 1)
    assert found.lose(again) > 0
    assert 1 in found.reserved


# Backoff.


def test_an_agent_that_dies_again_and_again_is_restarted_later_each_time():
    """Elsewhere nothing waits. After a minute without a death, the pauses begin anew."""
    found = board(2, 2, "a", "b")
    pauses = []
    for _ in range(9):
        (node,) = (node for node in found.occupied if found.occupied[node] == 2)
        pauses.append(found.lose(node))
        assert (2 in found.occupied.values()) == (pauses[-1] == 0)
        assert len([node for node in found.starting() if found.occupied[node] != 2]) == 1
        found.now += pauses[-1]
        found.tell("tick")
        assert 2 in found.occupied.values()
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    (node,) = (node for node in found.occupied if found.occupied[node] == 2)
    found.join(node, "b")
    found.now += 60
    assert found.lose(node) == 0


def test_an_agent_that_is_silent_again_and_again_is_restarted_at_once():
    """It starts when its host is back; nothing died there."""
    found = board(1, 1, "a")
    for _ in range(3):
        (node,) = (node for node in found.occupied if found.occupied[node] == 1)
        assert found.lose(node, silent=True) == 0


def test_a_slot_that_ray_moved_does_not_wait():
    """The deaths were on another host. A slot that was not moved waits on."""
    found = board(1, 1, "a")
    for _ in range(2):
        (node,) = (node for node in found.occupied if found.occupied[node] == 1)
        found.lose(node)
    found.tell("moved", {1: "a"})
    assert 1 not in found.occupied.values()
    found.tell("moved", {1: "b"})
    assert 1 in found.occupied.values()


def test_next_tick_is_the_end_of_the_backoff():
    found = board(1, 1, "a")
    for _ in range(2):
        (node,) = (node for node in found.occupied if found.occupied[node] == 1)
        found.lose(node)
    assert found.allocator.next_tick(0.0) == 1.0
    assert found.allocator.next_tick(1.0) is None


def test_a_slot_that_was_never_granted_waits_too():
    """Whatever ended its agent would end the next one."""
    found = board(2, 1, "a")
    found.lose("node-2")
    found.lose("node-3")
    assert found.starting() == []
    assert len(found.reserved) == 2
    found.now = 1.0
    found.lose("node-1")
    assert found.join(found.starting()[0], "a")


def test_agents_that_cannot_start():
    """Three deaths before any agent came up are taken for a fault that no further start mends."""
    found = Board(Allocator([ONE], 1, spread=True))
    found.tell("start")
    verdicts = []
    for _ in range(3):
        found.lose(found.starting()[0])
        verdicts.append(found.allocator.cannot_start(has_raised=False))
        found.now += 60
        found.tell("tick")
    assert verdicts == [False, False, True]
    assert found.join(found.starting()[0], "a")
    assert not found.allocator.cannot_start(has_raised=False)


# Agents whose processes Ray does not start.


def unstarted(nodes: int = 1, **more) -> Board:
    """Return a board whose slots are granted, on hosts a, b and so on, and whose agents have not started."""
    found = Board(Allocator([ONE] * nodes, nodes, spread=False, start_timeout=120.0, **more))
    found.tell("start")
    found.allocator.granted({slot: HOSTS[slot - 1] for slot in found.reserved}, 0.0)
    found.do()
    return found


def tick_until(found: Board, node: str) -> float:
    """Have time pass, as far as something is due, until this node is given up. Return the time."""
    while node in found.occupied:
        found.now = found.allocator.next_tick(found.now)
        found.tell("tick")
    return found.now


def test_an_agent_that_ray_does_not_start_is_started_again_in_its_slot():
    """Ray may have forgotten it. Each next one gets twice the time, up to an hour, since it may only be slow to start."""
    found = unstarted()
    times = [tick_until(found, f"node-{number}") for number in range(1, 9)]
    assert [after - before for before, after in zip([0.0, *times], times, strict=False)] == [
        *(120, 240, 480, 960, 1920, 3600, 3600, 3600)
    ]
    assert found.occupied == {"node-9": 1}
    assert found.said["node-2"] == "Ray has not started its agent within 240 s"
    assert not found.allocator.cannot_start(has_raised=False)


def test_an_agent_that_is_slow_to_start_comes_up_in_the_end():
    """It needs 400 s."""
    found = unstarted()
    started = 0.0
    while (node := found.starting()[0]) and (found.allocator.next_tick(found.now) or 1e9) < started + 400.0:
        found.now = found.allocator.next_tick(found.now)
        found.tell("tick")
        started = found.now if node not in found.occupied else started
        assert found.now < 1000.0
    assert found.join(node, "a")
    assert node == "node-3"


def test_an_agent_that_has_reported_is_not_given_up():
    """It may take long to import torch. When its host is known to start agents, the next has the usual time again."""
    found = unstarted()
    tick_until(found, "node-1")
    found.allocator.reported("node-2")
    found.now = 1e6
    found.tell("tick")
    assert found.occupied == {"node-2": 1}
    assert found.allocator.next_tick(found.now) is None
    found.lose("node-2")
    assert found.occupied == {"node-3": 1}
    assert tick_until(found, "node-3") == 1e6 + 120.0


def test_an_agent_that_follows_a_lost_one_is_given_up_too():
    """Its slot was granted long before."""
    found = unstarted(2)
    for node, host in (("node-1", "a"), ("node-2", "b")):
        assert found.join(node, host)
    assert found.allocator.next_tick(0.0) is None
    found.now = 1000.0
    found.lose("node-2")
    assert tick_until(found, "node-3") == 1120.0
    assert found.occupied == {"node-1": 1, "node-4": 2}


def test_an_agent_that_waits_for_a_host_is_not_given_up():
    """Ray is to start it only then. If Ray moves its slot, it has all the time there."""
    found = Board(Allocator([ONE, ONE], 1, spread=False, start_timeout=120.0))
    found.tell("start")
    found.now = 1e6
    found.tell("tick")
    assert set(found.occupied) == {"node-1"}
    found.allocator.granted({1: "a"}, found.now)
    found.do()
    found.join("node-1", "a")
    found.lose("node-1")
    (again,) = (node for node in found.occupied if found.occupied[node] == 1)
    found.now += 100.0
    found.tell("moved", {1: "b"})
    assert tick_until(found, again) == 1e6 + 220.0
    (waiting,) = (node for node in found.occupied if found.occupied[node] != 1)
    assert waiting not in found.said


def test_the_request_says_that_the_process_has_not_started():
    """Such an actor does nothing that it is told."""
    allocator = Allocator([ONE], 1, spread=False, start_timeout=120.0)
    allocator.start(0.0)
    allocator.granted({1: "a"}, 0.0)
    allocator.slots.take_requests()
    allocator.shift(1000.0)
    allocator.tick(1119.0)
    assert allocator.slots.take_requests() == []
    allocator.tick(1120.0)
    assert allocator.slots.take_requests() == [
        StopAgent("node-1", "Ray has not started its agent within 120 s", never_started=True),
        StartAgent(1, "node-2", ONE),
    ]


# Drained and cordoned hosts.


def test_a_host_that_drains_is_replaced_at_once():
    """Its agent stays as long as it can. Slots on it that start are not counted on."""
    found = board(2, 2, "a", "b")
    found.tell("draining", {"b"})
    (other,) = found.starting()
    assert found.avoided(other) == {"a", "b"}
    assert found.join(other, "c")
    assert found.up == {"node-1": "a", "node-2": "b", other: "c"}
    found.lose("node-2")
    assert found.starting() == []


def test_no_agent_is_started_again_on_a_draining_host():
    """The host will go. An agent that starts there is not wanted, nor waited for."""
    found = board(3, 1, "a", "b")
    found.tell("draining", {"b", "c"})
    found.lose("node-2")
    assert all("b" not in found.announced.get(node, "") for node in found.starting())
    assert not found.join(found.starting()[0], "c")
    found.grant(found.starting()[0], "c")
    assert "c" not in found.announced.values()
    assert len(found.starting()) == 2


def test_a_slot_in_backoff_is_released_when_its_host_drains():
    """No agent will be started in it again."""
    found = board(2, 1, "a", "b")
    found.lose("node-2")
    found.now = 1.0
    (again,) = (node for node in found.starting() if found.occupied[node] == 2)
    found.lose(again)
    assert 2 in found.reserved
    found.tell("draining", {"b"})
    assert 2 not in found.reserved
    assert len(found.starting()) == 1


def test_a_host_that_is_cordoned():
    """Granted slots there are released and requests avoid it. A node that is up there stays, with a replacement."""
    found = board(4, 1, "a", "b")
    found.grant("node-3", "c")
    found.tell("cordon", "c")
    assert found.said == {"node-3": "no node is wanted on its host"}
    assert [found.avoided(node) for node in found.starting()] == [{"a", "b", "c"}] * 2
    found.tell("cordon", "b")
    assert "node-2" in found.up
    assert [found.avoided(node) for node in found.starting()] == [{"a", "b", "c"}] * 3


def test_a_host_that_is_uncordoned():
    """It is not avoided any more, and the requests for its replacements are withdrawn."""
    found = board(3, 1, "a", "b")
    found.tell("cordon", "b")
    found.tell("cordon", "c")
    assert len(found.starting()) == 2
    found.tell("uncordon", "b")
    assert [found.avoided(node) for node in found.starting()] == [{"a", "b", "c"}]
    found.tell("uncordon", "c")
    assert [found.avoided(node) for node in found.starting()] == [{"a", "b"}]


def test_more_nodes_are_requested():
    """Like the last one, and on other hosts."""
    found = board(2, 2, "a", "b")
    found.tell("scale", 4)
    assert found.starting() == ["node-3", "node-4"]
    assert found.avoided("node-3") == {"a", "b"}
    found.grant("node-3", "c")
    assert found.join("node-3", "c")


def test_fewer_nodes_are_wanted():
    """What is pending is withdrawn at once. Nodes that are up stay until they are released; nothing replaces them."""
    found = board(3, 1, "a", "b")
    assert found.starting() == ["node-3"]
    found.tell("scale", 1)
    assert (found.starting(), set(found.up)) == ([], {"node-1", "node-2"})
    found.lose("node-2")
    assert (set(found.occupied), set(found.reserved)) == ({"node-1"}, {1})
    found.tell("scale", 2)
    assert len(found.starting()) == 1


def test_slots_that_are_not_granted_are_released_first():
    """An agent that starts already will be up sooner."""
    for chosen in (0, 1):
        found = board(3, 1, "a", "b")
        found.tell("cordon", "b")
        granted = found.starting()[chosen]
        found.grant(granted, "d")
        found.tell("uncordon", "b")
        assert found.starting() == [granted]


def test_an_agent_of_the_gang_that_comes_up_when_none_is_missing():
    """It is not wanted, but its slot stays."""
    found = Board(Allocator([ONE, ONE], 2, spread=True))
    found.tell("start")
    found.allocator.granted({1: "a", 2: "b"}, 0.0)
    found.do()
    found.join("node-1", "a")
    found.tell("cordon", "a")
    (other,) = (node for node in found.starting() if node != "node-2")
    found.join(other, "c")
    found.tell("uncordon", "a")
    assert not found.join("node-2", "b")
    assert set(found.reserved) == {1, 2, 3}


def test_a_cordoned_host_without_spread():
    """Slots of the gang cannot be moved, so others are requested instead."""
    found = board(2, 2, "a", "a", spread=False)
    found.tell("cordon", "a")
    for node in ("node-1", "node-2"):
        found.lose(node)
    assert [found.avoided(node) for node in found.starting()] == [{"a"}, {"a"}]


@pytest.mark.parametrize("spread", [True, False])
def test_reports_about_unknown_nodes_are_ignored(spread):
    """They may have been sent before the node was given up."""
    found = board(2, 1, "a", "b", spread=spread)
    assert not found.join("node-9", "c")
    assert found.lose("node-9") == 0.0
    found.allocator.granted({99: "c"}, 0.0)
    found.do()
    assert found.starting() == []


# Whatever happens.

HOSTS = "abcdef"


class RandomCluster:
    """A cluster in which anything may happen at any time, but no slot is granted on a host that it avoids."""

    def __init__(self, bundles: list[Bundle], gang: int, *, spread: bool, start_timeout: float) -> None:
        self.board = Board(Allocator(bundles, gang, spread=spread, start_timeout=start_timeout))
        self.bundles = bundles
        self.gang = range(1, gang + 1)
        self.spread = spread
        self.there = False
        self.draining: set[str] = set()
        self.cordoned: set[str] = set()
        #: Slots in which a node was lost, given up or slow and none came up since; True: their host is known.
        self.failed: dict[int, bool] = {}
        self.hosts: dict[int, str] = {}
        #: Seconds from the grant to the agent, of each node that came up.
        self.start_times: list[float] = []
        self.board.tell("start")

    def one(self, index: int) -> str:
        """Return a node that is starting; "" if there is none, or only a gang that is not granted yet."""
        starting = self.board.starting() if self.there else []
        return starting[index % len(starting)] if starting else ""

    def grant(self, index: int, host: str) -> None:
        if not self.there:
            self.there = True
            self.hosts |= dict(zip(self.gang, HOSTS, strict=False))
            self.board.allocator.granted({slot: self.hosts[slot] for slot in self.gang}, self.board.now)
            self.board.do()
            return
        node = self.one(index)
        if node and self.board.occupied[node] not in self.gang and host not in self.board.avoided(node) | self.draining:
            self.hosts[self.board.occupied[node]] = host
            self.board.grant(node, host)

    def join(self, index: int, host: str) -> None:
        node = self.one(index)
        if node and host not in self.board.avoided(node):
            slot = self.board.occupied[node]
            if slot not in self.failed:  # else Ray may have moved it
                host = self.hosts.get(slot, host)
            self.hosts[slot] = host
            if node in self.board.announced_at:
                self.start_times.append(self.board.now - self.board.announced_at[node])
            if self.board.join(node, host):
                self.failed.pop(slot, None)

    def lose(self, index: int, host: str, *, silent: bool = False) -> None:
        if self.board.occupied:
            node = sorted(self.board.occupied)[index % len(self.board.occupied)]
            slot = self.board.occupied[node]
            self.failed[slot] = slot in self.hosts
            self.board.lose(node, silent=silent)

    def silent(self, index: int, host: str) -> None:
        self.lose(index, host, silent=True)

    def drain(self, index: int, host: str) -> None:
        self.draining |= {host}
        self.board.tell("draining", set(self.draining))

    def cordon(self, index: int, host: str) -> None:
        self.cordoned |= {host}
        self.board.tell("cordon", host)

    def wait(self, index: int, host: str) -> None:
        self.board.now += index * 10
        self.board.tell("tick")
        self.failed |= dict.fromkeys(self.board.unstarted, True)
        self.board.unstarted.clear()

    def move(self, index: int, host: str) -> None:
        slot = self.gang[index % len(self.gang)]
        if self.there and slot in self.failed:
            self.hosts[slot] = host
            self.board.tell("moved", {slot: host})

    def check(self) -> None:
        board = self.board
        leaving = self.draining | self.cordoned
        serving = Counter(board.bundles[board.occupied[node]] for node, host in board.up.items() if host not in leaving)
        assert not serving - Counter(self.bundles), "more than wanted"
        if self.spread:
            assert len(set(board.up.values())) == len(board.up), "two on one host"
        assert set(board.released) & set(self.gang) in (set(), set(self.gang)), "a group is given back in part"
        starting = [board.occupied[node] for node in board.starting()]
        assert not any(self.hosts.get(slot) in leaving for slot in starting), "starts where it should not"
        if self.there:
            # Slow: 60 s without an agent, or sooner if all others took far less.
            limit = min(60.0, max(20.0, 4 * max(self.start_times))) if self.start_times else 60.0
            slow = {
                board.occupied[node]
                for node in board.starting()
                if board.announced_at.get(node, board.now) <= board.now - limit
            }
            empty = set(self.gang) - set(board.occupied.values())
            self.failed = dict.fromkeys(slow | empty, True) | self.failed
            missing = Counter(self.bundles) - serving
            fresh = Counter(board.bundles[slot] for slot in starting if slot not in self.failed)
            vague = Counter(board.bundles[slot] for slot, known in self.failed.items() if not (known and self.spread))
            assert all(missing[board.bundles[slot]] for slot in starting), "starts, and is not missing"
            assert not fresh - missing, "more requested than is missing"
            assert not missing - fresh - vague, "missing, and not requested"


STEPS = st.sampled_from(["grant", "join", "join", "lose", "silent", "drain", "cordon", "wait", "move"])


@examples(300)
@given(
    kinds=st.lists(st.sampled_from([ONE, TWO]), min_size=1, max_size=5),
    gang=st.integers(1, 3),
    spread=st.booleans(),
    start_timeout=st.sampled_from([math.inf, 70.0]),
    steps=st.lists(st.tuples(STEPS, st.integers(0, 9), st.sampled_from(HOSTS)), max_size=40),
)
@example(
    kinds=[ONE, ONE],
    gang=2,
    spread=True,
    start_timeout=math.inf,
    steps=[("grant", 0, "a"), ("join", 0, "a"), ("wait", 2, "a")],
)
def test_whatever_happens(kinds, gang, spread, start_timeout, steps):
    """Never more nodes than wanted, never two on one host with spread, and what is missing is always requested."""
    cluster = RandomCluster(kinds, min(gang, len(kinds)), spread=spread, start_timeout=start_timeout)
    for step, index, host in steps:
        getattr(cluster, step)(index, host)
        cluster.check()


def test_another_process_goes_on_where_the_last_one_was_interrupted():
    """What it had not come to is requested again, what it had not released is released, and times are of its clock."""
    allocator = Allocator([ONE] * 3, 2, spread=True)
    allocator.start(0.0)
    assert [*allocator.slots.unfinished((), ())] == allocator.slots.take_requests()
    allocator.granted({1: "host-1", 2: "host-2"}, 1.0)
    (wanted, start, *_) = [each for each in allocator.slots.take_requests() if not isinstance(each, AnnounceNode)]
    assert allocator.slots.start_of(allocator.slots.of(start.node)) == start
    assert [*allocator.slots.unfinished({1, 2}, {"node-1", "node-2"})] == [wanted, start]
    assert [*allocator.slots.unfinished({1, 2, 3, 9}, {"node-1", "node-2", "node-3"})] == [ReleaseSlot(9)]
    allocator.lost("node-1", 2.0)
    allocator.lost("node-2", 3.0)
    before = allocator.next_tick(3.0)
    allocator.shift(1000.0)
    assert allocator.next_tick(1003.0) == (before and before + 1000.0)
    assert allocator.slots.of("node-1") is None
