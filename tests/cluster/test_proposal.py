"""One step for all: proposed, and settled when nobody can have passed it."""

from __future__ import annotations

from raylaunch.cluster.proposal import Proposal
from raylaunch.node.messages import Proposed
from tests.fakes import FakeFleet

NODES = ("node-1", "node-2")


class Silent(FakeFleet):
    """Obeys, and says nothing by itself."""

    def say(self, node, *events, **more) -> None:
        pass


def told(step: int) -> tuple[Silent, Proposal]:
    fleet = Silent(2)
    return fleet, Proposal(fleet, 3, NODES, step)


def word(node: str, step: int, reached: int, attempt: int = 3) -> Proposed:
    return Proposed(node=node, attempt=attempt, step=step, reached=reached)


def asked(fleet: Silent) -> list[tuple]:
    found, fleet.sent = fleet.sent, []
    return found


def test_it_is_settled_when_all_are_known_to_be_before_it():
    """One message to each node and back, and one more."""
    fleet, proposal = told(40)
    assert asked(fleet) == [("checkpoint", node, 3, 40) for node in NODES]
    proposal.take(word("node-1", 40, 38))
    assert asked(fleet) == []
    proposal.take(word("node-2", 40, 39))
    assert asked(fleet) == [("settle", node, 3, 40) for node in NODES]


def test_a_step_that_one_has_passed_is_replaced_by_one_that_nobody_can_have_passed():
    """Whoever was at step 45 is stopped by the first step that it asks about after that, 46 at the latest."""
    fleet, proposal = told(40)
    asked(fleet)
    proposal.take(word("node-1", 40, 45))
    proposal.take(word("node-2", 40, 39))
    assert asked(fleet) == [("checkpoint", node, 3, 47) for node in NODES]
    proposal.take(word("node-1", 47, 46))
    proposal.take(word("node-2", 47, 41))
    assert asked(fleet) == [("settle", node, 3, 47) for node in NODES]


def test_to_have_asked_about_the_very_step_is_to_have_passed_it():
    fleet, proposal = told(40)
    asked(fleet)
    proposal.take(word("node-1", 40, 40))
    proposal.take(word("node-2", 40, 40))
    assert asked(fleet) == [("checkpoint", node, 3, 42) for node in NODES]


def test_words_that_are_not_of_this_proposal_settle_nothing():
    """Of an earlier step, of another attempt, of a node that has no part, or said twice."""
    fleet, proposal = told(40)
    asked(fleet)
    proposal.take(word("node-1", 40, 1))
    for stray in (
        word("node-1", 40, 1),
        word("node-2", 39, 1),
        word("node-2", 40, 1, attempt=2),
        word("node-9", 40, 1),
    ):
        proposal.take(stray)
    assert asked(fleet) == []
    proposal.take(word("node-2", 40, 1))
    assert len(asked(fleet)) == 2
