"""The exclusion of hosts that fail often, and the delays of scripts that crash in a loop."""

from __future__ import annotations

import pickle

import pytest
from machine_helpers import failure, raised

from raylaunch.core.machine.restart_policy import FAILURE_WINDOW, CrashLoopBackoff, HostHealth, came_from_outside


def blame_times(health: HostHealth, host: str, times: int) -> list[bool]:
    return [health.blame(host, 0.0) for _ in range(times)]


@pytest.mark.parametrize(
    ("facts", "outside"),
    [
        ({}, True),
        ({"exit_code": -15}, True),
        ({"exit_code": -1}, True),
        ({"exit_code": -11}, False),  # a segmentation fault
        ({"exit_code": -6}, False),
        ({"exit_code": 1}, False),
        ({"evidence": "the kernel killed it for lack of memory"}, False),
        (raised("ValueError"), False),
        ({"hung": "no step for 9 s"}, False),  # killed by raylaunch
    ],
)
def test_signals_that_come_from_outside(facts, outside):
    """Programs do not send SIGKILL, SIGTERM or SIGHUP to themselves, but cause SIGSEGV or SIGABRT."""
    assert came_from_outside(failure(**facts)) is outside


def test_host_has_too_many_failures_from_the_limit_on():
    """The third failure, and each one after it, is too many with a limit of three."""
    health = HostHealth(3)
    assert blame_times(health, "h", 4) == [False, False, True, True]
    assert blame_times(health, "other", 2) == [False, False]
    assert health.doubtful == {"h"}


def test_limit_0_excludes_no_host():
    """No host has too many failures, and none is doubtful."""
    health = HostHealth(0)
    assert blame_times(health, "h", 9) == [False] * 9
    assert health.doubtful == frozenset()


def test_memory_of_failures_is_limited():
    """Two thousand failures within an hour, each of another kind, need no more memory than some hundreds."""
    health, sizes = HostHealth(3), {}
    for number in range(2000):
        assert health.blame("a", 0.1 * number, f"E{number:05} at train.py:7") is (number >= 2)
        if number in (500, 1999):
            sizes[number] = len(pickle.dumps(health))
    assert sizes[1999] < 1.1 * sizes[500]


def test_unknown_host_is_not_blamed():
    """All unknown hosts would count as one."""
    health = HostHealth(1)
    assert not health.blame("", 0.0)
    assert health.doubtful == frozenset()


def test_failure_seen_on_two_hosts_counts_for_neither():
    """Earlier counts of this failure are dropped too; other failures still count."""
    health = HostHealth(2)
    assert not health.blame("a", 0.0, "ValueError at x:7")
    assert not health.blame("b", 0.0, "ValueError at x:7")
    assert not health.blame("a", 0.0, "ValueError at x:7")
    assert not health.blame("a", 0.0, "ValueError at x:8")
    assert health.doubtful == frozenset()
    assert health.blame("a", 0.0, "ValueError at x:8")
    assert not health.blame("a", 0.0, "ValueError at x:7")


def test_old_failure_on_another_host_is_ignored():
    """A failure on another host is ignored after `FAILURE_WINDOW`."""
    health = HostHealth(1)
    health.blame("a", 9.0, "SIGSEGV")
    assert not health.blame("b", FAILURE_WINDOW + 8.0, "SIGSEGV")
    assert health.blame("b", FAILURE_WINDOW + 9.0, "SIGSEGV")


def test_failure_on_an_excluded_host_counts_as_seen_elsewhere():
    """Else a script that always fails would get all hosts excluded, one after the other."""
    health = HostHealth(1)
    assert health.blame("a", 0.0, "SIGSEGV")
    health.exclude("a", 0.0, address="10.0.0.1", needed=False)
    assert not health.blame("b", 1.0, "SIGSEGV")


def test_repeated_failure_on_one_host_counts_each_time():
    health = HostHealth(2)
    assert [health.blame("a", 0.0, "ValueError at x:7") for _ in range(2)] == [False, True]


def test_exclusions_double_up_to_an_hour():
    health = HostHealth(1)
    assert [health.exclude("h", 0.0, address="10.0.0.1", needed=False) for _ in range(8)] == [
        60,
        120,
        240,
        480,
        960,
        1920,
        3600,
        3600,
    ]
    assert health.exclude("other", 0.0, address="10.0.0.1", needed=False) == 60


def test_needed_host_is_excluded_for_15_seconds_each_time():
    """The next exclusion when it is not needed is as long as if all had been of full length."""
    health = HostHealth(1)
    assert [health.exclude("h", 0.0, address="10.0.0.1", needed=True) for _ in range(3)] == [15, 15, 15]
    assert health.exclude("h", 0.0, address="10.0.0.1", needed=False) == 480


def test_exclusion_resets_the_failures_of_a_host():
    """Its failures are forgotten, and it is not doubtful."""
    health = HostHealth(2)
    blame_times(health, "h", 2)
    health.exclude("h", 10.0, address="10.0.0.1", needed=False)
    assert health.doubtful == frozenset()
    assert blame_times(health, "h", 2) == [False, True]


def test_exclusions_end_once_in_order():
    health = HostHealth(1)
    assert health.next_end is None
    health.exclude("a", 10.0, address="10.0.0.1", needed=False)
    health.exclude("b", 20.0, address="10.0.0.1", needed=False)
    assert (health.excluded, health.next_end) == (("a", "b"), 70.0)
    assert list(health.end_exclusions(69.9)) == []
    assert list(health.end_exclusions(70.0)) == ["a"]
    assert (health.excluded, health.next_end) == (("b",), 80.0)
    assert list(health.end_exclusions(99.0)) == ["b"]
    assert list(health.end_exclusions(99.0)) == []


def test_needed_hosts_return_after_15_seconds():
    """Repeated calls do not prolong the exclusion, and no exclusion becomes longer."""
    health = HostHealth(1)
    health.exclude("a", 0.0, address="10.0.0.1", needed=False)
    health.exclude("b", 0.0, address="10.0.0.1", needed=True)
    health.shorten_exclusions(5.0)
    health.shorten_exclusions(6.0)
    assert list(health.end_exclusions(15.0)) == ["b"]
    assert list(health.end_exclusions(20.0)) == ["a"]


def test_needed_exclusion_may_be_shorter():
    """A job with a short `join_timeout` excludes needed hosts for less than 15 s."""
    health = HostHealth(1, needed_exclusion=2.0)
    assert health.exclude("a", 0.0, address="10.0.0.1", needed=True) == 2.0
    health.exclude("b", 0.0, address="10.0.0.1", needed=False)
    health.shorten_exclusions(1.0)
    assert list(health.end_exclusions(3.0)) == ["a", "b"]


def test_crash_loop_delays_double_up_to_a_minute():
    """The first two crashes are not delayed."""
    loop = CrashLoopBackoff()
    crash = failure(**raised("ValueError"))
    assert [loop.delay(crash, 9.9) for _ in range(10)] == [0, 0, 1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize(
    "other",
    [
        lambda loop: loop.progressed(),
        lambda loop: loop.delay(failure(**raised("ValueError")), 10.0),
        lambda loop: loop.delay(failure(), 1.0),
        lambda loop: loop.delay(failure(**raised("RuntimeError", "Connection reset by peer")), 1.0),
    ],
)
def test_crash_loop_ends(other):
    """After a step, a long attempt, a kill from outside or a lost peer, the next crash counts as the first."""
    loop = CrashLoopBackoff()
    crash = failure(**raised("ValueError"))
    assert [loop.delay(crash, 1.0) for _ in range(3)] == [0, 0, 1]
    assert not other(loop)
    assert [loop.delay(crash, 1.0) for _ in range(3)] == [0, 0, 1]


def test_old_failures_do_not_count():
    """Failures on a host count for `FAILURE_WINDOW` seconds."""
    health = HostHealth(2)
    assert [health.blame("a", at) for at in (0.0, FAILURE_WINDOW, 2 * FAILURE_WINDOW - 1.0)] == [False, False, True]
