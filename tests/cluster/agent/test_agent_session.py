"""What agents keep for the drivers of their run: orders are carried out once, in order, and of one driver at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.cluster.agent.agent_session import AgentSession, SupersededError
from raylaunch.node.protocol.node_goal import NodeGoal, OpenStore


def goal(last):
    """Return a goal with so many orders, of which none replaces another: to open the store of attempt 1, 2, ..."""
    return NodeGoal(generation=last, orders=tuple((number, OpenStore(attempt=number)) for number in range(1, last + 1)))


def done(session, epoch, last):
    return [order.attempt for order in session.new_orders(epoch, goal(last))]


def test_a_driver_that_was_replaced_commands_nothing():
    """It was stopped (SIGSTOP), another one took over, and it goes on: its orders, ledger and questions are refused."""
    session = AgentSession()
    assert done(session, 1, 2) == [1, 2]
    session.adopt(2)
    for refused in (lambda: done(session, 1, 3), lambda: session.check(1), lambda: session.adopt(2)):
        with pytest.raises(SupersededError):
            refused()
    assert done(session, 2, 3) == [3]
    session.keep(2, 1, b"new")
    session.keep(1, 9, b"old")
    assert (session.look().ledger, session.look().epoch, session.look().goal) == (b"new", 2, goal(3))


def test_a_goal_of_a_driver_that_comes_before_its_adoption():
    """Ray may start the calls in this order. The driver is in command all the same, and the only one of its epoch."""
    session = AgentSession()
    assert done(session, 1, 2) == [1, 2]
    session.driver_gone()
    assert done(session, 2, 3) == [3]
    with pytest.raises(SupersededError):
        session.adopt(1)
    session.adopt(2)
    assert (session.alone, session.look().goal) == (0.0, goal(3))
    assert done(session, 2, 5) == [4, 5]
    with pytest.raises(SupersededError):
        session.adopt(2)


def test_only_a_later_driver_adopts_an_agent():
    """The one that has started it has its epoch."""
    session = AgentSession()
    assert done(session, 2, 1) == [1]
    with pytest.raises(SupersededError):
        session.adopt(2)
    session.adopt(3)


@given(st.lists(st.tuples(st.sampled_from(["", "adopts", "adopts late"]), st.integers(0, 9)), max_size=30))
def test_each_order_is_carried_out_once(turns):
    """Whenever drivers are replaced, and whichever goals come late, twice or never: all, in order, once."""
    session, epoch, newest = AgentSession(), 1, 1
    carried_out = done(session, epoch, newest)
    for what, last in turns:
        epoch += what != ""
        if what == "adopts":
            session.adopt(epoch)
        carried_out += done(session, epoch, last)
        newest = max(newest, last)
        if what == "adopts late":
            session.adopt(epoch)
        assert session.look().goal == goal(newest)
    assert carried_out == [*range(1, newest + 1)]
