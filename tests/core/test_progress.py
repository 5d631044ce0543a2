"""How far workers are, and who hangs: from what nodes say each second, in whichever order they say it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raylaunch.core.course import Course
from raylaunch.core.events import Progressed
from raylaunch.core.progress import Progress
from raylaunch.core.pulse import Mark, Pulse

BEAT = 1.0


def watching(timeout: float | None = 5.0, *, auto: bool = False, ranks: int = 2) -> Progress:
    progress = Progress(timeout, auto)
    progress.begin(1, range(ranks))
    return progress


def mark(rank: int, marks: int, age: float = 0.0, **facts) -> Mark:
    return Mark(rank=rank, marks=marks, age=age, **facts)


def hear(progress: Progress, at: float, *marks: Mark, attempt: int = 1) -> None:
    progress.take(Pulse(attempt=attempt, marks=marks), at)


def silent(progress: Progress, at: float) -> tuple[int, ...] | None:
    hang = progress.hang(at)
    return None if hang is None else hang.ranks


class Script:
    """Workers that mark at these times, one node for each, told of at any times."""

    def __init__(self, times: list[list[float]], **settings) -> None:
        self.progress = watching(ranks=len(times), **settings)
        self.times = times

    def pulse(self, rank: int, at: float) -> None:
        done = [time for time in self.times[rank] if time <= at]
        age = at - done[-1] if done else 0.0
        hear(self.progress, at, mark(rank, len(done), age, step=len(done) - 1 if done else None))


def test_a_worker_that_falls_silent_is_a_hang():
    """With how long, and what each worker had done; one that still makes steps is no suspect."""
    progress = watching()
    hear(progress, 10.0, mark(0, 9, 0.1), mark(1, 9, 0.1))
    hear(progress, 14.0, mark(0, 13, 0.1), mark(1, 9, 4.1))
    assert progress.hang(14.0) is None
    hear(progress, 15.0, mark(0, 14, 0.1), mark(1, 9, 5.1))
    hang = progress.hang(15.0)
    assert hang is not None
    assert hang.ranks == (1,)
    assert hang.seconds == pytest.approx(5.1)
    assert [(worker.rank, worker.marks) for worker in hang.workers] == [(0, 14), (1, 9)]
    assert [worker.since for worker in hang.workers] == pytest.approx([14.9, 9.9])


def test_a_sign_of_life_need_be_no_step():
    """The end of a section that was too short to be seen is one too."""
    progress = watching(ranks=1)
    hear(progress, 10.0, mark(0, 9, 4.0))
    hear(progress, 12.0, mark(0, 9, 0.5))
    assert progress.hang(12.0) is None
    assert progress.next_look(12.0) == 16.5


def test_those_who_wait_for_it_are_suspects_too():
    """Whoever is over the time first need not be the one at fault: the stacks will tell."""
    progress = watching(ranks=3)
    hear(progress, 10.0, mark(0, 9, 5.1), mark(1, 8, 4.9), mark(2, 90, 0.1))
    assert silent(progress, 10.0) == (0, 1)


def test_first_steps_are_not_measured_by_a_number():
    """They compile, load and connect. After long it is to be seen what the workers do: they may wait for ever."""
    progress = watching()
    hear(progress, 1.0, mark(0, 2, 0.5), mark(1, 2, 0.5))
    hear(progress, 600.0, mark(0, 2, 599.5), mark(1, 2, 599.5))
    assert progress.hang(600.0) is None
    assert progress.next_look(600.0) == pytest.approx(600.5)
    hear(progress, 601.0, mark(0, 2, 600.5), mark(1, 2, 600.5))
    hang = progress.hang(601.0)
    assert hang is not None
    assert (hang.is_sure, hang.is_young, hang.ranks) == (False, True, (0, 1))
    assert (hang.quiet, hang.limit) == pytest.approx((600.5, 600.0))


def test_a_world_that_never_makes_a_step_is_looked_at_from_when_it_was_first_seen():
    """And again when what was borne is over."""
    progress = watching(None, auto=True)
    found = []
    for second in range(100, 2000, 2):
        hear(progress, float(second), mark(0, 0), mark(1, 0))
        if hang := progress.hang(float(second)):
            found.append((second, hang.is_young))
            progress.bear(hang, 600.0)
            assert progress.next_look(float(second)) == pytest.approx(second + 600.0)
    assert found == [(702, True), (1304, True), (1906, True)]


def test_a_worker_without_steps_is_left_in_peace():
    """Of a script in which only one rank has an optimizer; or a watcher that only serves data. It is only looked at."""
    progress = watching()
    for second in range(1, 1000):
        hear(progress, float(second), mark(0, second, 0.1), mark(1, 0))
        hang = progress.hang(float(second))
        assert hang is None or (second > 600 and hang.ranks == (1,) and hang.goes_on and not hang.is_sure)


def test_what_is_borne_is_borne_until_the_next_mark():
    """Of those that were silent."""
    progress = watching(20.0, auto=True, ranks=3)
    hear(progress, 1.0, mark(0, 3), mark(1, 3), mark(2, 3))
    hear(progress, 22.0, mark(0, 3, 21.0), mark(1, 3, 21.0), mark(2, 20))
    hang = progress.hang(22.0)
    assert hang is not None
    assert (hang.ranks, hang.goes_on, hang.quiet) == ((0, 1), True, 0)
    progress.bear(hang, 100.0)
    assert progress.due == 64.0  # rank 2's, after twice its pause
    hear(progress, 30.0, mark(0, 4), mark(1, 3, 29.0), mark(2, 28))
    hear(progress, 118.0, mark(0, 4, 88.0), mark(1, 3, 117.0), mark(2, 116))
    assert silent(progress, 118.0) == (0, 1)
    hear(progress, 121.0, mark(0, 5), mark(1, 3, 120.0), mark(2, 119))
    assert progress.hang(121.0) is None
    hear(progress, 123.0, mark(0, 7), mark(1, 3, 122.0), mark(2, 121))
    assert silent(progress, 123.0) == (1,)


def test_a_world_is_as_silent_as_the_last_who_made_a_step():
    """Who ended its part long ago, or never made a step, says nothing of how long the others have been silent."""
    progress = watching(20.0, auto=True, ranks=3)
    hear(progress, 1.0, mark(0, 3), mark(1, 3), mark(2, 0))
    hear(progress, 2000.0, mark(0, 2000), mark(1, 3, 1999.0), mark(2, 0))
    hear(progress, 2021.0, mark(0, 2000, 21.0), mark(1, 3, 2020.0), mark(2, 0))
    hang = progress.hang(2021.0)
    assert hang is not None
    assert (hang.ranks, hang.goes_on, hang.is_young) == ((0, 1, 2), False, False)
    assert (hang.quiet, hang.seconds) == pytest.approx((21.0, 2020.0), abs=1.0)


def test_a_number_is_obeyed_though_somebody_else_is_only_to_be_looked_at():
    """Who never made a step was silent for longer."""
    progress = watching(5.0)
    hear(progress, 1.0, mark(0, 3), mark(1, 0))
    hear(progress, 900.0, mark(0, 900), mark(1, 0))
    hear(progress, 906.0, mark(0, 900, 6.0), mark(1, 0))
    hang = progress.hang(906.0)
    assert hang is not None
    assert (hang.is_sure, hang.seconds, hang.ranks) == (True, pytest.approx(6.0), (0, 1))


def test_a_worker_without_steps_is_a_suspect_when_the_others_fall_silent():
    """They may wait for it: its silence counts from their first step."""
    progress = watching()
    hear(progress, 1.0, mark(0, 3, 0.1, first_age=0.7), mark(1, 0))
    hear(progress, 7.0, mark(0, 3, 6.1), mark(1, 0))
    assert silent(progress, 7.0) == (0, 1)
    assert [worker.since for worker in progress.hang(7.0).workers] == pytest.approx([0.9, 0.3])


def test_off_is_never():
    """Whatever happens, and nobody need look."""
    progress = watching(None)
    hear(progress, 1.0, mark(0, 9), mark(1, 9))
    hear(progress, 1e6, mark(0, 9, 1e6), mark(1, 9, 1e6))
    assert progress.hang(1e6) is None
    assert progress.next_look(1e6) is None


def test_nobody_is_judged_while_one_is_busy():
    """A long checkpoint of rank 0 has the others wait too; after it their silence counts anew."""
    progress = watching()
    hear(progress, 1.0, mark(0, 9), mark(1, 9))
    for second in range(2, 60):
        hear(progress, float(second), mark(0, 9, second - 1.0, busy=True), mark(1, 9, second - 1.0))
        assert progress.hang(float(second)) is None
    for second in range(60, 66):
        hear(progress, float(second), mark(0, 9, second - 1.0), mark(1, 9, second - 1.0))
        assert progress.hang(float(second)) is None
    hear(progress, 66.0, mark(0, 9, 65.0), mark(1, 9, 65.0))
    assert silent(progress, 66.0) == (0, 1)


def test_a_busy_worker_that_ended_shields_nobody():
    """It is in no pulse any more."""
    progress = watching()
    hear(progress, 1.0, mark(0, 9, busy=True))
    for second in range(2, 15):
        hear(progress, float(second), mark(1, 9, second - 1.0))
    assert silent(progress, 14.0) == (1,)


def test_a_worker_that_ended_is_not_judged():
    """It is in no pulse any more, however silent."""
    progress = watching()
    hear(progress, 1.0, mark(0, 9), mark(1, 9))
    for second in range(2, 60):
        hear(progress, float(second), mark(0, 9 + second, 0.5))
        assert progress.hang(float(second)) is None


def test_without_fresh_pulses_nobody_is_judged():
    """A node that is not heard of is another matter."""
    progress = watching()
    hear(progress, 10.0, mark(0, 9, 6.0), mark(1, 9, 6.0))
    assert progress.hang(12.0) is not None
    assert progress.hang(60.0) is None


def test_auto_is_twice_the_longest_pause_of_the_worker_itself():
    """With a floor; the pause before its first step does not count."""
    progress = watching(6.0, auto=True)
    hear(progress, 100.0, mark(0, 1), mark(1, 1))
    hear(progress, 104.0, mark(0, 2), mark(1, 4))
    hear(progress, 105.0, mark(0, 3), mark(1, 5, 0.5))
    hear(progress, 112.0, mark(0, 3, 7.0), mark(1, 5, 7.5))
    assert progress.hang(112.0) is None  # 4.0 s was a pause of both
    hear(progress, 113.2, mark(0, 3, 8.2), mark(1, 44, 0.2))
    hang = progress.hang(113.2)
    assert hang is not None
    assert (hang.ranks, hang.is_sure) == ((0,), False)
    hear(progress, 114.0, mark(0, 3, 9.0), mark(1, 44, 1.0))
    assert progress.next_look(114.0) == pytest.approx(114.3)


def test_auto_has_a_floor():
    """Five minutes, for scripts with short steps and long evaluations."""
    progress = watching(None, auto=True)
    hear(progress, 1.0, mark(0, 9))
    hear(progress, 2.0, mark(0, 19))
    hear(progress, 301.0, mark(0, 19, 299.0))
    assert progress.hang(301.0) is None
    assert progress.next_look(301.0) == pytest.approx(302.0)
    hear(progress, 303.0, mark(0, 19, 301.0))
    assert silent(progress, 303.0) == (0,)


def test_a_time_that_was_busy_is_no_pause():
    """A checkpoint of ten minutes does not make a hang of ten minutes usual."""
    progress = watching(20.0, auto=True, ranks=1)
    hear(progress, 1.0, mark(0, 3))
    hear(progress, 100.0, mark(0, 3, 99.0, busy=True))
    hear(progress, 101.0, mark(0, 4))
    hear(progress, 124.0, mark(0, 4, 23.0))
    assert silent(progress, 124.0) == (0,)


def test_each_attempt_begins_anew():
    """Nothing of the one before counts: neither its silence nor its pauses nor its busy workers."""
    progress = watching()
    hear(progress, 1.0, mark(0, 9, busy=True))
    hear(progress, 10.0, mark(1, 9, 9.0))
    progress.begin(2, range(2))
    hear(progress, 11.0, mark(1, 9, 10.0))
    assert progress.hang(11.0) is None
    assert progress.so_far(100.0) is None
    hear(progress, 12.0, mark(0, 3), mark(1, 3), attempt=2)
    hear(progress, 18.0, mark(0, 3, 6.0), mark(1, 3, 6.0), attempt=2)
    assert silent(progress, 18.0) == (0, 1)


def test_pulses_that_were_overtaken_change_nothing():
    """Only the latest of a worker counts, whatever an older one says; and only of workers there are."""
    progress = watching(ranks=1)
    hear(progress, 10.0, mark(0, 9, 6.0), mark(7, 1, 99.0))
    hear(progress, 9.0, mark(0, 9, busy=True))
    assert silent(progress, 10.0) == (0,)
    hear(progress, 11.0, mark(0, 10, 0.5))
    hear(progress, 12.0, mark(0, 9, 8.0))
    assert progress.hang(12.0) is None


def test_a_node_that_was_not_heard_of_for_a_while_is_looked_at_at_once():
    """Its worker may have been silent all the time; those that were heard of meanwhile need no look for long."""
    progress = watching()
    hear(progress, 1.0, mark(0, 9), mark(1, 9))
    hear(progress, 5.0, mark(0, 13))
    assert progress.hang(5.0) is None
    assert progress.due == 10.0
    hear(progress, 8.0, mark(0, 16), mark(1, 9, 7.0))
    assert progress.due == 6.0
    assert silent(progress, 8.0) == (1,)


def test_when_to_look_again():
    """When the first could be over its time; soon, where it may be by now and the next pulse will tell."""
    progress = watching()
    assert progress.next_look(0.0) is None
    hear(progress, 10.0, mark(0, 9, 1.0), mark(1, 9, 2.0))
    assert progress.next_look(10.0) == 13.0
    assert progress.next_look(13.0) == pytest.approx(13.3)


marking = st.lists(st.lists(st.floats(min_value=0.01, max_value=4.9), min_size=6, max_size=12), min_size=1, max_size=4)
phases = st.lists(st.floats(min_value=0.0, max_value=0.99), min_size=4, max_size=4)


def _times(gaps: list[float]) -> list[float]:
    times, now = [], 0.0
    for gap in gaps:
        now += gap
        times.append(now)
    return times


@settings(max_examples=50, deadline=None)
@given(marking, phases, st.permutations(range(4)))
def test_nobody_hangs_who_marks_within_its_time(gaps, phase, order):
    """However the nodes' beats fall, and in whatever order they are heard."""
    script = Script([_times(each) for each in gaps])
    ranks = [rank for rank in order if rank < len(gaps)]
    for beat in range(math.ceil(min(times[-1] for times in script.times))):
        for rank in ranks:
            script.pulse(rank, beat + phase[rank])
            assert script.progress.hang(beat + 1.0) is None


@settings(max_examples=50, deadline=None)
@given(marking, phases, st.permutations(range(4)))
def test_a_silent_worker_is_found_within_its_time_and_a_beat(gaps, phase, order):
    """All mark on but the last, which stops after its marks."""
    script = Script([_times(each) for each in gaps])
    fell_silent = script.times[-1][-1]
    for times in script.times[:-1]:
        times += [times[-1] + second for second in range(1, 99)]
    ranks = [rank for rank in order if rank < len(gaps)]
    for beat in range(100):
        for rank in ranks:
            script.pulse(rank, beat + phase[rank])
            now = beat + phase[rank]
            if now >= script.progress.due and script.progress.hang(now) is not None:
                assert len(gaps) - 1 in script.progress.hang(now).ranks
                assert fell_silent + 5.0 < now <= fell_silent + 5.0 + BEAT + 1e-6
                return
    raise AssertionError("not found")


# Where all can stop at one step.


@given(st.integers(1, 400), st.floats(0.0, 0.99), st.floats(0.0, 1.0), st.integers(0, 10**6))
def test_a_checkpoint_is_asked_for_ahead_of_the_fastest(pace, phase, lag, start):
    """At any pace of steady steps, the step is one that nobody has come to when the order comes; and not far off."""
    progress = watching(ranks=1)
    for beat in range(1, 6):
        at = beat + phase
        done = math.floor(at * pace)
        hear(progress, at, mark(0, done, at - done / pace, asked=start + done - 1, step=start + done - 1))
    now = 5 + phase + lag
    arrives = now + 0.09
    asked = progress.ask_at(now)
    assert asked > start + math.floor(arrives * pace) - 1
    assert asked <= start + arrives * pace + pace + 4


def test_a_checkpoint_right_after_the_first_pulse():
    """What was done by then took a second at most."""
    progress = watching(ranks=1)
    hear(progress, 1.0, mark(0, 20, asked=1019))
    assert progress.ask_at(1.0) == 1019 + 2 + 2


def test_a_checkpoint_of_a_script_that_never_asks():
    """Its own count will do, and without any the answer is of no use anyway."""
    progress = watching(ranks=2)
    assert progress.ask_at(0.0) == 2
    hear(progress, 1.0, mark(0, 0), mark(1, 1, step=40))
    assert progress.ask_at(1.0) == 43


# How far it is.


def test_nothing_is_said_before_all_have_done_a_step():
    """Half a world trains nothing."""
    progress = watching()
    assert progress.so_far(0.5) is None
    hear(progress, 1.0, mark(0, 1, step=41), mark(1, 0))
    assert progress.so_far(1.0) is None


def test_the_first_word_tells_of_the_first_step():
    """Its number and when all had done it, and how many there are since."""
    progress = watching()
    hear(progress, 1.0, mark(0, 0), mark(1, 0))
    hear(progress, 2.0, mark(0, 5, 0.1, step=45, first_age=0.9), mark(1, 5, 0.1, step=45, first_age=0.8))
    assert progress.so_far(2.5) == Progressed(at=2.5, attempt=1, marks=5, low=41, high=45, marked=1.2, slowest=0)


def test_the_first_step_where_only_the_last_is_known():
    """As if they had come evenly."""
    progress = watching(ranks=1)
    hear(progress, 1.0, mark(0, 0))
    hear(progress, 2.0, mark(0, 5, 0.0, step=4))
    found = progress.so_far(2.0)
    assert found is not None
    assert (found.low, found.high) == (0, 4)
    assert found.marked == pytest.approx(1.2)


def test_the_first_step_is_what_the_worker_says_it_was():
    """The last may have no number yet when the pulse is taken: a script asks some time after its step."""
    progress = watching()
    hear(progress, 1.0, mark(0, 5, step=44, first_step=41), mark(1, 5, step=45, first_step=41))
    assert progress.so_far(1.0).low == 41
    progress.begin(1, range(2))
    hear(progress, 1.0, mark(0, 5, step=44), mark(1, 5, step=45))
    assert progress.so_far(1.0).low == 41


def test_later_words_tell_of_the_last_step():
    """Of who is furthest, who is behind, how fast, and what is saved by all who save."""
    progress = watching(ranks=3)
    hear(progress, 1.0, *(mark(rank, 1, step=40) for rank in range(3)))
    assert progress.so_far(1.0) is not None
    hear(progress, 3.0, mark(0, 9, step=48, saved=45), mark(1, 7, 0.5, step=46, saved=40), mark(2, 8, step=47))
    assert progress.so_far(3.0) == Progressed(
        at=3.0, attempt=1, marks=9, low=46, high=48, marked=3.0, saved=40, slowest=1, rate=4.0
    )


def test_nodes_that_are_heard_at_other_times_are_not_behind():
    """What they have done since is added by their pace."""
    progress = watching()
    for at in (1.0, 2.0):
        hear(progress, at, mark(0, int(at * 50), step=int(at * 50)))
        hear(progress, at + 0.5, mark(1, int(at * 50) + 25, step=int(at * 50) + 25))
    progress.so_far(3.0)
    found = progress.so_far(3.0)
    assert found is not None
    assert (found.low, found.high) == (125, 125)


def test_who_has_ended_is_not_the_slowest_and_does_not_stand_still():
    """Ranks with less data are done before the others, or with more of it."""
    progress = watching(ranks=3)
    for second in range(1, 60):
        ended = [mark(0, 9, step=9), mark(1, 200, step=200)] if second < 20 else []
        hear(progress, float(second), *ended, mark(2, second * 2, step=second * 2))
        found = progress.so_far(float(second))
    assert found is not None
    assert (found.slowest, found.low, found.high, found.marks) == (2, 118, 200, 200)
    assert found.rate == pytest.approx(2.0)


def test_steps_that_have_no_numbers():
    """They are counted all the same."""
    progress = watching(ranks=1)
    hear(progress, 1.0, mark(0, 3))
    for _ in range(2):
        found = progress.so_far(1.0)
        assert found is not None
        assert (found.marks, found.low, found.high) == (3, None, None)


def test_ranks_that_never_do_a_step_are_not_waited_for_long():
    """Where others do."""
    progress = watching()
    hear(progress, 1.0, mark(0, 1), mark(1, 0))
    hear(progress, 11.5, mark(0, 99), mark(1, 0))
    assert progress.so_far(9.0) is None
    assert progress.so_far(11.5) is not None


def test_the_rate_is_of_the_last_while():
    """Not of what was before, and nothing where all stand still."""
    progress = watching(ranks=1)
    for second in range(1, 40):
        hear(progress, float(second), mark(0, second if second < 20 else 20 + (second - 20) * 10))
    assert progress.so_far(39.0).rate == pytest.approx(10.0)
    hear(progress, 60.0, mark(0, 210, 21.0))
    assert progress.so_far(60.0).rate == 0
    assert watching_once().rate == 0


def watching_once() -> Progressed:
    """Heartbeats that come at once have no pace."""
    progress = watching(ranks=1)
    hear(progress, 1.0, mark(0, 1))
    hear(progress, 2.0, mark(0, 2, 1.0))
    found = progress.so_far(2.0)
    assert found is not None
    return found


# From one attempt to the next.

FIRST = Progressed(at=2.0, attempt=1, marks=5, low=0, high=4, marked=1.0, rate=4.0)
LAST = Progressed(at=9.0, attempt=1, marks=44, low=43, high=43, marked=8.9)
BACK = Progressed(at=10.0, attempt=2, marks=1, low=41, high=41, marked=9.8)


def test_what_a_restart_costs():
    """Steps done again, and the time without any."""
    before, after = Course(first=FIRST, last=LAST), Course(first=BACK, last=BACK)
    assert after.first_step == 41
    assert after.lost_after(before) == 3
    assert after.pause_after(before) == pytest.approx(0.9)


def test_a_planned_restart_costs_no_step():
    """And one that begins further on, as some resume from elsewhere, does not win any."""
    before = Course(first=FIRST, last=LAST)
    for low in (44, 50):
        assert Course(first=replace(BACK, low=low), last=BACK).lost_after(before) == 0


def test_steps_without_numbers_cannot_be_compared():
    """On either side."""
    before, after = Course(first=FIRST, last=LAST), Course(first=BACK, last=BACK)
    assert Course(first=replace(BACK, low=None), last=BACK).lost_after(before) is None
    assert after.lost_after(replace(before, last=replace(LAST, high=None))) is None


def test_an_attempt_of_which_only_one_word_is_known():
    """Its last step was done as long after the first as its pace says."""
    before, after = Course(first=FIRST, last=FIRST), Course(first=BACK, last=BACK)
    assert before.ended == pytest.approx(2.0)
    assert after.ended == pytest.approx(9.8)
    assert after.pause_after(before) == pytest.approx(7.8)


def test_where_a_script_counts_its_steps_itself_the_first_word_is_in_its_numbers():
    """Its optimizer, whose count is known first, may be one behind: no step is lost for that."""
    progress = watching(ranks=1)
    hear(progress, 1.0, mark(0, 7, step=7, asked=7, first_step=1))
    before = progress.so_far(1.0)
    progress.begin(2, range(1))
    hear(progress, 3.0, mark(0, 1, step=7, first_step=7), attempt=2)
    assert progress.so_far(3.0) is None
    hear(progress, 4.0, mark(0, 1, 1.0, step=8, asked=8, first_step=8), attempt=2)
    after = progress.so_far(4.0)
    assert Course(first=after, last=after).lost_after(Course(first=before, last=before)) == 0
