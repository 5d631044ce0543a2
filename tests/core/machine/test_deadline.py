"""A run that must be over by some time: all workers save before, and the run says that it can go on."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from machine_helpers import (
    checkpointed,
    deadline_set,
    draining,
    failed,
    finished,
    gathering_machine,
    handle_all,
    job,
    joined,
    launch,
    lost,
    progressed,
    replaced,
    report_unsaved,
    request_checkpoint,
    restart_requested,
    running_machine,
    saving_timer,
    signalled,
    start_all_workers,
    stop,
    stop_command,
    stop_requested,
    stopped,
    stopping_timer,
    tick,
)

from raylaunch.core.machine.events_and_actions import Finish, SetTimer
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.saving import short_grace
from raylaunch.core.machine.state import Phase

SHORT = "the time of the run is short: Slurm ends job 7"
IN_TIME = "stopped in time, since Slurm ends job 7"
SAVED = "; all workers have saved after step 7, and a new run goes on from there"


def limited_machine(deadline: float = 1000.0, *nodes: str, **settings: object) -> Machine:
    """Return a machine that runs two nodes until a deadline that it has learnt at the beginning."""
    machine = gathering_machine(job(**({"nnodes": len(nodes or "ab")} | settings)))
    handle_all(machine, deadline_set(deadline), *(joined(node, 1.0) for node in nodes or "ab"))
    start_all_workers(machine, 1.0)
    assert machine.phase is Phase.RUNNING
    return machine


def measure(machine: Machine, seconds: float, rate: float = 0.0) -> list[object]:
    """Report how long the slowest worker took for its last checkpoint."""
    return handle_all(machine, replace(progressed(machine.now), slowest_save=seconds, rate=rate))


def end_at(machine: Machine) -> float:
    found = machine.run.end_at
    assert found is not None
    return found


def test_all_save_in_time_and_the_run_can_go_on():
    machine = limited_machine()
    measure(machine, 20.0)
    assert end_at(machine) == 1000.0 - 2 * 20.0 - 30.0 - 10.0
    assert handle_all(machine, tick(920.0)) == [request_checkpoint(1, "a", "b", why=SHORT), saving_timer(969.0)]
    assert handle_all(machine, checkpointed("a", 930.0)) == []
    assert handle_all(machine, checkpointed("b", 940.0)) == [
        stop(1, "a", "b", grace=30.0, why=SHORT),
        stopping_timer(980.0),
    ]
    handle_all(machine, stopped("a", 941.0))
    assert handle_all(machine, stopped("b", 942.0)) == [Finish(exit_code=75, why=f"{IN_TIME}{SAVED}")]


def test_the_timer_follows_what_is_measured():
    """The first report, and each that tells another time, sets it."""
    machine = limited_machine()
    assert end_at(machine) == 860.0
    assert measure(machine, 10.0) == [SetTimer(at=940.0, why="a save takes another time than before")]
    assert measure(machine, 10.0) == []
    assert measure(machine, 60.0) == [SetTimer(at=840.0, why="a save takes another time than before")]
    assert handle_all(machine, tick(839.0)) == [SetTimer(at=840.0, why="the time has not come")]


@pytest.mark.parametrize(
    ("grace", "save", "warned"),
    [(30.0, 15.0, ""), (30.0, 15.5, "15.0 s"), (100.0, 70.0, ""), (100.0, 70.5, "1 min 10 s"), (0.0, 500.0, "")],
)
def test_a_grace_that_is_too_short_to_save(grace, save, warned):
    """Of a short one half is left for the signal, of a long one `shutdown_timeout`."""
    machine = running_machine("a", grace=grace)
    assert short_grace(machine.run) == ""
    measure(machine, save)
    assert short_grace(machine.run).partition(" that")[0] == (warned and f"a save takes longer than the {warned}")


def test_steps_that_are_slow_need_time_too():
    """The step at which all save is some steps ahead."""
    machine = limited_machine()
    measure(machine, 10.0, rate=0.1)
    assert end_at(machine) == 1000.0 - 2 * (10.0 + 3 * 10.0) - 40.0


def test_a_whole_save_is_a_measure():
    """The longest that was seen counts, from the request until all had saved."""
    machine = limited_machine()
    handle_all(machine, restart_requested(10.0), checkpointed("a", 30.0), checkpointed("b", 80.0))
    handle_all(machine, stopped("a", 81.0), stopped("b", 81.0))
    start_all_workers(machine, 82.0)
    assert end_at(machine) == 1000.0 - 2 * 70.0 - 40.0
    handle_all(
        machine, restart_requested(100.0), checkpointed("a", 101.0, attempt=2), checkpointed("b", 101.0, attempt=2)
    )
    assert end_at(machine) == 1000.0 - 2 * 70.0 - 40.0


@pytest.mark.parametrize(("deadline", "end"), [(1000.0, 860.0), (100.0, 50.0), (200.0, 130.0), (1e5, 1e5 - 640.0)])
def test_unmeasured_save(deadline, end):
    """A tenth of the time is kept for it, at least the grace, at most ten minutes, and never more than half in all."""
    assert end_at(limited_machine(deadline)) == end


def test_workers_that_do_not_save_in_time():
    """They get the signal before the deadline, and the message does not claim that they have saved."""
    machine = limited_machine()
    handle_all(machine, tick(860.0))
    assert handle_all(machine, tick(969.0)) == [
        report_unsaved("a", "b"),
        stop(1, "a", "b", grace=30.0, why=SHORT),
        stopping_timer(1009.0),
    ]
    assert handle_all(machine, stopped("a", 970.0), stopped("b", 970.0)) == [Finish(exit_code=75, why=IN_TIME)]


def test_a_script_that_never_saves():
    machine = limited_machine()
    handle_all(machine, tick(860.0))
    assert handle_all(machine, checkpointed("a", 861.0, step=None))[1] == stop(1, "a", "b", grace=30.0, why=SHORT)


def test_a_save_that_takes_longer_than_there_is_time():
    """It is tried all the same, and a person is told at once."""
    machine = limited_machine(100.0)
    measure(machine, 75.0)
    why = f"{SHORT}; a save takes 1 min 15 s, and only 24.5 s are left: give it more time, or steps are done again"
    assert handle_all(machine, tick(50.0))[0] == request_checkpoint(1, "a", "b", why=why)


def test_of_two_deadlines_the_earlier_one_holds():
    machine = limited_machine(1000.0)
    handle_all(machine, deadline_set(2000.0, 2.0, why="a"))
    assert machine.run.timing.deadline.at == 1000.0
    assert handle_all(machine, deadline_set(500.0, 3.0, why="b")) == [
        SetTimer(at=410.3, why="the run must be over in time")
    ]
    assert handle_all(machine, tick(450.0))[0] == request_checkpoint(1, "a", "b", why="the time of the run is short: b")


def test_deadline_in_each_phase():
    """Whatever the run does when its time is short, it ends."""
    gathering = gathering_machine(job(placement_timeout=1e6))
    assert handle_all(gathering, deadline_set(100.0), tick(50.0))[-1] == Finish(exit_code=75, why=IN_TIME)

    starting = gathering_machine(job(1, start_timeout=1e6))
    handle_all(starting, deadline_set(100.0), joined("a", 1.0))
    assert handle_all(starting, tick(50.0))[0] == stop(1, "a", grace=30.0, why=SHORT)
    assert handle_all(starting, stopped("a", 51.0)) == [Finish(exit_code=75, why=IN_TIME)]

    saving = limited_machine(100.0)
    handle_all(saving, restart_requested(49.0), tick(50.0))
    assert (saving.phase, saving.status) == (Phase.SAVING, SHORT)
    handle_all(saving, checkpointed("a", 51.0), checkpointed("b", 51.0), stopped("a", 52.0))
    assert handle_all(saving, stopped("b", 52.0)) == [Finish(exit_code=75, why=f"{IN_TIME}{SAVED}")]

    stopping = limited_machine(100.0)
    handle_all(stopping, restart_requested(48.0), checkpointed("a", 49.0), checkpointed("b", 49.0), tick(58.0))
    assert handle_all(stopping, stopped("a", 59.0), stopped("b", 59.0)) == [Finish(exit_code=75, why=IN_TIME)]

    done = limited_machine(100.0)
    assert handle_all(done, finished("a", 2.0), finished("b", 2.0), tick(50.0))[-1].exit_code == 0


def test_a_save_that_goes_on_ends_in_time():
    """Of a person's request, when a deadline is learnt that leaves less time for it."""
    machine = running_machine("a")
    handle_all(machine, restart_requested(10.0))
    handle_all(machine, deadline_set(100.0, 20.0))
    assert machine.state.deadline == 69.0


def test_failures_before_the_deadline_are_restarted():
    """Also shortly before it; the run still ends in time."""
    machine = limited_machine(100.0, max_restarts=3)
    handle_all(machine, failed("a", 49.0))
    start_all_workers(machine, 49.5)
    assert handle_all(machine, tick(50.0))[0] == request_checkpoint(2, "a", "b", why=SHORT)
    assert handle_all(machine, failed("b", 51.0, attempt=2))[0] == stop(
        2, "a", "b", grace=0.0, why="rank 1 on b was killed by SIGKILL"
    )
    handle_all(machine, stopped("a", 52.0, attempt=2))
    assert handle_all(machine, stopped("b", 52.0, attempt=2)) == [Finish(exit_code=75, why=IN_TIME)]


def test_a_world_of_other_nodes_has_the_same_deadline():
    """As after a loss."""
    machine = limited_machine(1000.0, "a", "b", nnodes="1:2")
    assert handle_all(machine, lost("b", 10.0))[1] == launch(2, "a", why="b was lost: its agent died")
    start_all_workers(machine, 11.0)
    assert end_at(machine) == 860.0


def test_another_driver_knows_the_deadline():
    """It is part of what the last one has written down."""
    machine = limited_machine()
    measure(machine, 20.0)
    other = Machine(job(), pickle.loads(pickle.dumps(machine.run)))
    assert handle_all(other, replaced(100.0)) == [SetTimer(at=920.0, why="another driver has taken over")]


def test_a_node_that_is_taken_away_before_the_deadline():
    """The earlier of the two limits the time to save."""
    machine = limited_machine(1000.0)
    measure(machine, 20.0)
    handle_all(machine, draining("b", 10.0, deadline=200.0))
    assert machine.state.resize.evacuate_at == 120.0
    assert handle_all(machine, tick(120.0))[-1] == saving_timer(169.0)


# Signals with a grace.


def test_a_signal_with_a_grace_saves_first():
    machine = running_machine("a")
    why = "SIGTERM received"
    assert handle_all(machine, *signalled("SIGTERM", 10.0)) == [
        SetTimer(at=40.0, why="the run must be over in time"),
        request_checkpoint(1, "a", why=why),
        saving_timer(39.5),
    ]
    assert handle_all(machine, checkpointed("a", 20.0)) == [stop(1, "a", grace=30.0, why=why), stopping_timer(60.0)]
    assert handle_all(machine, stopped("a", 21.0)) == [Finish(exit_code=75, why=f"stopped by SIGTERM{SAVED}")]


def test_the_workers_are_gone_before_the_grace_is_over():
    """The time between SIGTERM and SIGKILL is shorter then."""
    machine = running_machine("a")
    handle_all(machine, *signalled("SIGUSR1", 10.0, grace=20.0))
    assert handle_all(machine, checkpointed("a", 24.0))[0] == stop(1, "a", grace=5.0, why="SIGUSR1 received")


def test_a_second_signal_does_not_wait_for_the_workers_to_save():
    """A third one kills them. The exit code tells that the run had not its time."""
    machine = running_machine("a")
    handle_all(machine, *signalled("SIGTERM", 10.0))
    again = stop(1, "a", grace=30.0, why="SIGTERM again")
    assert handle_all(machine, *signalled("SIGTERM", 11.0))[-2:] == [again, stopping_timer(51.0)]
    why = "SIGTERM again"
    assert handle_all(machine, *signalled("SIGTERM", 12.0))[-2:] == [
        stop(1, "a", grace=0.0, why=why),
        Finish(exit_code=75, why="stopped by SIGTERM"),
    ]


def test_the_first_signal_after_a_deadline_or_a_command_lets_the_workers_save():
    """Slurm sends SIGTERM when the time of a job is over."""
    limited = limited_machine(100.0)
    handle_all(limited, tick(50.0), *signalled("SIGTERM", 51.0, grace=30.0))
    assert (limited.phase, limited.state.deadline) == (Phase.SAVING, 65.5)
    asked = running_machine("a")
    handle_all(asked, stop_command(10.0), *signalled("SIGTERM", 11.0))
    assert (asked.phase, asked.state.signalled) == (Phase.SAVING, True)


def test_a_signal_without_a_grace_stops_the_save_before_a_deadline():
    machine = limited_machine(100.0)
    handle_all(machine, tick(50.0))
    assert handle_all(machine, stop_requested("SIGTERM", 51.0))[0] == stop(
        1, "a", "b", grace=30.0, why="SIGTERM received"
    )


def test_a_signal_with_a_grace_while_the_run_waits_for_nodes():
    machine = gathering_machine(job())
    assert handle_all(machine, *signalled("SIGTERM", 10.0))[-1] == Finish(exit_code=75, why="stopped by SIGTERM")
