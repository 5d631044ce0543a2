"""The restarts that failures spend, and those that lost nodes give back."""

from __future__ import annotations

import pickle

import pytest
from machine_helpers import failure, raised

from raylaunch.core.machine.restart_policy import RestartBudget
from raylaunch.core.placement.environment import Member

PEER_LOST = raised("RuntimeError", "Connection reset by peer")
NODES = ("a", "b")


def why_refused(budget: RestartBudget, *arguments: object, **options: object) -> str:
    """Spend a restart on a failure; return why there is none, or ""."""
    refused = budget.spend(*arguments, **options)
    return refused.why if refused is not None else ""


def lost_member(node: str) -> Member:
    return Member(node=node, address="10.0.0.1", nproc=2)


@pytest.mark.parametrize(
    ("limit", "why"),
    [(0, "no restarts were allowed"), (1, "the only restart is used"), (3, "all 3 restarts are used")],
)
def test_budget_allows_max_restarts(limit, why):
    """Each restart is numbered; the next failure gets the reason why none is left."""
    budget = RestartBudget(limit)
    for number in range(limit):
        assert why_refused(budget, failure("ab"[number % 2]), float(number), NODES) == ""
        assert str(budget) == f"restart {number + 1} of {limit}"
    assert why_refused(budget, failure(), 10.0, NODES) == why
    assert budget.spent == limit


@pytest.mark.parametrize(
    ("nodes", "causes", "message"),
    [
        (NODES, [("b", {}), ("b", {}), ("b", {})], "all 2 restarts are used, and all failures were on b"),
        (NODES, [("b", {}), ("a", {}), ("b", {})], "all 2 restarts are used"),
        (NODES, [("b", {}), ("b", {}), ("a", {})], "all 2 restarts are used"),
        (NODES, [("b", {}), ("b", PEER_LOST), ("b", {})], "all 2 restarts are used"),
        (("b",), [("b", {}), ("b", {}), ("b", {})], "all 2 restarts are used"),
    ],
)
def test_budget_names_a_node_that_spent_all_restarts(nodes, causes, message):
    """One of several nodes with all failures is named, unless failures were collateral."""
    budget = RestartBudget(2)
    assert [why_refused(budget, failure(node, **facts), 0.0, nodes) for node, facts in causes][-1] == message


def test_three_equal_failures_may_be_tried_elsewhere():
    """`elsewhere` allows a third equal failure once; permanent errors still end the run."""
    budget = RestartBudget(9)
    answers = [
        why_refused(budget, failure(**raised("ValueError")), at, NODES, elsewhere=at == 2.0)
        for at in (0.0, 1.0, 2.0, 3.0)
    ]
    assert answers == ["", "", "", "the same failure 3 times within 60 s"]
    assert why_refused(budget, failure(**raised("ImportError")), 4.0, NODES, elsewhere=True) != ""


def test_permanent_errors_spend_no_restart():
    for limit in (0, 3):
        budget = RestartBudget(limit)
        assert why_refused(budget, failure(**raised("ImportError")), 0.0, NODES) == "a restart cannot mend ImportError"
    assert budget.spent == 0


def test_three_equal_failures():
    """The third equal failure gets no restart, though the budget has some left."""
    budget = RestartBudget(9)
    answers = [why_refused(budget, failure(**raised("ValueError")), at, NODES) for at in (0.0, 1.0, 2.0)]
    assert answers == ["", "", "the same failure 3 times within 60 s"]


def test_equal_failures_after_later_steps():
    """A run that saves a later step between equal failures goes on; three at one saved step end it."""
    budget = RestartBudget(9)
    answers = []
    for at, saved in enumerate((5, 6, 7, 7, 7)):
        budget.saved(saved)
        answers.append(why_refused(budget, failure(**raised("ValueError")), float(at), NODES))
    assert answers == ["", "", "", "", "the same failure 3 times within 60 s"]


@pytest.mark.parametrize(
    ("cause", "lost", "after", "pardoned"),
    [
        ({"node": "a"}, "a", 30.0, True),
        ({"node": "a"}, "a", 30.1, False),
        ({"node": "a"}, "b", 1.0, False),
        ({"node": "a"} | PEER_LOST, "b", 30.0, True),
        ({"node": "a"} | PEER_LOST, "b", 30.1, False),
        ({"node": "a"} | PEER_LOST, "spare", 1.0, False),
        ({"node": "a"} | raised("ValueError"), "a", 1.0, False),
        ({"node": "a", "evidence": "out of memory"}, "a", 1.0, False),
    ],
)
def test_failures_that_a_loss_explains(cause, lost, after, pardoned):
    """A loss explains kills on its node and collateral failures for 30 s, if the node was part of the attempt."""
    budget = RestartBudget(3)
    budget.spend(failure(**cause), 100.0, NODES)
    assert budget.pardon(lost_member(lost), 100.0 + after) is pardoned
    assert budget.spent == (not pardoned)


def test_pardon_needs_a_failure():
    """Nothing is pardoned before a failure, or twice."""
    budget = RestartBudget(3)
    assert not budget.pardon(lost_member("a"), 0.0)
    budget.spend(failure("a"), 1.0, NODES)
    assert budget.pardon(lost_member("a"), 2.0)
    assert not budget.pardon(lost_member("a"), 3.0)
    assert budget.spent == 0


def test_all_explained_failures_are_pardoned_together():
    """Failures without a restart are pardoned too; those that are not explained stay spent."""
    budget = RestartBudget(2)
    budget.spend(failure("b", **raised("ValueError")), 1.0, NODES)
    budget.spend(failure("b", **PEER_LOST), 2.0, NODES)
    assert why_refused(budget, failure("a"), 3.0, NODES) == "all 2 restarts are used"
    assert budget.pardon(lost_member("a"), 4.0)
    assert budget.spent == 1


def test_pardoned_failures_do_not_count_as_equal():
    """A pardoned failure between equal ones does not interrupt them."""
    budget = RestartBudget(9)
    kinds = [raised("ValueError"), PEER_LOST, raised("ValueError")]
    for at, kind in enumerate(kinds):
        assert why_refused(budget, failure("a", **kind), float(at), NODES) == ""
    assert budget.pardon(lost_member("b"), 3.0)
    assert (
        why_refused(budget, failure("a", **raised("ValueError")), 4.0, NODES) == "the same failure 3 times within 60 s"
    )


@pytest.mark.parametrize(
    ("causes", "message"),
    [
        ([("b", {})] * 4, "all 3 restarts are used, and all failures were on b"),
        ([("a", {}), *[("b", {})] * 3], "all 3 restarts are used"),
        ([("a", {}), ("b", {}), ("c", {}), ("a", {})], "all 3 restarts are used"),
        ([("b", PEER_LOST), *[("b", {})] * 3], "all 3 restarts are used"),
    ],
)
def test_failures_of_long_ago_count_for_the_message(causes, message):
    """Where they were, and whether they were collateral."""
    budget = RestartBudget(3)
    answers = [
        why_refused(budget, failure(node, **facts), 100.0 * number, NODES)
        for number, (node, facts) in enumerate(causes)
    ]
    assert answers == ["", "", "", message]


def fail_at(budget: RestartBudget, *lines: int, **options: object) -> list[str]:
    """Let an attempt fail at each of these lines of the script, a minute after the other; return why none follows."""
    return [
        why_refused(budget, failure(**raised("ValueError", line=line)), 60.0 * line, NODES, **options) for line in lines
    ]


def test_restarts_in_vain():
    """The fourth failure since the last new saved step ends the run: another run would fail there, too."""
    budget = RestartBudget(100)
    budget.saved(840)
    assert fail_at(budget, 1, 2, 3) == ["", "", ""]
    budget.saved(840)
    refused = budget.spend(failure(**raised("ValueError", line=4)), 240.0, NODES)
    assert refused == ("3 restarts have brought no saved step after step 840", True)


def test_each_new_saved_step_allows_restarts():
    budget = RestartBudget(100)
    for step in range(30):
        budget.saved(step)
        assert fail_at(budget, 3 * step, 3 * step + 1, 3 * step + 2) == ["", "", ""]


def test_steps_are_saved_anew_after_a_loss():
    """A `State` whose hosts were lost begins again: its first steps are new ones, long before it is where it was."""
    budget = RestartBudget(100)
    budget.saved(2482)
    assert fail_at(budget, 1, 2, 3) == ["", "", ""]
    budget.saved(0)
    for step in range(1, 30):
        budget.saved(step)
        assert fail_at(budget, 3 * step, 3 * step + 1, 3 * step + 2) == ["", "", ""]
    refused = budget.spend(failure(**raised("ValueError", line=4)), 9999.0, NODES)
    assert refused == ("3 restarts have brought no saved step after step 29", True)


@pytest.mark.parametrize("facts", [{}, PEER_LOST])
def test_failures_from_outside_are_not_in_vain(facts):
    """A kill and a lost peer say nothing of the script."""
    budget = RestartBudget(100)
    budget.saved(840)
    assert not any(why_refused(budget, failure(**facts), float(at), NODES) for at in range(50))


def test_restarts_of_a_script_that_saves_nothing_are_not_in_vain():
    """It may have checkpoints that raylaunch does not know of."""
    assert fail_at(RestartBudget(100), *range(50)) == [""] * 50


def test_restarts_of_a_script_in_which_one_rank_saves_are_not_in_vain():
    """What that rank has saved since its last heartbeat is not known when another one fails."""
    budget = RestartBudget(100)
    budget.spend(failure(rank=0, saved=840, **raised("ValueError", line=60)), 0.0, NODES)
    assert fail_at(budget, *range(50)) == [""] * 50


def test_failures_of_a_bad_host_are_not_in_vain():
    """The next attempt is elsewhere."""
    budget = RestartBudget(100)
    budget.saved(840)
    assert fail_at(budget, *range(50), elsewhere=True) == [""] * 50


def test_only_failures_that_would_come_again_are_pointless():
    """A spent budget is not: a new run has another one."""
    assert RestartBudget(0).spend(failure(), 0.0, NODES) == ("no restarts were allowed", False)
    assert RestartBudget(0).spend(failure(**raised("ImportError")), 0.0, NODES) == (
        "a restart cannot mend ImportError",
        True,
    )


def test_memory_of_failures_is_limited():
    """A thousand failures, one every ten seconds, need no more memory than those of the last minute."""
    budget = RestartBudget(10_000)
    sizes = []
    for number in range(1000):
        budget.spend(failure("ab"[number % 2]), 10.0 * number, NODES)
        sizes.append(len(pickle.dumps(budget)))
    assert sizes[-1] <= sizes[100] + 20
