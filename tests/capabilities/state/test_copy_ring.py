"""To which agent each one copies what its ranks have committed, and what else nodes are told of `State`."""

from __future__ import annotations

from types import SimpleNamespace

from msgspec import msgpack

from raylaunch.capabilities.state.driver import HeldState, over, targets
from raylaunch.capabilities.state.sections import StateGoal, StateStatus
from raylaunch.cluster.capability import NEVER
from raylaunch.core.machine.commits import CopyAddress
from raylaunch.core.machine.events_and_actions import RestartRequested
from raylaunch.core.machine.state import Phase
from raylaunch.core.placement.environment import Member
from tests.fakes import driver_port


def machine_of(*members: Member) -> SimpleNamespace:
    roster = tuple(one.node for one in members)
    world = SimpleNamespace(attempt=1, members=members, roster=roster, replacements=(), staying=())
    return SimpleNamespace(attempt=1, nodes=set("abcd"), world=world, leaving=set(), phase=Phase.STARTING)


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


class Ring:
    """The driver's part, and the goals that it has shown."""

    def __init__(self, *members: Member) -> None:
        self.machine = machine_of(*members)
        self.goals: dict[str, StateGoal] = {}
        self.part = HeldState(driver_port(machine=self.machine, show=self._show))

    def _show(self, node: str, section: bytes) -> None:
        self.goals[node] = msgpack.decode(section, type=StateGoal)

    def tell(self, *names: str, **status) -> None:
        """Nodes say that they give and take copies at ports 1, 2, 3, ..."""
        for name in names:
            self.part.told(name, msgpack.encode(StateStatus(at=address(name), **status)))

    def launch(self) -> dict[str, StateGoal]:
        self.goals = {}
        self.part.launched(0.0)
        return self.goals

    def save(self) -> dict[str, StateGoal]:
        self.goals = {}
        self.part.saving(0.0)
        return self.goals

    @property
    def targets(self) -> dict[str, str]:
        return {node: goal.copies_to.node for node, goal in self.goals.items() if goal.copies_to is not None}


def address(name: str, **more) -> CopyAddress:
    return CopyAddress(node=name, host="10.0.0.1", port=1 + "abcd".index(name), **more)


def test_the_nodes_of_an_attempt_copy_to_those_whose_address_is_known():
    ring = Ring(member("a", "1"), member("b", "2"), member("c", "3"))
    assert ring.launch() == {}
    ring.tell("a", "b")
    ring.launch()
    assert ring.targets == {"a": "b", "c": "a"}
    assert ring.goals["a"] == StateGoal(attempt=1, copies_to=address("b"))
    ring.tell("c")
    ring.machine.leaving = {"b"}
    ring.launch()
    assert ring.targets == {"a": "c", "b": "c", "c": "a"}


def test_before_nodes_leave_all_copy_to_those_that_stay_or_to_those_that_replace_the_whole_world():
    """And the workers wait for that."""
    ring = Ring(member("a", "1"), member("b", "2"), member("c", "3"))
    ring.tell(*"abcd")
    ring.launch()
    assert ring.save() == {}
    ring.machine.leaving = {"b"}
    ring.save()
    assert ring.targets == {"a": "c", "b": "c", "c": "a"}
    assert all(goal.awaits_copy for goal in ring.goals.values())
    ring.machine.leaving, ring.machine.world.replacements = {"a", "b", "c"}, ("d",)
    ring.save()
    assert ring.targets == {"a": "d", "b": "d", "c": "d"}


def test_if_another_node_leaves_while_all_save_nodes_with_another_target_are_told_again():
    ring = Ring(member("a", "1"), member("b", "2"), member("c", "3"))
    ring.tell(*"abcd")
    ring.launch()
    ring.machine.leaving = {"b"}
    ring.save()
    assert ring.save() == {}
    ring.machine.leaving = {"b", "c"}
    ring.save()
    assert ring.targets == {"a": "b", "b": "a"}
    assert all(goal.awaits_copy for goal in ring.goals.values())


def test_a_driver_that_takes_over_while_all_save_tells_that_again():
    ring = Ring(member("a", "1"), member("b", "2"), member("c", "3"))
    ring.tell(*"abc")
    ring.machine.leaving, ring.machine.phase = {"b"}, Phase.SAVING
    ring.launch()
    assert ring.targets == {"a": "c", "b": "c", "c": "a"}
    assert all(goal.awaits_copy for goal in ring.goals.values())


def test_if_one_node_has_files_all_are_told_where_to_ask():
    ring = Ring(member("a", "1"), member("b", "1"))
    ring.tell("a", "b")
    assert ring.launch() == {}
    ring.tell("a", has_files=True)
    asked = {node: sorted(one.node for one in goal.peers) for node, goal in ring.launch().items()}
    assert asked == {"a": ["a", "b"], "b": ["a", "b"]}


def test_nodes_are_told_of_survivors():
    ring = Ring(member("a", "1"), member("b", "1"))
    ring.machine.world.staying = ("b",)
    assert ring.launch() == dict.fromkeys("ab", StateGoal(attempt=1, has_survivors=True))


def test_survivors_that_have_nothing_to_restore_are_started_again_once():
    ring = Ring(member("a", "1"), member("b", "1"))
    ring.tell("a")
    assert (ring.part.next_check, [*ring.part.due_events(7.0)]) == (NEVER, [])
    ring.tell("a", stuck_attempt=1)
    ring.tell("a", stuck_attempt=1, has_files=True)
    by = "a, whose survivors have nothing to restore,"
    assert ring.part.next_check == 0.0
    assert [*ring.part.due_events(7.0)] == [RestartRequested(at=7.0, by=by, save_seconds=0.0)]
    assert (ring.part.next_check, [*ring.part.due_events(8.0)]) == (NEVER, [])
    ring.machine.attempt = 2
    ring.tell("b", stuck_attempt=1)
    ring.tell("a", stuck_attempt=2)
    ring.machine.attempt = 3
    assert [*ring.part.due_events(9.0)] == []


def test_several_nodes_replace_others_in_turn():
    assert over("abc", "de") == {"a": "d", "b": "e", "c": "d"}
    assert over("abc", "") == {}


def test_a_node_that_is_no_longer_in_the_world_is_asked_for_what_it_holds():
    """As one that is left over where the world's size is a multiple of something. A spare one has nothing."""
    ring = Ring(member("a", "1"), member("b", "1"))
    ring.tell(*"abcd")
    assert ring.launch() == {}
    ring.machine.world = machine_of(member("b", "1"), member("c", "1")).world
    for _ in range(5):
        assert ring.launch() == {"b": StateGoal(attempt=1, lost=(address("a", outside=True),))}
    ring.machine.world = machine_of(member("a", "1"), member("b", "1"), member("c", "1")).world
    assert ring.launch() == {}
    ring.part.lost("a", is_dead=False)
    ring.machine.world = machine_of(member("b", "1"), member("c", "1")).world
    assert ring.launch() == {}


def test_a_few_attempts_ask_what_a_killed_agent_has_left():
    """The node of rank 0 does. None asks one that was silent, which may be alive."""
    ring = Ring(member("c", "1"), member("d", "1"))
    ring.tell("a", "b")
    ring.part.lost("a", is_dead=False)
    ring.part.lost("d", is_dead=True)  # it was never up
    ring.part.lost("b", is_dead=True)
    for _ in range(3):
        assert ring.launch() == {"c": StateGoal(attempt=1, lost=(address("b", outside=True),))}
    assert ring.launch() == {}
