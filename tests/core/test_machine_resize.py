"""The decisions where a world that is well becomes another: nodes join and are drained, and the workers save first."""

from __future__ import annotations

import pytest
from story import (
    ask,
    asked,
    begun,
    checkpointed,
    draining,
    failed,
    finished,
    forward,
    gone_by,
    job,
    joined,
    launch,
    lost,
    raised,
    run_on,
    running,
    saved_by,
    start_by,
    started,
    stop,
    stopped,
    tick,
    told,
)

from raylaunch.core.actions import Finish, Forward, Readmit, Release, WakeAt
from raylaunch.core.machine import Machine
from raylaunch.core.phases import Phase

DRAIN_B = "b is being drained: spot"


def let_go(node: str) -> Release:
    return Release(node=node, why="it is being drained")


def asking(*nodes: str, at: float = 10.0, **settings: object) -> Machine:
    """A machine whose workers are asked to save, since b, one more than are needed, is being drained."""
    machine = running(*nodes, **({"nnodes": f"1:{len(nodes)}"} | settings))
    told(machine, draining("b", at))
    assert machine.asking
    return machine


# A planned resize.


def test_workers_save_at_one_step_before_they_are_ended():
    """All are asked; when the last has saved, all are signalled together, with their grace for what handlers do."""
    machine = running("a", "b", "c", nnodes="2:3")
    assert told(machine, draining("b", 10.0)) == [ask(1, "a", "b", "c", why=DRAIN_B), saved_by(610.0)]
    assert (machine.phase, machine.status) == (Phase.STOPPING, DRAIN_B)
    assert told(machine, checkpointed("a", 11.0), checkpointed("c", 11.1)) == []
    assert told(machine, checkpointed("b", 11.2)) == [
        stop(1, "a", "b", "c", grace=30.0, why=DRAIN_B),
        gone_by(51.2),
    ]
    assert told(machine, stopped("a", 12.0), stopped("b", 12.0)) == []
    assert told(machine, stopped("c", 13.0)) == [launch(2, "a", "c", why=DRAIN_B), let_go("b"), start_by(133.0)]
    assert machine.restarts == 0


def test_a_script_that_knows_nothing_of_checkpoints_is_signalled_at_once():
    """One node's word is enough: to wait for the others' would only take time from the grace."""
    machine = asking("a", "b")
    assert told(machine, checkpointed("a", 10.1, step=None)) == [
        stop(1, "a", "b", grace=30.0, why=DRAIN_B),
        gone_by(50.1),
    ]


def test_workers_that_do_not_save_in_time_are_signalled():
    """Steps and checkpoints may take minutes; the grace comes after that."""
    machine = asking("a", "b")
    told(machine, checkpointed("a", 12.0))
    assert told(machine, tick(610.0)) == [stop(1, "a", "b", grace=30.0, why=DRAIN_B), gone_by(650.0)]


def test_workers_that_have_a_longer_grace_have_as_long_to_save():
    """Whoever gives them that knows why."""
    machine = running("a", "b", nnodes="1:2", shutdown_timeout=900.0)
    assert told(machine, draining("b", 10.0)) == [ask(1, "a", "b", why=DRAIN_B), saved_by(910.0)]


def test_without_grace_there_is_time_to_save_all_the_same():
    """It is what lies between two signals; the first comes when they have saved."""
    machine = running("a", "b", nnodes="1:2", shutdown_timeout=0.0)
    assert told(machine, draining("b", 10.0)) == [ask(1, "a", "b", why=DRAIN_B), saved_by(610.0)]
    assert told(machine, tick(610.0)) == [stop(1, "a", "b", grace=0.0, why=DRAIN_B), gone_by(620.0)]


def test_answers_that_come_too_late_change_nothing():
    """After the signal, only the end of the workers counts."""
    machine = asking("a", "b")
    told(machine, checkpointed("a", 10.1, step=None))
    assert told(machine, checkpointed("b", 10.2), checkpointed("b", 10.3, step=None)) == []
    assert machine.awaited == {"a", "b"}


def test_a_node_says_stopped_before_it_was_told_to():
    """Unasked, it means nothing."""
    machine = asking("a", "b")
    assert told(machine, stopped("a", 11.0)) == []
    assert machine.awaited == {"a", "b"}


def test_a_node_is_lost_while_others_save():
    """The others wait for it in their steps: nothing more can be saved."""
    machine = asking("a", "b", "c")
    told(machine, checkpointed("a", 10.5))
    why = "c was lost: its agent died"
    assert told(machine, lost("c", 11.0)) == [stop(1, "a", "b", grace=0.0, why=why), gone_by(21.0)]
    assert told(machine, stopped("a", 12.0), stopped("b", 12.0))[0] == launch(2, "a", why=why)
    assert machine.restarts == 0


def test_the_last_that_has_not_saved_is_lost():
    """The same: what the others saved counts, and they are ended."""
    machine = asking("a", "b")
    told(machine, checkpointed("a", 10.5))
    assert told(machine, lost("b", 11.0))[0] == stop(1, "a", grace=0.0, why="b was lost: its agent died")


def test_a_node_that_has_finished_is_lost_while_others_save():
    """It was not asked, and is not missed."""
    machine = running("a", "b", "c", nnodes="1:3")
    told(machine, finished("c", 5.0))
    assert told(machine, draining("b", 10.0))[0] == ask(1, "a", "b", why=DRAIN_B)
    assert machine.awaited == {"a", "b"}
    assert told(machine, lost("c", 11.0)) == []
    assert machine.awaited == {"a", "b"}


def test_a_worker_fails_while_others_save():
    """The world is broken, and would have ended anyway: no grace, and no restart is spent."""
    machine = asking("a", "b", max_restarts=1)
    why = "rank 1 on a was killed by SIGKILL"
    assert told(machine, failed("a", 11.0)) == [stop(1, "a", "b", grace=0.0, why=why), gone_by(21.0)]
    told(machine, stopped("a", 11.1))
    assert told(machine, stopped("b", 11.1))[0] == launch(2, "a", why=why)
    assert (machine.restarts, len(machine.failures)) == (0, 0)


def test_one_node_finishes_while_others_save():
    """It has nothing more to save: the others' answers are enough."""
    machine = asking("a", "b")
    assert told(machine, finished("a", 11.0)) == []
    assert told(machine, checkpointed("b", 11.1)) == [stop(1, "a", "b", grace=30.0, why=DRAIN_B), gone_by(51.1)]


def test_the_last_that_has_not_saved_finishes():
    """Those that wait are told to go on to the next attempt."""
    machine = asking("a", "b")
    told(machine, checkpointed("a", 11.0))
    assert told(machine, finished("b", 11.1))[0] == stop(1, "a", "b", grace=30.0, why=DRAIN_B)


def test_all_finish_while_they_should_save():
    """The step they were asked for lay beyond their end: all is done, and no other attempt is needed."""
    machine = asking("a", "b")
    assert told(machine, finished("a", 11.0), finished("b", 11.1)) == [
        Finish(exit_code=0, why="all 4 workers finished")
    ]


def test_asked_to_stop_while_workers_save():
    """The person's signal goes out at once; those that have saved wait for nothing else."""
    machine = asking("a", "b")
    told(machine, checkpointed("a", 10.5))
    assert told(machine, asked("SIGTERM", 11.0)) == [
        stop(1, "a", "b", grace=30.0, why="SIGTERM received"),
        gone_by(51.0),
    ]
    assert told(machine, stopped("a", 12.0), stopped("b", 12.0)) == [Finish(exit_code=143, why="stopped by SIGTERM")]


def test_forwarded_signals_are_not_for_workers_that_save():
    """They are about to end."""
    assert told(asking("a", "b"), forward("SIGUSR1", 11.0)) == []


def test_nodes_that_join_while_others_save_take_part_in_the_next():
    """They need no last call."""
    machine = asking("a", "b", nnodes="1:3")
    assert told(machine, joined("c", 10.5), checkpointed("a", 11.0)) == []
    told(machine, checkpointed("b", 11.0), stopped("a", 12.0))
    assert told(machine, stopped("b", 12.0))[0] == launch(2, "a", "c", why=DRAIN_B)


# Nodes are drained.


def test_several_drains_are_one_resize():
    """Those that come while the workers save cost nothing more, and none of them has a part in the next world."""
    machine = asking("a", "b", "c", "d")
    assert told(machine, draining("c", 10.5), draining("d", 12.0), draining("b", 13.0)) == []
    told(machine, *(checkpointed(node, 14.0) for node in "abcd"), *(stopped(node, 15.0) for node in "abc"))
    assert told(machine, stopped("d", 15.0)) == [
        launch(2, "a", why=DRAIN_B),
        let_go("b"),
        let_go("c"),
        let_go("d"),
        start_by(135.0),
    ]


def test_a_drained_host_takes_all_its_nodes_along():
    """There are too few without them: the workers go on, whatever is said first of one of them alone."""
    machine = begun(job("3:4"))
    told(machine, *(joined(node, host="x" if node in "ab" else "") for node in "abcd"))
    run_on(machine, 1.0)
    told(machine, draining("a", 5.0), draining("b", 5.0))
    assert machine.phase is Phase.RUNNING
    assert told(machine, joined("e", 6.0))[0] == ask(1, "a", "b", "c", "d", why="e joined")


def test_a_drain_that_comes_while_others_save_may_be_the_more_urgent():
    """The time to save is half of what is left of the first node to go, less a second."""
    machine = asking("a", "b", "c")
    assert told(machine, draining("c", 12.0, deadline=19.0)) == [saved_by(15.0)]
    assert told(machine, tick(15.0)) == [stop(1, "a", "b", "c", grace=3.0, why=DRAIN_B), gone_by(28.0)]


def test_a_later_drain_with_more_time_gives_no_more_time():
    """The first node to go sets the pace."""
    machine = running("a", "b", "c", nnodes="1:3")
    told(machine, draining("b", 10.0, deadline=19.0))
    assert told(machine, draining("c", 11.0)) == []
    assert told(machine, tick(14.0))[0] == stop(1, "a", "b", "c", grace=4.0, why=DRAIN_B)


def test_a_drain_with_little_time():
    """Half of it to save, and what is left of it, less a second, between the signal and the end."""
    machine = running("a", "b", nnodes="1:2")
    assert told(machine, draining("b", 5.0, deadline=16.0)) == [ask(1, "a", "b", why=DRAIN_B), saved_by(10.0)]
    assert told(machine, tick(10.0)) == [stop(1, "a", "b", grace=5.0, why=DRAIN_B), gone_by(25.0)]


def test_a_drain_with_no_time():
    """The workers are ended at once: better by us than by the machine that goes."""
    machine = running("a", "b", nnodes="1:2")
    assert told(machine, draining("b", 5.0, deadline=2.0)) == [ask(1, "a", "b", why=DRAIN_B), saved_by(5.0)]
    assert told(machine, tick(5.0))[0] == stop(1, "a", "b", grace=0.0, why=DRAIN_B)


def test_a_drain_while_workers_start():
    """There is nothing to save yet, so they are stopped; the next world is without the node."""
    machine = begun(job("1:2"))
    told(machine, joined("a"), joined("b"), started("b", 1.0))
    assert told(machine, draining("b", 2.0)) == [stop(1, "a", "b", grace=30.0, why=DRAIN_B), gone_by(42.0)]
    told(machine, stopped("a", 3.0))
    assert told(machine, stopped("b", 3.0))[:2] == [launch(2, "a", why=DRAIN_B), let_go("b")]


def test_a_drain_with_little_time_while_workers_start():
    """Their grace ends before the node does."""
    machine = begun(job("1:2"))
    told(machine, joined("a"), joined("b"))
    assert told(machine, draining("b", 2.0, deadline=7.0))[0] == stop(1, "a", "b", grace=4.0, why=DRAIN_B)
    machine = begun(job("1:2"))
    told(machine, joined("a"), joined("b"))
    assert told(machine, draining("b", 2.0, deadline=1.0))[0] == stop(1, "a", "b", grace=0.0, why=DRAIN_B)


def test_a_drain_while_workers_are_stopped():
    """The stop goes on as it is; the next world is without the node."""
    machine = asking("a", "b", "c")
    told(machine, checkpointed("a", 11.0, step=None))
    assert told(machine, draining("c", 12.0)) == []
    told(machine, stopped("a", 13.0), stopped("b", 13.0))
    assert told(machine, stopped("c", 13.0))[0] == launch(2, "a", why=DRAIN_B)


def test_a_drained_node_that_is_not_used():
    """Nobody's steps depend on it, so it is let go at once."""
    machine = running("a", nnodes="1:3")
    told(machine, joined("b", 10.0))
    assert told(machine, draining("b", 11.0)) == [let_go("b")]
    assert told(machine, tick(15.0)) == []
    assert machine.phase is Phase.RUNNING


def test_a_drained_spare_takes_no_other_along():
    """A node of the world that goes on while it is drained keeps its workers."""
    machine = running("a", "b", multiple_of=4, spares=1)
    told(machine, joined("c", 5.0, nproc=1), draining("b", 10.0, deadline=200.0))
    assert told(machine, draining("c", 11.0)) == [let_go("c")]
    assert (machine.phase, set(machine.nodes)) == (Phase.RUNNING, {"a", "b"})


def test_a_drained_node_that_has_finished():
    """Nothing of it is needed any more, so the others go on to their end."""
    machine = running("a", "b", nnodes="1:2")
    assert told(machine, finished("a", 5.0), draining("a", 6.0)) == []
    assert told(machine, finished("b", 7.0)) == [Finish(exit_code=0, why="all 4 workers finished")]


# Nodes are drained, and too few are left.


def below_min(deadline: float = 200.0, **settings: object) -> Machine:
    """a and b run, both are needed, and b is being drained."""
    machine = running("a", "b", **settings)
    told(machine, draining("b", 10.0, deadline=deadline))
    assert machine.phase is Phase.RUNNING
    return machine


def test_workers_go_on_while_another_node_may_come():
    """To stop them at once would waste the time that is left; the latest time to save leaves the grace twice."""
    machine = running("a", "b")
    status = f"{DRAIN_B}; the workers go on until another node comes, or the time is short"
    assert told(machine, draining("b", 10.0, deadline=200.0)) == [WakeAt(at=130.0, why=status)]
    assert (machine.phase, machine.status) == (Phase.RUNNING, status)


def test_another_node_comes_in_time():
    """No last call: the world becomes another at once."""
    machine = below_min()
    assert told(machine, joined("c", 60.0)) == [ask(1, "a", "b", why="c joined"), saved_by(169.0)]
    told(machine, checkpointed("a", 61.0), checkpointed("b", 61.0), stopped("a", 62.0))
    assert told(machine, stopped("b", 62.0)) == [launch(2, "a", "c", why="c joined"), let_go("b"), start_by(182.0)]
    assert machine.evacuation is None


def test_a_job_that_could_take_more_nodes_does_not_wait_for_them():
    """Enough to leave the drained node is enough."""
    machine = below_min(nnodes="2:4")
    assert told(machine, joined("c", 60.0))[0] == ask(1, "a", "b", why="c joined")


def test_no_other_node_comes_in_time():
    """They save, all that is drained is let go, and the rest waits for nodes."""
    machine = below_min(join_timeout=100.0)
    why = "the time of a drained node is short"
    assert told(machine, tick(130.0)) == [ask(1, "a", "b", why=why), saved_by(169.0)]
    assert told(machine, tick(169.0)) == [stop(1, "a", "b", grace=30.0, why=why), gone_by(209.0)]
    told(machine, stopped("a", 170.0))
    assert told(machine, stopped("b", 171.0)) == [let_go("b"), WakeAt(at=271.0, why="1 of 2 nodes")]
    assert told(machine, lost("b", 172.0)) == []
    assert told(machine, joined("c", 173.0))[0] == launch(2, "a", "c", why="2 of 2 nodes; c joined")


def test_a_host_that_was_left_out_may_come_in_place_of_a_drained_one():
    """There are too few without it, and the drained node still has some time."""
    machine = running("a", "b", "c", nnodes="2:3", max_restarts=9, exclude_after=1)
    told(machine, failed("c", 20.0))
    run_on(machine, 20.0)
    told(machine, draining("b", 21.0, deadline=300.0))
    assert told(machine, tick(36.0))[0] == Readmit(host="host-of-c", why="its time is over")


def test_a_node_that_comes_and_is_not_enough():
    """Of three that go, two are needed: the first newcomer changes nothing, the second all."""
    machine = running("a", "b", "c")
    told(machine, draining("b", 10.0), draining("c", 10.0))
    assert told(machine, joined("d", 20.0)) == []
    assert told(machine, joined("e", 21.0))[0] == ask(1, "a", "b", "c", why="e joined")


def test_of_two_that_go_the_first_sets_the_time():
    """Whichever notice comes first."""
    machine = below_min(deadline=500.0)
    told(machine, draining("a", 11.0, deadline=200.0))
    assert machine.evacuation == 130.0
    machine = below_min(deadline=200.0)
    told(machine, draining("a", 11.0, deadline=500.0))
    assert machine.evacuation == 130.0


def test_a_drained_node_goes_before_its_time():
    """Then the world is broken, as by any loss, and the others wait."""
    machine = below_min()
    why = "b was lost: its agent died"
    assert told(machine, lost("b", 20.0)) == [stop(1, "a", grace=0.0, why=why), gone_by(30.0)]
    assert told(machine, stopped("a", 21.0)) == [WakeAt(at=621.0, why="1 of 2 nodes")]


@pytest.mark.parametrize("signal", [-9, -15])
def test_a_machine_that_goes_down_kills_the_workers_first(signal):
    """What dies on a drained node by a kill from outside costs no restart, and ends no run."""
    machine = below_min()
    why = f"rank 1 on b was killed by {'SIGKILL' if signal == -9 else 'SIGTERM'}; b is being drained"
    assert told(machine, failed("b", 20.0, exit_code=signal)) == [stop(1, "a", "b", grace=0.0, why=why), gone_by(30.0)]
    assert told(machine, stopped("a", 21.0), stopped("b", 21.0))[-1] == WakeAt(at=621.0, why="1 of 2 nodes")


def test_what_peers_say_of_a_drained_node_costs_nothing():
    """It may be let go before it is known to be lost, and nothing would be pardoned then."""
    machine = below_min()
    told(machine, failed("a", 20.0, **raised("RuntimeError", "Connection reset by peer")))
    assert (machine.restarts, machine.phase) == (0, Phase.STOPPING)
    assert machine.status.endswith("; b is being drained")


def test_a_script_that_fails_on_a_drained_node_has_failed():
    """Its own errors count there as anywhere."""
    machine = below_min(max_restarts=1)
    told(machine, failed("b", 20.0, **raised("ValueError", "NaN")))
    assert machine.restarts == 1


def test_a_needed_node_is_drained_while_workers_start():
    """The attempt goes on, as it would if they were started already."""
    machine = begun(job(2))
    told(machine, joined("a", 1.0), joined("b", 1.0), started("b", 1.1))
    assert told(machine, draining("b", 2.0, deadline=200.0)) == []
    assert told(machine, started("a", 3.0)) == [WakeAt(at=130.0, why="more nodes may come")]
    assert machine.phase is Phase.RUNNING
    assert told(machine, joined("c", 4.0))[0] == ask(1, "a", "b", why="c joined")


def test_another_node_comes_while_workers_still_start():
    """They save as soon as they are started: the node that goes is left at once."""
    machine = begun(job(2))
    told(machine, joined("a", 1.0), joined("b", 1.0), draining("b", 2.0, deadline=200.0), joined("c", 3.0))
    assert told(machine, started("a", 4.0), started("b", 4.0)) == [WakeAt(at=4.0, why="more nodes may come")]
    assert told(machine, tick(4.0))[0] == ask(1, "a", "b", why="nodes joined")


# Nodes join later.


def test_a_node_that_joins_later_resizes_politely():
    """A last call gathers joins; then all save together and start again, survivors first."""
    machine = running("b", "c", nnodes="1:5")
    now = machine.now
    assert told(machine, joined("a", now + 10)) == [WakeAt(at=now + 15, why="a joined; more may come")]
    assert told(machine, joined("d", now + 12)) == []
    assert told(machine, tick(now + 15)) == [ask(1, "b", "c", why="nodes joined"), saved_by(now + 615)]
    assert told(machine, checkpointed("b", now + 16), checkpointed("c", now + 16)) == [
        stop(1, "b", "c", grace=30.0, why="nodes joined"),
        gone_by(now + 56),
    ]
    assert told(machine, stopped("b", now + 16), stopped("c", now + 17)) == [
        launch(2, "b", "c", "a", "d", why="nodes joined"),
        start_by(now + 137),
    ]
    assert machine.restarts == 0


def test_a_join_that_makes_the_job_full_resizes_at_once():
    """Nobody more can come, so there is nothing to wait for."""
    machine = running("b", "c", nnodes="1:4")
    now = machine.now
    told(machine, joined("a", now + 10))
    assert told(machine, joined("d", now + 11)) == [ask(1, "b", "c", why="d joined"), saved_by(now + 611)]


def test_a_node_that_joins_while_others_start():
    """Its last call begins at once; the attempt that starts goes on until it is over."""
    machine = begun(job("1:3", start_timeout=60.0))
    told(machine, joined("a", 1.0), tick(6.0))
    assert told(machine, joined("b", 7.0)) == []
    assert told(machine, started("a", 8.0)) == [WakeAt(at=12.0, why="more nodes may come")]
    assert told(machine, tick(12.0)) == [ask(1, "a", why="nodes joined"), saved_by(612.0)]


def test_a_node_that_makes_the_job_full_while_others_start():
    """They save as soon as they are started."""
    machine = begun(job("1:2"))
    told(machine, joined("a", 1.0), tick(6.0))
    assert told(machine, joined("b", 7.0)) == []
    assert told(machine, started("a", 8.0)) == [WakeAt(at=8.0, why="more nodes may come")]
    assert told(machine, tick(8.0))[0] == ask(1, "a", why="nodes joined")


def test_the_last_call_is_over_when_the_job_is_full():
    """Also one that began before, while others start."""
    machine = begun(job("1:3"))
    told(machine, joined("a", 1.0), tick(6.0), joined("b", 7.0), joined("c", 8.0))
    assert told(machine, started("a", 9.0)) == [WakeAt(at=9.0, why="more nodes may come")]


def test_a_join_that_is_gone_again_resizes_nothing():
    """When the last call is over and nobody is there, all go on."""
    machine = running("a", nnodes="1:3")
    now = machine.now
    told(machine, joined("b", now + 10), lost("b", now + 11))
    assert told(machine, tick(now + 15)) == []
    assert machine.phase is Phase.RUNNING


def test_a_world_that_has_begun_to_finish_is_not_resized():
    """Where one node's workers are done, a newcomer would only make them do it again."""
    machine = running("a", "b", nnodes="1:3")
    now = machine.now
    assert told(machine, finished("a", now + 1), joined("c", now + 2), tick(now + 7)) == []
    assert told(machine, finished("b", now + 8)) == [Finish(exit_code=0, why="all 4 workers finished")]


def test_a_world_that_comes_after_one_that_had_begun_to_finish_is_resized():
    """It is a run like any other."""
    machine = running("a", "b", nnodes="1:3", max_restarts=1)
    told(machine, finished("a", 5.0), failed("b", 6.0))
    run_on(machine, 7.0)
    assert told(machine, joined("c", 20.0))[0] == ask(2, "a", "b", why="c joined")


def test_a_world_that_begins_to_finish_during_the_last_call_is_not_resized():
    """The same, where the newcomer came first."""
    machine = running("a", "b", nnodes="1:4")
    now = machine.now
    told(machine, joined("c", now + 1), finished("a", now + 2))
    assert told(machine, tick(now + 6)) == []
    assert machine.phase is Phase.RUNNING


def test_survivors_keep_their_order():
    """Ranks move as little as possible: survivors first, newcomers after them in natural order."""
    machine = running("c", "d", "e", nnodes="2:6")
    told(machine, joined("b", 10.0), joined("a", 10.0))
    told(machine, lost("d", 11.0))
    assert machine.roster == ("c", "e", "a", "b")


# Spares.


def test_spare_nodes_beyond_max_wait():
    """A full job is not disturbed by more nodes, and does not take them while its own are there."""
    machine = running("b", "c", max_restarts=1, spares=1)
    assert told(machine, joined("a", 5.0)) == []
    told(machine, failed("b", 6.0))
    assert (machine.attempt, machine.roster) == (2, ("b", "c"))


def test_a_spare_takes_the_place_of_a_lost_node_at_once():
    """In the same breath, behind the survivors."""
    machine = running("b", "c", spares=1)
    told(machine, joined("a", 5.0))
    why = "b was lost: its agent died"
    assert told(machine, lost("b", 6.0)) == [
        stop(1, "c", grace=0.0, why=why),
        launch(2, "c", "a", why=why),
        start_by(126.0),
    ]


def test_a_spare_takes_the_place_of_a_drained_node():
    """It is enough for the next world, so the workers save now."""
    machine = running("b", "c", spares=1)
    told(machine, joined("a", 5.0))
    assert told(machine, draining("b", 6.0)) == [ask(1, "b", "c", why=DRAIN_B), saved_by(606.0)]
    told(machine, checkpointed("b", 7.0), checkpointed("c", 7.0), stopped("b", 8.0))
    assert told(machine, stopped("c", 8.0))[0] == launch(2, "c", "a", why=DRAIN_B)


# World sizes that are a multiple of something.


def test_a_world_is_a_multiple():
    """Three nodes of two workers are six; four at a time leaves one node waiting."""
    machine = begun(job("1:4", multiple_of=4))
    assert told(machine, joined("a", 1.0)) == []
    assert machine.status == "1 of 1 to 4 nodes, but no world size that is a multiple of 4"
    assert told(machine, joined("b", 2.0)) == [WakeAt(at=7.0, why="2 of 1 to 4 nodes")]
    told(machine, joined("c", 3.0))
    assert told(machine, tick(7.0))[0] == launch(1, "a", "b", why="3 of 1 to 4 nodes; last call is over")


def test_a_node_that_makes_no_larger_multiple_disturbs_nobody():
    """It waits for another."""
    machine = running("a", "b", nnodes="1:8", multiple_of=4)
    assert told(machine, joined("c", 20.0)) == []
    assert told(machine, joined("d", 21.0)) == [WakeAt(at=26.0, why="d joined; more may come")]
    assert told(machine, tick(26.0))[0] == ask(1, "a", "b", why="nodes joined")


def test_a_lost_node_takes_its_partner_out():
    """Where the rest is no multiple, the last of the nodes waits for another."""
    machine = running("a", "b", "c", "d", nnodes="1:4", multiple_of=4)
    assert told(machine, lost("b", 20.0))[1] == launch(2, "a", "c", why="b was lost: its agent died")


def test_no_multiple_is_left():
    """As if there were too few; said as what it is."""
    machine = running("a", "b", nnodes="1:2", multiple_of=4, join_timeout=100.0)
    told(machine, lost("b", 20.0))
    why = "1 of 1 to 2 nodes, but no world size that is a multiple of 4"
    assert told(machine, stopped("a", 21.0)) == [WakeAt(at=121.0, why=why)]
    end = "1 of 1 nodes, and no world size that is a multiple of 4, after 100 s"
    assert told(machine, tick(121.0)) == [Finish(exit_code=3, why=end)]


def test_unequal_nodes_make_the_largest_multiple():
    """Of 4, 2 and 3 workers, the 3 go: six are more than four."""
    machine = begun(job("1:3", multiple_of=2))
    told(machine, joined("a", 1.0, nproc=4), joined("c", 1.0, nproc=3))
    assert told(machine, joined("b", 1.0, nproc=2))[0] == launch(1, "a", "b", why="3 of 1 to 3 nodes; b joined")
    assert machine.workers == 6


def test_survivors_that_make_no_multiple_give_way():
    """A world to be had with others is better than none with the survivors."""
    machine = begun(job(2, multiple_of=4))
    told(machine, joined("c", 1.0, nproc=3), joined("d", 1.0, nproc=1))
    run_on(machine, 2.0)
    told(machine, joined("a", 3.0), joined("b", 3.0))
    assert told(machine, lost("d", 4.0))[1] == launch(2, "a", "b", why="d was lost: its agent died")


def test_forwarding_is_back_after_a_resize():
    """The next attempt is a run like any other."""
    machine = asking("a", "b")
    told(machine, checkpointed("a", 11.0), checkpointed("b", 11.0), stopped("a", 12.0), stopped("b", 12.0))
    run_on(machine, 13.0)
    assert told(machine, forward("SIGUSR1", 14.0)) == [
        Forward(attempt=2, nodes=("a",), signal="SIGUSR1", why="SIGUSR1 received")
    ]
