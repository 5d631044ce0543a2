"""What failures cost, and what is given back."""

from __future__ import annotations

import pytest
from story import failure, raised

from raylaunch.core.budget import Budget
from raylaunch.core.ranks import Member

ECHO = raised("RuntimeError", "Connection reset by peer")
NODES = ("a", "b")


def gone(node: str) -> Member:
    return Member(node=node, address="10.0.0.1", nproc=2)


@pytest.mark.parametrize(
    ("most", "why"),
    [(0, "no restarts were allowed"), (1, "the only restart is used"), (3, "all 3 restarts are used")],
)
def test_as_many_restarts_as_are_allowed(most, why):
    """Each is said; then why there is none."""
    budget = Budget(most)
    for number in range(most):
        assert budget.spend(failure("ab"[number % 2]), float(number), NODES) == ""
        assert str(budget) == f"restart {number + 1} of {most}"
    assert budget.spend(failure(), 10.0, NODES) == why
    assert budget.spent == most


@pytest.mark.parametrize(
    ("nodes", "causes", "said"),
    [
        (NODES, [("b", {}), ("b", {}), ("b", {})], "all 2 restarts are used, and all failures were on b"),
        (NODES, [("b", {}), ("a", {}), ("b", {})], "all 2 restarts are used"),
        (NODES, [("b", {}), ("b", {}), ("a", {})], "all 2 restarts are used"),
        (NODES, [("b", {}), ("b", ECHO), ("b", {})], "all 2 restarts are used"),
        (("b",), [("b", {}), ("b", {}), ("b", {})], "all 2 restarts are used"),
    ],
)
def test_where_all_restarts_went(nodes, causes, said):
    """One of several nodes may be bad; what peers say is no sign of it."""
    budget = Budget(2)
    assert [budget.spend(failure(node, **facts), 0.0, nodes) for node, facts in causes][-1] == said


def test_what_failed_three_times_may_be_tried_elsewhere():
    """Once; what is hopeless anywhere stays so."""
    budget = Budget(9)
    told = [
        budget.spend(failure(**raised("ValueError")), at, NODES, elsewhere=at == 2.0) for at in (0.0, 1.0, 2.0, 3.0)
    ]
    assert told == ["", "", "", "the same failure 3 times within 60 s"]
    assert budget.spend(failure(**raised("ImportError")), 4.0, NODES, elsewhere=True) != ""


def test_the_hopeless_takes_no_restart():
    """Whatever is left."""
    for most in (0, 3):
        budget = Budget(most)
        assert budget.spend(failure(**raised("ImportError")), 0.0, NODES) == "a restart cannot mend ImportError"
    assert budget.spent == 0


def test_the_same_three_times():
    """Causes are remembered, though a restart was there for each."""
    budget = Budget(9)
    told = [budget.spend(failure(**raised("ValueError")), at, NODES) for at in (0.0, 1.0, 2.0)]
    assert told == ["", "", "the same failure 3 times within 60 s"]


@pytest.mark.parametrize(
    ("cause", "lost", "after", "pardoned"),
    [
        ({"node": "a"}, "a", 30.0, True),
        ({"node": "a"}, "a", 30.1, False),
        ({"node": "a"}, "b", 1.0, False),
        ({"node": "a"} | ECHO, "b", 30.0, True),
        ({"node": "a"} | ECHO, "b", 30.1, False),
        ({"node": "a"} | ECHO, "spare", 1.0, False),
        ({"node": "a"} | raised("ValueError"), "a", 1.0, False),
        ({"node": "a", "evidence": "out of memory"}, "a", 1.0, False),
    ],
)
def test_what_a_lost_node_explains(cause, lost, after, pardoned):
    """Kills there, and echoes anywhere; for half a minute, and if it took part."""
    budget = Budget(3)
    budget.spend(failure(**cause), 100.0, NODES)
    assert budget.pardon(gone(lost), 100.0 + after) is pardoned
    assert budget.spent == (not pardoned)


def test_nothing_is_explained_before_anything_failed():
    """Nor twice."""
    budget = Budget(3)
    assert not budget.pardon(gone("a"), 0.0)
    budget.spend(failure("a"), 1.0, NODES)
    assert budget.pardon(gone("a"), 2.0)
    assert not budget.pardon(gone("a"), 3.0)
    assert budget.spent == 0


def test_all_that_is_explained_is_pardoned_together():
    """Also what was refused, which took nothing; what is not explained stays spent."""
    budget = Budget(2)
    budget.spend(failure("b", **raised("ValueError")), 1.0, NODES)
    budget.spend(failure("b", **ECHO), 2.0, NODES)
    assert budget.spend(failure("a"), 3.0, NODES) == "all 2 restarts are used"
    assert budget.pardon(gone("a"), 4.0)
    assert budget.spent == 1


def test_what_was_pardoned_is_not_one_of_three():
    """Equal failures of a node that is gone say nothing of the next."""
    budget = Budget(9)
    kinds = [raised("ValueError"), ECHO, raised("ValueError")]
    for at, kind in enumerate(kinds):
        assert budget.spend(failure("a", **kind), float(at), NODES) == ""
    assert budget.pardon(gone("b"), 3.0)
    assert budget.spend(failure("a", **raised("ValueError")), 4.0, NODES) == "the same failure 3 times within 60 s"
