"""What agents keep for the drivers of their run: orders are carried out once, in order, and of one driver at a time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.cluster.succession.agent_session import AgentSession, SupersededError


def numbered(*numbers):
    return [(number, str(number).encode()) for number in numbers]


def done(session, epoch, *numbers):
    return [int(order) for order in session.new_orders(epoch, numbered(*numbers))]


def test_a_driver_that_was_replaced_commands_nothing():
    """It was stopped (SIGSTOP), another one took over, and it goes on: its orders, state and questions are refused."""
    session = AgentSession()
    assert done(session, 1, 1, 2) == [1, 2]
    session.adopt(2)
    for refused in (lambda: done(session, 1, 3), lambda: session.check(1), lambda: session.adopt(2)):
        with pytest.raises(SupersededError):
            refused()
    assert done(session, 2, 2, 3) == [3]
    session.keep(2, 1, b"new")
    session.keep(1, 9, b"old")
    assert (session.look().state, session.look().epoch, session.look().handled) == (b"new", 2, 3)


def test_an_early_order_of_a_driver_that_was_replaced_is_not_carried_out():
    """The one before it was lost with that driver. The next driver gives other orders with the same numbers."""
    session = AgentSession()
    assert [*session.new_orders(1, [(1, b"one"), (3, b"old three")])] == [b"one"]
    session.adopt(2)
    assert [*session.new_orders(2, [(2, b"two")])] == [b"two"]
    assert [*session.new_orders(2, [(3, b"three")])] == [b"three"]


def test_orders_of_a_driver_that_come_before_its_adoption():
    """Ray may start the calls in this order. The driver is in command all the same, and the only one of its epoch."""
    session = AgentSession()
    assert done(session, 1, 1, 2) == [1, 2]
    session.driver_gone()
    assert done(session, 2, 3, 5) == [3]
    with pytest.raises(SupersededError):
        session.adopt(1)
    session.adopt(2)
    assert (session.alone, session.look().handled) == (0.0, 3)
    assert done(session, 2, 4) == [4, 5]
    with pytest.raises(SupersededError):
        session.adopt(2)


def test_only_a_later_driver_adopts_an_agent():
    """The one that has started it has its epoch."""
    session = AgentSession()
    assert done(session, 2, 1) == [1]
    with pytest.raises(SupersededError):
        session.adopt(2)
    session.adopt(3)


@given(st.data())
def test_orders_are_carried_out_in_the_order_of_their_numbers(data):
    """However many there are in a call, and in whatever order Ray starts the calls, some of which are made again."""
    last = data.draw(st.integers(1, 12))
    starts = sorted(data.draw(st.sets(st.integers(2, last)))) if last > 1 else []
    calls = [range(one, other) for one, other in pairwise([1, *starts, last + 1])]
    again = data.draw(st.lists(st.sampled_from(calls), max_size=3))
    session, carried_out = AgentSession(), []
    for call in data.draw(st.permutations([*calls, *again])):
        carried_out += done(session, 1, *call)
        assert session.handled == len(carried_out)
    assert carried_out == [*range(1, last + 1)]


@given(st.lists(st.tuples(st.sampled_from(["", "adopts", "adopts late"]), st.integers(0, 4)), max_size=30))
def test_each_order_is_carried_out_once(turns):
    """Whenever drivers are replaced, and however many of its last orders each sends again: all, in order, once."""
    session, epoch, sent = AgentSession(), 1, 1
    carried_out = done(session, epoch, sent)
    for what, again in turns:
        epoch += what != ""
        if what == "adopts":
            session.adopt(epoch)
        sent += 1
        carried_out += done(session, epoch, sent)
        if what == "adopts late":
            session.adopt(epoch)
        if what:
            carried_out += done(session, epoch, *range(max(1, sent - again), sent + 1))
    assert carried_out == [*range(1, sent + 1)]
