"""A sync point: a step is proposed, and committed when no worker has passed it."""

from __future__ import annotations

from raylaunch.cluster.driver.executor import SyncPoint
from raylaunch.node.protocol.node_goal import ProposeCheckpoint
from raylaunch.node.protocol.node_status import StepProposed
from tests.fakes import FakeFleet

NODES = ("node-1", "node-2")


class SilentFleet(FakeFleet):
    """Records orders, and reports nothing."""

    def report(self, node, *events, **more) -> None:
        pass


def propose_step(step: int) -> tuple[SilentFleet, SyncPoint]:
    fleet = SilentFleet(2)
    return fleet, SyncPoint(fleet.send, NODES, ProposeCheckpoint(attempt=3, step=step))


def proposed(node: str, step: int, reached: int, attempt: int = 3) -> StepProposed:
    return StepProposed(node=node, attempt=attempt, step=step, reached=reached)


def take_orders(fleet: SilentFleet) -> list[tuple]:
    """Return the orders since the last call."""
    found, fleet.sent = fleet.sent, []
    return found


def test_a_step_is_committed_when_all_nodes_are_before_it():
    """That takes two messages to each node, and one back."""
    fleet, proposal = propose_step(40)
    assert take_orders(fleet) == [("propose", node, 3, 40) for node in NODES]
    proposal.answered(proposed("node-1", 40, 38))
    assert take_orders(fleet) == []
    proposal.answered(proposed("node-2", 40, 39))
    assert take_orders(fleet) == [("commit", node, 3, 40) for node in NODES]


def test_a_step_that_a_worker_has_passed_is_replaced_by_a_later_one():
    """A worker at step 45 waits when it next calls `should_checkpoint`, at step 46 at the latest."""
    fleet, proposal = propose_step(40)
    take_orders(fleet)
    proposal.answered(proposed("node-1", 40, 45))
    proposal.answered(proposed("node-2", 40, 39))
    assert take_orders(fleet) == [("propose", node, 3, 47) for node in NODES]
    proposal.answered(proposed("node-1", 47, 46))
    proposal.answered(proposed("node-2", 47, 41))
    assert take_orders(fleet) == [("commit", node, 3, 47) for node in NODES]


def test_a_worker_that_polled_at_the_step_itself_has_passed_it():
    fleet, proposal = propose_step(40)
    take_orders(fleet)
    proposal.answered(proposed("node-1", 40, 40))
    proposal.answered(proposed("node-2", 40, 40))
    assert take_orders(fleet) == [("propose", node, 3, 42) for node in NODES]


def test_other_answers_are_ignored():
    """For an earlier step, of another attempt, of a node that has no proposal, or repeated."""
    fleet, proposal = propose_step(40)
    take_orders(fleet)
    proposal.answered(proposed("node-1", 40, 1))
    for stray in (
        proposed("node-1", 40, 1),
        proposed("node-2", 39, 1),
        proposed("node-2", 40, 1, attempt=2),
        proposed("node-9", 40, 1),
    ):
        proposal.answered(stray)
    assert take_orders(fleet) == []
    proposal.answered(proposed("node-2", 40, 1))
    assert len(take_orders(fleet)) == 2
