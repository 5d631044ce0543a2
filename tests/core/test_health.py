"""What is on record of hosts and of scripts."""

from __future__ import annotations

import pytest
from story import failure, raised

from raylaunch.core.health import FAILURE_WINDOW, CrashLoop, Health, came_from_outside


def blamed(health: Health, host: str, times: int) -> list[bool]:
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
        ({"hung": "no step for 9 s"}, False),  # we ended it
    ],
)
def test_who_ended_a_worker(facts, outside):
    """Signals that others send; not those that a program brings on itself."""
    assert came_from_outside(failure(**facts)) is outside


def test_the_last_failure_that_a_host_may_have():
    """And every one after that."""
    health = Health(3)
    assert blamed(health, "h", 4) == [False, False, True, True]
    assert blamed(health, "other", 2) == [False, False]
    assert health.doubtful == {"h"}


def test_no_host_is_too_bad_where_that_is_off():
    """Neither left out nor doubtful."""
    health = Health(0)
    assert blamed(health, "h", 9) == [False] * 9
    assert health.doubtful == frozenset()


def test_a_host_without_a_name_is_not_blamed():
    """All such hosts would be one."""
    health = Health(1)
    assert not health.blame("", 0.0)
    assert health.doubtful == frozenset()


def test_what_was_seen_on_two_hosts_blames_neither():
    """Nor does what was counted before; other failures count as ever."""
    health = Health(2)
    assert not health.blame("a", 0.0, "ValueError at x:7")
    assert not health.blame("b", 0.0, "ValueError at x:7")
    assert not health.blame("a", 0.0, "ValueError at x:7")
    assert not health.blame("a", 0.0, "ValueError at x:8")
    assert health.doubtful == frozenset()
    assert health.blame("a", 0.0, "ValueError at x:8")
    assert not health.blame("a", 0.0, "ValueError at x:7")


def test_what_was_seen_elsewhere_long_ago_does_not_excuse():
    """After the same time after which it would not count there."""
    health = Health(1)
    health.blame("a", 9.0, "SIGSEGV")
    assert not health.blame("b", FAILURE_WINDOW + 8.0, "SIGSEGV")
    assert health.blame("b", FAILURE_WINDOW + 9.0, "SIGSEGV")


def test_what_failed_on_a_host_that_is_left_out_excuses_the_next():
    """Else a script that always fails would have all hosts left out, one after the other."""
    health = Health(1)
    assert health.blame("a", 0.0, "SIGSEGV")
    health.exclude("a", 0.0, needed=False)
    assert not health.blame("b", 1.0, "SIGSEGV")


def test_the_same_failure_on_one_host_only_is_that_hosts():
    """As often as it is seen there."""
    health = Health(2)
    assert [health.blame("a", 0.0, "ValueError at x:7") for _ in range(2)] == [False, True]


def test_the_time_a_host_is_left_out_doubles():
    """Up to an hour."""
    health = Health(1)
    assert [health.exclude("h", 0.0, needed=False) for _ in range(8)] == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert health.exclude("other", 0.0, needed=False) == 60


def test_a_needed_host_is_left_out_for_a_moment_each_time():
    """And for its full time where it is not needed any more."""
    health = Health(1)
    assert [health.exclude("h", 0.0, needed=True) for _ in range(3)] == [15, 15, 15]
    assert health.exclude("h", 0.0, needed=False) == 480


def test_a_host_that_is_left_out_begins_anew():
    """Its failures are forgotten, and it is not doubtful."""
    health = Health(2)
    blamed(health, "h", 2)
    health.exclude("h", 10.0, needed=False)
    assert health.doubtful == frozenset()
    assert blamed(health, "h", 2) == [False, True]


def test_hosts_come_back_in_their_time():
    """Each once."""
    health = Health(1)
    assert health.next_cooled is None
    health.exclude("a", 10.0, needed=False)
    health.exclude("b", 20.0, needed=False)
    assert (health.excluded, health.next_cooled) == (("a", "b"), 70.0)
    assert health.cooled(69.9) == []
    assert health.cooled(70.0) == ["a"]
    assert (health.excluded, health.next_cooled) == (("b",), 80.0)
    assert health.cooled(99.0) == ["b"]
    assert health.cooled(99.0) == []


def test_hosts_come_back_soon_where_they_are_needed():
    """Asking again does not put it off, and nobody stays out for longer than before."""
    health = Health(1)
    health.exclude("a", 0.0, needed=False)
    health.exclude("b", 0.0, needed=True)
    health.hurry(5.0)
    health.hurry(6.0)
    assert health.cooled(15.0) == ["b"]
    assert health.cooled(20.0) == ["a"]


def test_the_moment_may_be_shorter():
    """As a job with little time to wait for nodes wants it."""
    health = Health(1, needed_cooling=2.0)
    assert health.exclude("a", 0.0, needed=True) == 2.0
    health.exclude("b", 0.0, needed=False)
    health.hurry(1.0)
    assert health.cooled(3.0) == ["a", "b"]


def test_delays_grow():
    """Twice none, then doubled to a minute."""
    loop = CrashLoop()
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
def test_what_ends_a_crash_loop(other):
    """A step, time, a kill from outside, an echo: the next crash is the first again."""
    loop = CrashLoop()
    crash = failure(**raised("ValueError"))
    assert [loop.delay(crash, 1.0) for _ in range(3)] == [0, 0, 1]
    assert not other(loop)
    assert [loop.delay(crash, 1.0) for _ in range(3)] == [0, 0, 1]


def test_failures_of_long_ago_do_not_count():
    """A host may fail now and then in a long run."""
    health = Health(2)
    assert [health.blame("a", at) for at in (0.0, FAILURE_WINDOW, 2 * FAILURE_WINDOW - 1.0)] == [False, False, True]
