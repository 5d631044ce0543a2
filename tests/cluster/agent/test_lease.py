"""The agent's lease and the driver's `node_timeout`, without Ray."""

from __future__ import annotations

import threading

import pytest

from raylaunch.cluster.agent import lease as leases
from raylaunch.cluster.agent.lease import Lease, report_interval
from raylaunch.cluster.driver.node_registry import NodeRegistry
from raylaunch.worker.heartbeats.shared_page import lease_clock


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> int:
        return int(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(leases, "lease_clock", found)
    return found


def in_seconds(times: list[int]) -> list[float]:
    return [ns / 1e9 for ns in times]


def test_a_lease_lasts_from_the_last_report_that_arrived(clock):
    """The first report renews it when it is sent, each later one when the next call proves that it arrived."""
    renewals: list[int] = []
    lease = Lease(10.0, renewals.append, lambda: None)
    lease.driver_called()
    assert renewals == []
    lease.report_sent()
    assert in_seconds(renewals) == [1009.0]
    clock.now = 1001.0
    lease.driver_called()
    clock.now = 1002.0
    lease.report_sent()  # it may never arrive
    assert in_seconds(renewals) == [1009.0, 1009.0]
    clock.now = 1003.0
    lease.driver_called()
    assert in_seconds(renewals)[-1] == 1011.0


def test_an_expired_lease_is_not_renewed(clock):
    """A call may have waited while the driver, or this process, was stopped: the workers may have ended by then."""
    renewals: list[int] = []
    lease = Lease(10.0, renewals.append, lambda: None)
    lease.report_sent()
    clock.now = 1008.0
    lease.driver_called()
    lease.report_sent()
    assert not lease.expired
    clock.now = 1009.0
    assert lease.expired
    lease.driver_called()
    assert in_seconds(renewals)[-1] == 1009.0


def test_the_first_call_of_the_next_driver_ends_the_time_that_a_node_has_without_one(clock):
    """From its first call on, the driver expects reports."""
    renewals: list[int] = []
    lease = Lease(10.0, renewals.append, lambda: None)
    lease.report_sent()
    lease.agent_idle(60.0)
    assert in_seconds(renewals)[-1] == 1060.0
    clock.now = 1001.0
    lease.report_sent()
    lease.driver_called()
    assert in_seconds(renewals)[-1] == 1010.0


def test_the_process_ends_when_the_lease_expires():
    ended = threading.Event()
    renewals: list[int] = []
    lease = Lease(0.3, renewals.append, ended.set)
    lease.start()
    lease.report_sent()
    assert ended.wait(100)
    assert lease_clock() >= renewals[-1]


def test_a_lease_expires_while_the_machine_sleeps(clock):
    """Waiting with a timeout does not count the time that the machine sleeps, so the thread looks at the clock."""

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.set()
            return super().wait(timeout)

    waits, ended = threading.Event(), threading.Event()
    renewals: list[int] = []
    lease = Lease(3600.0, renewals.append, ended.set)
    lease.released = Waited()
    lease.start()
    lease.report_sent()
    assert waits.wait(100)
    clock.now += 3600.0
    assert ended.wait(100)
    lease.driver_called()
    assert in_seconds(renewals) == [1000.0 + 0.9 * 3600.0]


def test_the_process_ends_if_the_driver_never_calls(monkeypatch):
    monkeypatch.setattr(leases, "FIRST_CALL_SECONDS", 0.05)
    ended = threading.Event()
    Lease(5.0, lambda _: None, ended.set).start()
    assert ended.wait(100)


def test_closing_the_node_may_take_longer_than_the_lease(clock):
    lease = Lease(0.3, lambda _: None, lambda: None)
    lease.report_sent()
    lease.node_closing()
    clock.now += 5.0
    assert not lease.expired


def test_a_lease_expires_before_the_driver_takes_the_node_for_lost(clock):
    """Whatever the order of sending, arriving and calling."""
    timeout = 5.0
    renewals: list[int] = []
    registry = NodeRegistry(timeout, None)
    lease = Lease(timeout, renewals.append, lambda: None)
    for step, travel in enumerate([0.0, 0.4, 1.9, 0.0, 3.0, 0.2]):
        lease.report_sent()
        clock.now += travel
        if step == 0:
            registry.came_up("node-1", "host", clock.now)
        registry.heard("node-1", clock.now)
        lease.driver_called()
        assert renewals[-1] / 1e9 < clock.now + timeout
        assert registry.silent(renewals[-1] / 1e9) == []


def test_several_reports_fit_into_the_node_timeout():
    assert report_interval(5.0) == 1.0
    assert report_interval(60.0) == 1.0
    assert report_interval(1.5) == pytest.approx(0.3)
