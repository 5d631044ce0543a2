"""Progress and hangs, computed from heartbeats that arrive once a second and in any order."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.core.machine.events_and_actions import Progressed
from raylaunch.core.machine.measured import CommitRate, NodeMemory
from raylaunch.core.monitoring.checkpoint_step import propose_step
from raylaunch.core.monitoring.hang_detector import HangDetector, HangLimits
from raylaunch.core.monitoring.heartbeat import Heartbeat, WorkerProgress
from raylaunch.core.monitoring.progress_report import ProgressReporter, ProgressSample
from raylaunch.core.monitoring.rank_progress import WARM_UP, WorldProgress
from raylaunch.core.record.attempt import StepHistory
from tests.profiles import examples

HEARTBEAT_SECONDS = 1.0


class Tracker:
    """One attempt after the other, as the driver and its watch for hangs follow them."""

    def __init__(self, limits: HangLimits) -> None:
        self.limits = limits

    def begin(self, attempt: int, ranks: int, *, awaits_counts: bool = False) -> None:
        self.world = WorldProgress(attempt, range(ranks))
        self.hangs = HangDetector(self.world, self.limits)
        self.reporter = ProgressReporter(self.world, awaits_counts=awaits_counts)

    def update(self, heartbeat: Heartbeat, at: float) -> None:
        for changed in self.world.update(heartbeat, at):
            self.hangs.expect(changed)


def tracker(timeout: float | str = 5.0, *, auto: bool = False, ranks: int = 2) -> Tracker:
    """Return a tracker of attempt 1 with this number of ranks. `auto`: the number is the least limit."""
    progress = Tracker(HangLimits(timeout=timeout, auto=True) if auto else HangLimits.of(timeout))
    progress.begin(1, ranks)
    return progress


def worker(rank: int, marks: int, age: float = 0.0, **facts) -> WorkerProgress:
    return WorkerProgress(rank=rank, marks=marks, age=age, **facts)


def receive(progress: Tracker, at: float, *marks: WorkerProgress, attempt: int = 1) -> None:
    progress.update(Heartbeat(attempt=attempt, marks=marks), at)


def hung_ranks(progress: Tracker, at: float) -> tuple[int, ...] | None:
    hang = progress.hangs.check(at)
    return None if hang is None else hang.ranks


class MarkingWorkers:
    """Workers that make marks at these times, each on a node of its own that sends heartbeats."""

    def __init__(self, times: list[list[float]], **settings) -> None:
        self.progress = tracker(ranks=len(times), **settings)
        self.times = times

    def send_heartbeat(self, rank: int, at: float) -> None:
        done = [time for time in self.times[rank] if time <= at]
        age = at - done[-1] if done else 0.0
        receive(self.progress, at, worker(rank, len(done), age, step=len(done) - 1 if done else None))


def test_the_slowest_save_is_reported():
    """On the slowest worker and, with a durable folder, until it is on disk."""
    progress = tracker()
    receive(progress, 1.0, worker(0, 1), worker(1, 1))
    assert progress.reporter.report(1.0).slowest_save is None
    receive(progress, 2.0, worker(0, 2, save_seconds=3.0), worker(1, 2, save_seconds=5.0))
    assert progress.reporter.report(2.0).slowest_save == 5.0
    memory = NodeMemory(node="a", own=1, copies=0, disk_seconds=7.0)
    progress.update(Heartbeat(attempt=1, marks=(worker(0, 3, save_seconds=3.0),), memory=memory), 3.0)
    assert progress.reporter.report(3.0).slowest_save == 12.0


@pytest.mark.parametrize(("timeout", "are_none"), [(5, False), ("auto", False), ("off", True)])
def test_without_a_limit_hangs_are_not_looked_for(timeout, are_none):
    assert HangLimits.of(timeout).are_none == are_none


def test_silent_worker_is_a_hang():
    """The hang has the seconds of silence and the marks of all workers; those that make steps are not suspected."""
    progress = tracker()
    receive(progress, 10.0, worker(0, 9, 0.1), worker(1, 9, 0.1))
    receive(progress, 14.0, worker(0, 13, 0.1), worker(1, 9, 4.1))
    assert progress.hangs.check(14.0) is None
    receive(progress, 15.0, worker(0, 14, 0.1), worker(1, 9, 5.1))
    hang = progress.hangs.check(15.0)
    assert hang is not None
    assert hang.ranks == (1,)
    assert hang.seconds == pytest.approx(5.1)
    assert [(worker.rank, worker.marks) for worker in hang.workers] == [(0, 14), (1, 9)]
    assert [worker.since for worker in hang.workers] == pytest.approx([14.9, 9.9])


def test_sign_of_life_without_a_step_resets_the_silence():
    """`age` may fall without a new mark: at the end of a section too short for a heartbeat."""
    progress = tracker(ranks=1)
    receive(progress, 10.0, worker(0, 9, 4.0))
    receive(progress, 12.0, worker(0, 9, 0.5))
    assert progress.hangs.check(12.0) is None
    assert progress.hangs.next_check(12.0) == 16.5


def test_workers_that_are_silent_nearly_as_long_are_suspected():
    """Workers that wait for the culprit fall silent too, and may be over the limit first."""
    progress = tracker(ranks=3)
    receive(progress, 10.0, worker(0, 9, 5.1), worker(1, 8, 4.9), worker(2, 90, 0.1))
    assert hung_ranks(progress, 10.0) == (0, 1)


@pytest.mark.parametrize("marks", [0, 1, WARM_UP - 1])
def test_a_number_limits_the_first_steps_too(marks):
    """It is obeyed from the start of the attempt: the hang is sure, whatever the workers do."""
    progress = tracker(5.0)
    for second in range(1, 6):
        receive(progress, float(second), *(worker(rank, marks, second - 1.0 if marks else 0.0) for rank in (0, 1)))
        assert progress.hangs.check(float(second)) is None
    assert progress.hangs.due == 6.0
    receive(progress, 6.5, *(worker(rank, marks, 5.5 if marks else 0.0) for rank in (0, 1)))
    hang = progress.hangs.check(6.5)
    assert hang is not None
    assert (hang.is_sure, hang.is_young, hang.ranks, hang.seconds, hang.limit) == (True, True, (0, 1), 5.5, 5.0)


def test_a_number_counts_from_when_all_nodes_have_started_their_workers():
    """Workers that were started earlier wait for the others, and are not to blame for it."""
    progress = tracker(5.0)
    progress.world.workers_started(1.0)
    for second in range(1, 60):
        receive(progress, float(second), worker(0, 0))
    progress.world.workers_started(58.0)
    for second in (59.0, 60.0, 61.0, 62.0, 63.0):
        receive(progress, second, worker(0, 0), worker(1, 0))
        assert progress.hangs.check(second) is None
    receive(progress, 64.5, worker(0, 0), worker(1, 0))
    hang = progress.hangs.check(64.5)
    assert hang is not None
    assert [each.since for each in hang.workers] == [58.0, 59.0]


def test_with_auto_the_first_steps_may_take_ten_minutes():
    """They compile, load and connect. After 600 s the hang is not sure: stacks must tell what the workers do."""
    progress = tracker(5.0, auto=True)
    receive(progress, 1.0, worker(0, 2, 0.5), worker(1, 2, 0.5))
    receive(progress, 600.0, worker(0, 2, 599.5), worker(1, 2, 599.5))
    assert progress.hangs.check(600.0) is None
    assert progress.hangs.next_check(600.0) == pytest.approx(600.5)
    receive(progress, 601.0, worker(0, 2, 600.5), worker(1, 2, 600.5))
    hang = progress.hangs.check(601.0)
    assert hang is not None
    assert (hang.is_sure, hang.is_young, hang.ranks) == (False, True, (0, 1))
    assert (hang.quiet, hang.limit) == pytest.approx((600.5, 600.0))


def test_attempt_without_steps_is_checked_from_its_first_heartbeat():
    """It is suspected after 600 s, and again after each snooze."""
    progress = tracker("auto")
    found = []
    for second in range(100, 2000, 2):
        receive(progress, float(second), worker(0, 0), worker(1, 0))
        if hang := progress.hangs.check(float(second)):
            found.append((second, hang.is_young))
            progress.hangs.snooze(hang, 600.0)
            assert progress.hangs.next_check(float(second)) == pytest.approx(second + 600.0)
    assert found == [(702, True), (1304, True), (1906, True)]


def test_worker_that_never_makes_steps_is_no_hang_while_others_make_some():
    """For example, only one rank has an optimizer. If it is stopped, it is a hang."""
    progress = tracker()
    for second in range(1, 1000):
        receive(progress, float(second), worker(0, second, 0.1), worker(1, 0))
        assert progress.hangs.check(float(second)) is None
    receive(progress, 1000.0, worker(0, 1000, 0.1), worker(1, 0, stopped=True))
    assert progress.hangs.due < 1000.0
    hang = progress.hangs.check(1000.0)
    assert hang is not None
    assert (hang.ranks, hang.others_progress, hang.is_sure) == ((1,), True, True)


def test_with_auto_a_worker_that_never_makes_steps_is_suspected():
    """After 600 s. It is no sure hang."""
    progress = tracker(auto=True)
    for second in range(1, 1000):
        receive(progress, float(second), worker(0, second, 0.1), worker(1, 0))
        hang = progress.hangs.check(float(second))
        assert (hang is None) == (second <= 600)
        assert hang is None or (hang.ranks == (1,) and hang.others_progress and not hang.is_sure)


def test_snooze_lasts_until_the_next_mark():
    """A mark of a snoozed worker ends its snooze; the others stay snoozed."""
    progress = tracker(20.0, auto=True, ranks=3)
    receive(progress, 1.0, worker(0, 3), worker(1, 3), worker(2, 3))
    receive(progress, 22.0, worker(0, 3, 21.0), worker(1, 3, 21.0), worker(2, 20))
    hang = progress.hangs.check(22.0)
    assert hang is not None
    assert (hang.ranks, hang.others_progress, hang.quiet) == ((0, 1), True, 0)
    progress.hangs.snooze(hang, 100.0)
    assert progress.hangs.due == 64.0  # the limit of rank 2: twice its longest pause
    receive(progress, 30.0, worker(0, 4), worker(1, 3, 29.0), worker(2, 28))
    receive(progress, 118.0, worker(0, 4, 88.0), worker(1, 3, 117.0), worker(2, 116))
    assert hung_ranks(progress, 118.0) == (0, 1)
    receive(progress, 121.0, worker(0, 5), worker(1, 3, 120.0), worker(2, 119))
    assert progress.hangs.check(121.0) is None
    receive(progress, 123.0, worker(0, 7), worker(1, 3, 122.0), worker(2, 121))
    assert hung_ranks(progress, 123.0) == (1,)


def test_quiet_counts_from_the_last_mark_of_any_worker():
    """Workers that ended their part long ago, or never made a step, do not make `quiet` longer."""
    progress = tracker(20.0, auto=True, ranks=3)
    receive(progress, 1.0, worker(0, 3), worker(1, 3), worker(2, 0))
    receive(progress, 2000.0, worker(0, 2000), worker(1, 3, 1999.0), worker(2, 0))
    receive(progress, 2021.0, worker(0, 2000, 21.0), worker(1, 3, 2020.0), worker(2, 0))
    hang = progress.hangs.check(2021.0)
    assert hang is not None
    assert (hang.ranks, hang.others_progress, hang.is_young) == ((0, 1, 2), False, False)
    assert (hang.quiet, hang.seconds) == pytest.approx((21.0, 2020.0), abs=1.0)


def test_hang_timeout_applies_beside_a_worker_without_steps():
    """The hang is sure, though the worker that never made a step has been silent for longer."""
    progress = tracker(5.0)
    receive(progress, 1.0, worker(0, 3), worker(1, 0))
    receive(progress, 900.0, worker(0, 900), worker(1, 0))
    receive(progress, 906.0, worker(0, 900, 6.0), worker(1, 0))
    hang = progress.hangs.check(906.0)
    assert hang is not None
    assert (hang.is_sure, hang.seconds, hang.ranks) == (True, pytest.approx(6.0), (0, 1))


def test_worker_without_steps_is_suspected_with_the_others():
    """The others may wait for it: its silence counts from their first step."""
    progress = tracker()
    receive(progress, 1.0, worker(0, 3, 0.1, first_age=0.7), worker(1, 0))
    receive(progress, 7.0, worker(0, 3, 6.1), worker(1, 0))
    assert hung_ranks(progress, 7.0) == (0, 1)
    assert [worker.since for worker in progress.hangs.check(7.0).workers] == pytest.approx([0.9, 0.3])


def test_no_limit_means_no_hang():
    """Without a limit there is no hang, and no time for the next check."""
    progress = tracker("off")
    receive(progress, 1.0, worker(0, 9), worker(1, 9))
    receive(progress, 1e6, worker(0, 9, 1e6), worker(1, 9, 1e6))
    assert progress.hangs.check(1e6) is None
    assert progress.hangs.next_check(1e6) is None


def test_no_hang_while_a_worker_is_busy():
    """Others wait for a long checkpoint of rank 0; after it their silence counts from zero."""
    progress = tracker()
    receive(progress, 1.0, worker(0, 9), worker(1, 9))
    for second in range(2, 60):
        receive(progress, float(second), worker(0, 9, second - 1.0, busy=True), worker(1, 9, second - 1.0))
        assert progress.hangs.check(float(second)) is None
    for second in range(60, 66):
        receive(progress, float(second), worker(0, 9, second - 1.0), worker(1, 9, second - 1.0))
        assert progress.hangs.check(float(second)) is None
    receive(progress, 66.0, worker(0, 9, 65.0), worker(1, 9, 65.0))
    assert hung_ranks(progress, 66.0) == (0, 1)


def test_a_stopped_process_is_not_waited_for():
    """It does nothing of what is expected to take long: the silence of all counts from when it was seen stopped."""
    progress = tracker(ranks=2)
    receive(progress, 1.0, worker(0, 9), worker(1, 9))
    for second in range(2, 30):
        receive(progress, float(second), worker(0, 9, second - 1.0, busy=True), worker(1, 9, second - 1.0))
    assert progress.hangs.check(29.0) is None
    for second in range(30, 35):
        age = second - 1.0
        receive(progress, float(second), worker(0, 9, age, busy=True), worker(1, 9, age, stopped=True))
        assert progress.hangs.check(float(second)) is None
    receive(progress, 35.5, worker(0, 9, 34.5, busy=True), worker(1, 9, 34.5, stopped=True))
    assert hung_ranks(progress, 35.5) == (0, 1)
    receive(progress, 36.0, worker(0, 9, 35.0, busy=True), worker(1, 9, 35.0))
    assert progress.hangs.check(36.0) is None


def test_a_busy_process_that_is_stopped_is_not_waited_for():
    progress = tracker(ranks=1)
    receive(progress, 1.0, worker(0, 9, busy=True))
    receive(progress, 20.0, worker(0, 9, 19.0, busy=True, stopped=True))
    receive(progress, 26.0, worker(0, 9, 25.0, busy=True, stopped=True))
    assert hung_ranks(progress, 26.0) == (0,)


def test_busy_worker_that_ended_does_not_prevent_a_hang():
    """Heartbeats do not contain workers that ended."""
    progress = tracker()
    receive(progress, 1.0, worker(0, 9, busy=True))
    for second in range(2, 15):
        receive(progress, float(second), worker(1, 9, second - 1.0))
    assert hung_ranks(progress, 14.0) == (1,)


def test_worker_that_ended_does_not_hang():
    """Heartbeats do not contain workers that ended."""
    progress = tracker()
    receive(progress, 1.0, worker(0, 9), worker(1, 9))
    for second in range(2, 60):
        receive(progress, float(second), worker(0, 9 + second, 0.5))
        assert progress.hangs.check(float(second)) is None


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_hang_after_other_workers_have_ended(has_ended):
    """It is told apart: those that are left cannot wait for new work."""
    progress = tracker()
    receive(progress, 1.0, worker(0, 9), worker(1, 9))
    for second in range(2, 60):
        both = (worker(0, 9, second - 1.0), worker(1, 9, second - 1.0))
        receive(progress, float(second), *both[: 1 if has_ended else 2])
    hang = progress.hangs.check(59.0)
    assert hang is not None
    assert hang.others_ended is has_ended


def test_no_hang_without_fresh_heartbeats():
    """A node that sends no heartbeats is handled elsewhere."""
    progress = tracker()
    receive(progress, 10.0, worker(0, 9, 6.0), worker(1, 9, 6.0))
    assert progress.hangs.check(12.0) is not None
    assert progress.hangs.check(60.0) is None


def test_auto_limit_is_twice_the_longest_pause():
    """The pause before the first step of the worker does not count."""
    progress = tracker(6.0, auto=True)
    receive(progress, 100.0, worker(0, 1), worker(1, 1))
    receive(progress, 104.0, worker(0, 2), worker(1, 4))
    receive(progress, 105.0, worker(0, 3), worker(1, 5, 0.5))
    receive(progress, 112.0, worker(0, 3, 7.0), worker(1, 5, 7.5))
    assert progress.hangs.check(112.0) is None  # both had a pause of 4.0 s before
    receive(progress, 113.2, worker(0, 3, 8.2), worker(1, 44, 0.2))
    hang = progress.hangs.check(113.2)
    assert hang is not None
    assert (hang.ranks, hang.is_sure) == ((0,), False)
    receive(progress, 114.0, worker(0, 3, 9.0), worker(1, 44, 1.0))
    assert progress.hangs.next_check(114.0) == pytest.approx(114.3)


def test_auto_limit_is_at_least_five_minutes():
    """Scripts may have short steps and long evaluations."""
    progress = tracker("auto")
    receive(progress, 1.0, worker(0, 9))
    receive(progress, 2.0, worker(0, 19))
    receive(progress, 301.0, worker(0, 19, 299.0))
    assert progress.hangs.check(301.0) is None
    assert progress.hangs.next_check(301.0) == pytest.approx(302.0)
    receive(progress, 303.0, worker(0, 19, 301.0))
    assert hung_ranks(progress, 303.0) == (0,)


def test_busy_time_is_no_pause():
    """A long checkpoint does not make the automatic limit longer."""
    progress = tracker(20.0, auto=True, ranks=1)
    receive(progress, 1.0, worker(0, 3))
    receive(progress, 100.0, worker(0, 3, 99.0, busy=True))
    receive(progress, 101.0, worker(0, 4))
    receive(progress, 124.0, worker(0, 4, 23.0))
    assert hung_ranks(progress, 124.0) == (0,)


def test_next_attempt_starts_without_history():
    """Silence, pauses and busy workers of the attempt before do not count."""
    progress = tracker()
    receive(progress, 1.0, worker(0, 9, busy=True))
    receive(progress, 10.0, worker(1, 9, 9.0))
    progress.begin(2, 2)
    receive(progress, 11.0, worker(1, 9, 10.0))
    assert progress.hangs.check(11.0) is None
    assert progress.reporter.report(100.0) is None
    receive(progress, 12.0, worker(0, 3), worker(1, 3), attempt=2)
    receive(progress, 18.0, worker(0, 3, 6.0), worker(1, 3, 6.0), attempt=2)
    assert hung_ranks(progress, 18.0) == (0, 1)


def test_overtaken_heartbeats_are_ignored():
    """Only the latest heartbeat of a worker counts; unknown ranks are ignored."""
    progress = tracker(ranks=1)
    receive(progress, 10.0, worker(0, 9, 6.0), worker(7, 1, 99.0))
    receive(progress, 9.0, worker(0, 9, busy=True))
    assert hung_ranks(progress, 10.0) == (0,)
    receive(progress, 11.0, worker(0, 10, 0.5))
    receive(progress, 12.0, worker(0, 9, 8.0))
    assert progress.hangs.check(12.0) is None


def test_check_is_due_at_once_after_missing_heartbeats():
    """A worker may have been silent during the gap; others need no check for a while."""
    progress = tracker()
    receive(progress, 1.0, worker(0, 9), worker(1, 9))
    receive(progress, 5.0, worker(0, 13))
    assert progress.hangs.check(5.0) is None
    assert progress.hangs.due == 10.0
    receive(progress, 8.0, worker(0, 16), worker(1, 9, 7.0))
    assert progress.hangs.due == 6.0
    assert hung_ranks(progress, 8.0) == (1,)


def test_next_check_is_when_a_worker_could_be_over_its_limit():
    """If one may be over it already, the next check is soon: the next heartbeat will tell."""
    progress = tracker()
    assert progress.hangs.next_check(0.0) is None
    receive(progress, 10.0, worker(0, 9, 1.0), worker(1, 9, 2.0))
    assert progress.hangs.next_check(10.0) == 13.0
    assert progress.hangs.next_check(13.0) == pytest.approx(13.3)


mark_gaps = st.lists(
    st.lists(st.floats(min_value=0.01, max_value=4.9), min_size=6, max_size=12), min_size=1, max_size=4
)
phases = st.lists(st.floats(min_value=0.0, max_value=0.99), min_size=4, max_size=4)


def _times(gaps: list[float]) -> list[float]:
    times, now = [], 0.0
    for gap in gaps:
        now += gap
        times.append(now)
    return times


@examples(50)
@given(mark_gaps, phases, st.permutations(range(4)))
def test_workers_that_mark_within_the_limit_do_not_hang(gaps, phase, order):
    """This holds for any phase and order of the heartbeats."""
    workers = MarkingWorkers([_times(each) for each in gaps])
    ranks = [rank for rank in order if rank < len(gaps)]
    for beat in range(math.ceil(min(times[-1] for times in workers.times))):
        for rank in ranks:
            workers.send_heartbeat(rank, beat + phase[rank])
            assert workers.progress.hangs.check(beat + 1.0) is None


@examples(50)
@given(mark_gaps, phases, st.permutations(range(4)))
def test_silent_worker_is_found_within_limit_and_heartbeat(gaps, phase, order):
    """The last worker stops making marks; it is found at most one heartbeat after its limit."""
    workers = MarkingWorkers([_times(each) for each in gaps])
    fell_silent = workers.times[-1][-1]
    for times in workers.times[:-1]:
        times += [times[-1] + second for second in range(1, 99)]
    ranks = [rank for rank in order if rank < len(gaps)]
    for beat in range(100):
        for rank in ranks:
            workers.send_heartbeat(rank, beat + phase[rank])
            now = beat + phase[rank]
            if now >= workers.progress.hangs.due and workers.progress.hangs.check(now) is not None:
                assert len(gaps) - 1 in workers.progress.hangs.check(now).ranks
                assert fell_silent + 5.0 < now <= fell_silent + 5.0 + HEARTBEAT_SECONDS + 1e-6
                return
    raise AssertionError("not found")


# The step at which all workers save.


@examples(100)
@given(st.integers(1, 400), st.floats(0.0, 0.99), st.floats(0.0, 1.0), st.integers(0, 10**6))
def test_proposed_step_is_ahead_of_all_workers(pace, phase, lag, start):
    """At any steady pace no worker has passed the step when the request arrives, and the step is not far ahead."""
    progress = tracker(ranks=1)
    for beat in range(1, 6):
        at = beat + phase
        done = math.floor(at * pace)
        receive(progress, at, worker(0, done, at - done / pace, asked=start + done - 1, step=start + done - 1))
    now = 5 + phase + lag
    arrives = now + 0.09
    asked = propose_step(progress.world, now)
    assert asked > start + math.floor(arrives * pace) - 1
    assert asked <= start + arrives * pace + pace + 4


def test_proposed_step_after_the_first_heartbeat():
    """The steps so far are taken to have lasted a second."""
    progress = tracker(ranks=1)
    receive(progress, 1.0, worker(0, 20, asked=1019))
    assert propose_step(progress.world, 1.0) == 1019 + 2 + 2


def test_proposed_step_at_a_steady_pace():
    """At ten steps a second: one step until the request arrives, and a margin of two."""
    progress = tracker(ranks=1)
    receive(progress, 1.0, worker(0, 10, asked=9))
    receive(progress, 2.0, worker(0, 20, asked=19))
    assert propose_step(progress.world, 2.0) == 19 + 1 + 2


def test_proposed_step_after_heartbeats_that_were_held_up():
    """They come at once when another driver has taken over. No worker waits for a step that is minutes ahead."""
    progress = tracker(ranks=1)
    for at, asked in ((1.0, 9), (4.0, 130), (4.001, 180), (4.002, 230)):
        receive(progress, at, worker(0, asked + 1, asked=asked))
    assert 230 < propose_step(progress.world, 4.002) < 260
    progress = tracker(ranks=1)
    for at, asked in ((4.0, 9), (4.001, 180)):
        receive(progress, at, worker(0, asked + 1, asked=asked))
    assert 180 < propose_step(progress.world, 4.002) < 210


def test_proposed_step_of_workers_that_train_for_long_when_they_are_first_seen():
    """As by a driver that takes over a moment before the end of a run: 0.1 s later they have made 5 steps."""
    progress = tracker()
    receive(progress, 1.0, *(worker(rank, 2000, asked=1999, first_age=40.0) for rank in range(2)))
    assert 2004 < propose_step(progress.world, 1.0) < 2020


def test_proposed_step_without_should_checkpoint():
    """The step numbers of the optimizer are used; without any the proposal does not matter."""
    progress = tracker(ranks=2)
    assert propose_step(progress.world, 0.0) == 2
    receive(progress, 1.0, worker(0, 0), worker(1, 1, step=40))
    assert propose_step(progress.world, 1.0) == 43


# Progress reports.


def test_no_report_before_all_workers_made_a_step():
    progress = tracker()
    assert progress.reporter.report(0.5) is None
    receive(progress, 1.0, worker(0, 1, step=41), worker(1, 0))
    assert progress.reporter.report(1.0) is None


def test_first_report_is_about_the_first_step():
    """It has the number of the first step, when all workers had made it, and the marks since."""
    progress = tracker()
    receive(progress, 1.0, worker(0, 0), worker(1, 0))
    receive(progress, 2.0, worker(0, 5, 0.1, step=45, first_age=0.9), worker(1, 5, 0.1, step=45, first_age=0.8))
    assert progress.reporter.report(2.5) == Progressed(
        at=2.5, attempt=1, marks=5, low=41, high=45, marked=1.2, slowest=0
    )


def test_first_step_is_computed_from_the_last():
    """The marks are taken to be evenly spaced."""
    progress = tracker(ranks=1)
    receive(progress, 1.0, worker(0, 0))
    receive(progress, 2.0, worker(0, 5, 0.0, step=4))
    found = progress.reporter.report(2.0)
    assert found is not None
    assert (found.low, found.high) == (0, 4)
    assert found.marked == pytest.approx(1.2)


def test_first_step_reported_by_the_worker_counts():
    """The latest step may lack its number at the heartbeat, because a script asks some time after its step."""
    progress = tracker()
    receive(progress, 1.0, worker(0, 5, step=44, first_step=41), worker(1, 5, step=45, first_step=41))
    assert progress.reporter.report(1.0).low == 41
    progress.begin(1, 2)
    receive(progress, 1.0, worker(0, 5, step=44), worker(1, 5, step=45))
    assert progress.reporter.report(1.0).low == 41


def test_later_reports_are_about_the_last_step():
    """They have the first and last worker, the rate, and the last step that all have saved; None: some saved none."""
    progress = tracker(ranks=3)
    receive(progress, 1.0, *(worker(rank, 1, step=40) for rank in range(3)))
    assert progress.reporter.report(1.0) is not None
    receive(progress, 3.0, worker(0, 9, step=48, saved=45), worker(1, 7, 0.5, step=46, saved=40), worker(2, 8, step=47))
    found = Progressed(at=3.0, attempt=1, marks=9, low=46, high=48, marked=3.0, saved=None, slowest=1, rate=4.0)
    assert progress.reporter.report(3.0) == found
    receive(progress, 3.0, worker(2, 8, step=47, saved=42))
    assert progress.reporter.report(3.0) == replace(found, saved=40)


def test_reports_have_what_nodes_hold_and_the_newest_commit_of_all():
    """What a node holds is in a report only if it is another than in the last one."""
    progress, rate = tracker(), CommitRate(every=3, commit_seconds=0.01, step_seconds=0.2)
    memory = {name: NodeMemory(node=name, own=100, copies=0) for name in ("a", "b")}

    def beat(at: float, rank: int, node: str, committed: int | None, copied: int | None, **facts) -> None:
        mark = worker(rank, int(at), committed=committed, **facts)
        progress.update(Heartbeat(attempt=1, marks=(mark,), memory=memory[node], copied=copied), at)

    beat(1.0, 0, "a", 9, None, commit_rate=rate)
    receive(progress, 1.0, worker(1, 1))
    first = progress.reporter.report(1.0)
    assert (first.committed, first.copied, first.commit_rate, first.memory) == (None, None, rate, (memory["a"],))
    beat(2.0, 1, "b", 6, 3)
    beat(2.0, 0, "a", 9, None)
    sampled, second = progress.reporter.sample(2.0).progress, progress.reporter.report(2.0)
    assert (second.committed, second.copied, second.commit_rate, second.memory) == (6, None, None, (memory["b"],))
    assert (sampled.committed, sampled.memory) == (6, ())
    memory["a"] = NodeMemory(node="a", own=100, copies=50)
    beat(3.0, 0, "a", 9, 6)
    third = progress.reporter.report(3.0)
    assert (third.committed, third.copied, third.memory) == (6, 3, (memory["a"],))


def test_steps_are_extrapolated_to_the_latest_heartbeat():
    """Nodes report at different times; the steps since are added at the worker's pace."""
    progress = tracker()
    for at in (1.0, 2.0):
        receive(progress, at, worker(0, int(at * 50), step=int(at * 50)))
        receive(progress, at + 0.5, worker(1, int(at * 50) + 25, step=int(at * 50) + 25))
    progress.reporter.report(3.0)
    found = progress.reporter.report(3.0)
    assert found is not None
    assert (found.low, found.high) == (125, 125)


def test_ended_workers_are_not_the_slowest():
    """Ranks with less data end before the others; they do not reduce the rate."""
    progress = tracker(ranks=3)
    for second in range(1, 60):
        ended = [worker(0, 9, step=9), worker(1, 200, step=200)] if second < 20 else []
        receive(progress, float(second), *ended, worker(2, second * 2, step=second * 2))
        found = progress.reporter.report(float(second))
    assert found is not None
    assert (found.slowest, found.low, found.high, found.marks) == (2, 118, 200, 200)
    assert found.rate == pytest.approx(2.0)


def test_steps_without_numbers_are_counted():
    progress = tracker(ranks=1)
    receive(progress, 1.0, worker(0, 3))
    for _ in range(2):
        found = progress.reporter.report(1.0)
        assert found is not None
        assert (found.marks, found.low, found.high) == (3, None, None)


def test_report_does_not_wait_long_for_ranks_without_steps():
    """The first report comes 10 s after the first step of another rank."""
    progress = tracker()
    receive(progress, 1.0, worker(0, 1), worker(1, 0))
    receive(progress, 11.5, worker(0, 99), worker(1, 0))
    assert progress.reporter.report(9.0) is None
    assert progress.reporter.report(11.5) is not None


def test_rate_is_measured_over_the_last_seconds():
    """It is 0 if no worker makes marks."""
    progress = tracker(ranks=1)
    for second in range(1, 40):
        receive(progress, float(second), worker(0, second if second < 20 else 20 + (second - 20) * 10))
    assert progress.reporter.report(39.0).rate == pytest.approx(10.0)
    receive(progress, 60.0, worker(0, 210, 21.0))
    assert progress.reporter.report(60.0).rate == 0
    assert report_of_one_mark().rate == 0


def report_of_one_mark() -> Progressed:
    """Return the report after one mark in one further heartbeat."""
    progress = tracker(ranks=1)
    receive(progress, 1.0, worker(0, 1))
    receive(progress, 2.0, worker(0, 2, 1.0))
    found = progress.reporter.report(2.0)
    assert found is not None
    return found


# Losses between two attempts.

FIRST = Progressed(at=2.0, attempt=1, marks=5, low=0, high=4, marked=1.0, rate=4.0)
LAST = Progressed(at=9.0, attempt=1, marks=44, low=43, high=43, marked=8.9)
BACK = Progressed(at=10.0, attempt=2, marks=1, low=41, high=41, marked=9.8)


def test_restart_loses_steps_and_time():
    """Steps that are done again, and the time without steps."""
    before, after = StepHistory(first=FIRST, last=LAST), StepHistory(first=BACK, last=BACK)
    assert after.first_step == 41
    assert after.lost_after(before) == 3
    assert after.pause_after(before) == pytest.approx(0.9)


def test_planned_restart_loses_no_step():
    """An attempt that starts at a later step than the last one gains none."""
    before = StepHistory(first=FIRST, last=LAST)
    for low in (44, 50):
        assert StepHistory(first=replace(BACK, low=low), last=BACK).lost_after(before) == 0


def test_lost_steps_are_unknown_without_numbers():
    before, after = StepHistory(first=FIRST, last=LAST), StepHistory(first=BACK, last=BACK)
    assert StepHistory(first=replace(BACK, low=None), last=BACK).lost_after(before) is None
    assert after.lost_after(replace(before, last=replace(LAST, high=None))) is None


# Samples for a person who watches.


def test_a_sample_before_the_first_report():
    """It tells only who is alive, and does not take the place of the report."""
    progress = tracker(ranks=3)
    receive(progress, 1.0, worker(0, 1, step=41), worker(1, 0))
    assert progress.reporter.sample(1.0) == ProgressSample(at=1.0, alive=2, progress=None, behind=0)
    receive(progress, 2.0, worker(0, 2, step=42), worker(1, 2, step=42), worker(2, 2, step=42))
    assert progress.reporter.sample(2.0).progress is None
    assert progress.reporter.report(2.0).low == 41


def test_a_sample_before_a_driver_that_takes_over_has_seen_a_step():
    """The driver before it had reported the attempt's progress."""
    progress = tracker()
    reporter = ProgressReporter(progress.world, is_first=False)
    receive(progress, 1.0, worker(0, 0))
    assert reporter.sample(1.0) == ProgressSample(at=1.0, alive=1, progress=None, behind=0)


def test_a_sample_says_who_is_behind():
    """By how many steps; but not by less than the steps of a second, since heartbeats come once in a second."""
    progress = tracker(ranks=2)
    receive(progress, 1.0, worker(0, 1), worker(1, 1))
    progress.reporter.report(1.0)
    receive(progress, 2.0, worker(0, 11), worker(1, 2))
    found = progress.reporter.sample(2.0)
    assert (found.progress.marks, found.progress.slowest, found.progress.rate, found.behind) == (11, 1, 10.0, 0)
    receive(progress, 3.0, worker(0, 21), worker(1, 3))
    assert progress.reporter.sample(3.0).behind == 18


def test_end_of_an_attempt_with_one_report():
    """The time of the last step is computed from the first step and the rate."""
    before, after = StepHistory(first=FIRST, last=FIRST), StepHistory(first=BACK, last=BACK)
    assert before.ended == pytest.approx(2.0)
    assert after.ended == pytest.approx(9.8)
    assert after.pause_after(before) == pytest.approx(7.8)


def test_first_report_waits_for_the_numbers_of_the_script():
    """The optimizer's count, known first, may be one behind the script's: no step counts as lost for that."""
    progress = tracker(ranks=1)
    receive(progress, 1.0, worker(0, 7, step=7, asked=7, first_step=1))
    before = progress.reporter.report(1.0)
    progress.begin(2, 1, awaits_counts=True)
    receive(progress, 3.0, worker(0, 1, step=7, first_step=7), attempt=2)
    assert progress.reporter.report(3.0) is None
    receive(progress, 4.0, worker(0, 1, 1.0, step=8, asked=8, first_step=8), attempt=2)
    after = progress.reporter.report(4.0)
    assert StepHistory(first=after, last=after).lost_after(StepHistory(first=before, last=before)) == 0
