"""What people may request of a run, in each phase: stop, restart, resize, drain."""

from __future__ import annotations

import pytest
from machine_helpers import (
    BY,
    checkpointed,
    drain_requested,
    draining,
    failed,
    finished,
    gathering_machine,
    handle_all,
    hung,
    job,
    joined,
    launch,
    lost,
    raised,
    request_checkpoint,
    resize_requested,
    restart_requested,
    running_machine,
    saving_timer,
    start_all_workers,
    started,
    stop,
    stop_command,
    stop_requested,
    stopped,
    stopping_timer,
    tick,
)

from raylaunch.core.machine.events_and_actions import (
    Cordon,
    Finish,
    Launch,
    PeersUnreachable,
    Release,
    ReportUnsaved,
    Scale,
    Stop,
    Uncordon,
    UnreachablePeer,
)
from raylaunch.core.machine.machine import Machine
from raylaunch.core.machine.state import Phase

STOPPED = Finish(exit_code=143, why=f"stopped by {BY}")
WHY_STOP = f"{BY} requested the stop"
WHY_RESTART = f"{BY} requested a restart"


def machine_in(phase: Phase) -> Machine:
    """Return a machine of two nodes in this phase, where another attempt follows SAVING and STOPPING."""
    machine = gathering_machine(job("1:2"))
    if phase is Phase.GATHERING:
        return machine
    handle_all(machine, joined("a"), joined("b"))
    if phase is Phase.STARTING:
        return machine
    start_all_workers(machine, 1.0)
    events = {
        Phase.RUNNING: [],
        Phase.SAVING: [restart_requested(2.0)],
        Phase.STOPPING: [restart_requested(2.0), checkpointed("a", 3.0), checkpointed("b", 3.0)],
        Phase.DONE: [stop_requested("SIGINT", 2.0), stopped("a", 3.0), stopped("b", 3.0)],
    }
    handle_all(machine, *events[phase])
    assert machine.phase is phase
    return machine


# Stop.


def test_stop_saves_first():
    """All workers save at one step, then they get SIGTERM, and the run ends as after a SIGTERM to the driver."""
    machine = running_machine("a", "b", at=1.0)
    assert machine.refusal(stop_command(10.0)) == ""
    assert handle_all(machine, stop_command(10.0)) == [
        request_checkpoint(1, "a", "b", why=WHY_STOP),
        saving_timer(610.0),
    ]
    assert handle_all(machine, checkpointed("a", 11.0)) == []
    assert handle_all(machine, checkpointed("b", 12.0)) == [
        stop(1, "a", "b", grace=30.0, why=WHY_STOP),
        stopping_timer(52.0),
    ]
    assert handle_all(machine, stopped("a", 13.0), stopped("b", 13.0)) == [STOPPED]


def test_stop_with_much_time_to_save():
    """More than a planned change of nodes has, since a person said so; but no more than a drained node has."""
    machine = running_machine("a", "b", at=1.0)
    assert handle_all(machine, stop_command(10.0, save_seconds=7200.0))[-1] == saving_timer(7210.0)
    machine = running_machine("a", "b", at=1.0)
    handle_all(machine, draining("b", 10.0, deadline=131.0))
    assert handle_all(machine, stop_command(10.0, save_seconds=7200.0))[-1] == saving_timer(100.0)


def test_stop_when_the_time_to_save_is_over():
    """It is reported who did not save, and the workers get their signal."""
    machine = running_machine("a", "b", at=1.0)
    handle_all(machine, stop_command(10.0, save_seconds=5.0), checkpointed("a", 11.0))
    assert handle_all(machine, tick(15.0)) == [
        ReportUnsaved(attempt=1, why="b did not save in time"),
        stop(1, "a", "b", grace=30.0, why=WHY_STOP),
        stopping_timer(55.0),
    ]
    assert handle_all(machine, stopped("a", 13.0), stopped("b", 13.0)) == [STOPPED]


def test_stop_of_a_script_that_never_saves():
    """It gets the signal at once."""
    machine = running_machine("a", at=1.0)
    actions = handle_all(machine, stop_command(10.0), checkpointed("a", 11.0, step=None))
    assert actions[-2] == stop(1, "a", grace=30.0, why=WHY_STOP)
    assert handle_all(machine, stopped("a", 13.0)) == [STOPPED]


@pytest.mark.parametrize(("now", "grace"), [(False, 30.0), (True, 0.0)])
def test_stop_without_saving(now, grace):
    """The workers get SIGTERM at once, or SIGKILL."""
    machine = running_machine("a", at=1.0)
    actions = handle_all(machine, stop_command(10.0, save_seconds=0.0, now=now))
    assert actions[0] == stop(1, "a", grace=grace, why=WHY_STOP)
    assert handle_all(machine, stopped("a", 11.0)) == [STOPPED]


@pytest.mark.parametrize("phase", Phase)
def test_stop_in_each_phase(phase):
    """The run ends with exit code 143, unless it is over already, and no attempt follows."""
    machine = machine_in(phase)
    actions = handle_all(machine, stop_command(10.0))
    actions += handle_all(machine, *(checkpointed(node, 11.0) for node in "ab"))
    actions += handle_all(machine, *(stopped(node, 12.0) for node in "ab"))
    assert machine.phase is Phase.DONE
    assert [action for action in actions if isinstance(action, Launch)] == []
    assert [action for action in actions if isinstance(action, Finish)] == [STOPPED] * (phase is not Phase.DONE)


def test_stop_twice():
    """The second one changes nothing, unless it gives less time to save."""
    machine = running_machine("a", at=1.0)
    handle_all(machine, stop_command(10.0))
    assert handle_all(machine, stop_command(11.0)) == []
    assert handle_all(machine, stop_command(11.0, save_seconds=4.0)) == [saving_timer(15.0)]
    handle_all(machine, checkpointed("a", 12.0))
    assert handle_all(machine, stop_command(13.0), stop_command(13.0, save_seconds=0.0)) == []
    assert handle_all(machine, stopped("a", 14.0)) == [STOPPED]


def test_stop_now_after_stop():
    """In SAVING the workers are killed; in STOPPING the run does not wait for them any more."""
    machine = running_machine("a", at=1.0)
    handle_all(machine, stop_command(10.0))
    now = stop_command(11.0, save_seconds=0.0, now=True)
    assert handle_all(machine, now)[0] == stop(1, "a", grace=0.0, why=WHY_STOP)
    assert handle_all(machine, now) == [stop(1, "a", grace=0.0, why=f"{WHY_STOP} now"), STOPPED]


def test_a_signal_while_a_stop_saves():
    """The driver's signal goes to the workers at once, as it does without a request; it determines the exit code."""
    machine = running_machine("a", at=1.0)
    handle_all(machine, stop_command(10.0))
    actions = handle_all(machine, stop_requested("SIGINT", 11.0))
    assert actions[0] == stop(1, "a", grace=30.0, why="SIGINT received", signal="SIGINT")
    assert handle_all(machine, stopped("a", 12.0)) == [Finish(exit_code=130, why="stopped by SIGINT")]


@pytest.mark.parametrize(
    "event", [lost("a", 11.0), failed("a", 11.0), hung("a", 11.0), failed("b", 11.0, **raised("ValueError", "nan"))]
)
def test_what_fails_while_a_stop_saves(event):
    """The workers that are left are killed, the run ends as requested, and no restart is spent."""
    machine = running_machine("a", "b", at=1.0, max_restarts=1)
    actions = handle_all(machine, stop_command(10.0), event)
    assert [action.grace for action in actions if isinstance(action, Stop)] == [0.0]
    assert handle_all(machine, *(stopped(node, 12.0) for node in "ab")) == [STOPPED]
    assert machine.restarts == 0


def test_nodes_that_cannot_reach_each_other_while_a_stop_saves():
    """It matters no more."""
    machine = running_machine("a", "b", at=1.0)
    handle_all(machine, stop_command(10.0))
    peers = (UnreachablePeer(node="a", peer="b", why="timed out"),)
    assert handle_all(machine, PeersUnreachable(at=11.0, attempt=1, peers=peers)) == []


def test_workers_that_finish_while_a_stop_saves():
    """The run has succeeded."""
    machine = running_machine("a", at=1.0)
    assert handle_all(machine, stop_command(10.0), finished("a", 11.0))[-1] == Finish(
        exit_code=0, why="all 2 workers finished"
    )


def test_workers_that_finish_while_a_stop_waits_for_others_without_should_checkpoint():
    """A person who requests a stop does not wait for workers that may finish."""
    machine = running_machine("a", "b", at=1.0)
    actions = handle_all(machine, stop_command(10.0), finished("a", 11.0), checkpointed("b", 11.0, step=None))
    assert [action.grace for action in actions if isinstance(action, Stop)] == [30.0]


# Restart.


def test_restart_saves_first_and_spends_nothing():
    """Another attempt on the same nodes; the budget of restarts stays as it is."""
    machine = running_machine("a", "b", at=1.0, max_restarts=0)
    assert handle_all(machine, restart_requested(10.0)) == [
        request_checkpoint(1, "a", "b", why=WHY_RESTART),
        saving_timer(610.0),
    ]
    handle_all(machine, checkpointed("a", 11.0), checkpointed("b", 11.0))
    actions = handle_all(machine, stopped("a", 12.0), stopped("b", 12.0))
    assert actions[0] == launch(2, "a", "b", why=WHY_RESTART)
    assert machine.restarts == 0


def test_restart_without_saving():
    """The workers may hang: they are killed, and the next attempt starts at once. In SAVING too."""
    machine = running_machine("a", at=1.0)
    now = restart_requested(10.0, save_seconds=0.0)
    assert handle_all(machine, now)[:2] == [stop(1, "a", grace=0.0, why=WHY_RESTART), launch(2, "a", why=WHY_RESTART)]
    start_all_workers(machine, 11.0)
    handle_all(machine, restart_requested(12.0))
    assert handle_all(machine, now)[0] == stop(2, "a", grace=0.0, why=WHY_RESTART)
    assert handle_all(machine, stopped("a", 13.0, attempt=2))[0] == launch(3, "a", why=WHY_RESTART)


def test_restart_while_a_rank_hangs():
    """The hang is found while the others save. It ends the attempt, and spends no restart: one follows anyway."""
    machine = running_machine("a", "b", at=1.0, max_restarts=0)
    handle_all(machine, restart_requested(10.0), checkpointed("a", 11.0), hung("b", 20.0))
    assert handle_all(machine, stopped("a", 21.0), stopped("b", 21.0))[0].attempt == 2
    assert machine.restarts == 0


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RUNNING, Phase.SAVING, Phase.STOPPING])
def test_restart_in_each_phase(phase):
    """Exactly one attempt follows, however often it is requested."""
    machine = machine_in(phase)
    assert machine.refusal(restart_requested(10.0)) == ""
    actions = handle_all(machine, restart_requested(10.0), restart_requested(10.0))
    actions += handle_all(machine, *(checkpointed(node, 11.0) for node in "ab"))
    actions += handle_all(machine, *(stopped(node, 12.0) for node in "ab"))
    assert [action.attempt for action in actions if isinstance(action, Launch)] == [2]


def test_restart_of_a_run_that_waits_for_nodes_is_refused():
    machine = machine_in(Phase.GATHERING)
    assert machine.refusal(restart_requested(1.0)) == "no workers run that could be restarted: waiting for nodes"
    assert handle_all(machine, restart_requested(1.0)) == []


def test_restart_ends_the_pause_of_a_crash_loop():
    """Whoever has mended the script need not wait. In STOPPING, no pause follows."""
    machine = running_machine("a", at=1.0, max_restarts=9, exclude_after=0)
    for attempt in (1, 2, 3):
        handle_all(machine, failed("a", 2.0, attempt=attempt, **raised("ValueError", line=attempt)))
        if attempt < 3:
            handle_all(machine, started("a", 2.0, attempt=attempt + 1))
    handle_all(machine, stopped("a", 2.0, attempt=3))
    assert machine.phase is Phase.GATHERING
    assert machine.refusal(restart_requested(2.1)) == ""
    assert handle_all(machine, restart_requested(2.1))[0] == launch(4, "a", why=f"1 of 1 nodes; {WHY_RESTART}")
    handle_all(machine, started("a", 2.2, attempt=4), failed("a", 2.3, attempt=4, **raised("ValueError", line=4)))
    assert machine.phase is Phase.STOPPING
    handle_all(machine, restart_requested(2.4))
    assert isinstance(handle_all(machine, stopped("a", 2.5, attempt=4))[0], Launch)


def test_restart_is_refused_at_the_end():
    """When workers have finished, when the run is being stopped, and when it is over."""
    machine = running_machine("a", "b", at=1.0)
    handle_all(machine, finished("a", 2.0))
    assert machine.refusal(restart_requested(3.0)) == "workers have finished, and the others are about to"
    assert handle_all(machine, restart_requested(3.0), resize_requested(1, 1, 3.0)) == []
    handle_all(machine, stop_command(4.0))
    assert machine.refusal(restart_requested(5.0)) == f"the run is ending: {WHY_STOP}"
    handle_all(machine, checkpointed("b", 6.0), stopped("a", 6.0), stopped("b", 6.0))
    assert machine.refusal(restart_requested(7.0)) == f"the run has ended: stopped by {BY}"
    assert machine.refusal(stop_command(7.0)) == f"the run has ended: stopped by {BY}"


# Resize.


def scaled(*actions: object) -> list[int]:
    return [action.nodes for action in actions if isinstance(action, Scale)]


def test_fewer_nodes():
    """All save, and those that joined last are released when the next attempt has started on the others."""
    machine = running_machine("a", "b", "c", at=1.0)
    why = f"{BY} requested 2 nodes"
    assert handle_all(machine, resize_requested(2, 2, 10.0)) == [
        Scale(nodes=2, why=why),
        request_checkpoint(1, "a", "b", "c", why=why),
        saving_timer(610.0),
    ]
    handle_all(machine, *(checkpointed(node, 11.0) for node in "abc"))
    actions = handle_all(machine, *(stopped(node, 12.0) for node in "abc"))
    assert actions[:2] == [
        launch(2, "a", "b", why=why),
        Release(node="c", why="fewer nodes were requested", frees_memory=True),
    ]
    assert machine.restarts == 0


def test_what_a_node_that_is_given_back_holds_stays_if_the_world_breaks_before_all_have_saved():
    machine = running_machine("a", "b", "c", "d", at=1.0)
    handle_all(machine, resize_requested(2, 2, 10.0), lost("d", 11.0))
    actions = handle_all(machine, *(stopped(node, 12.0) for node in "abc"))
    assert Release(node="c", why="fewer nodes were requested") in actions


def test_what_a_node_that_is_given_back_holds_stays_if_that_is_requested_after_all_were_asked_to_save():
    machine = running_machine("a", "b", "c", at=1.0)
    handle_all(machine, restart_requested(9.0), resize_requested(2, 2, 10.0))
    assert machine.leaving == {"c"}
    handle_all(machine, *(checkpointed(node, 11.0) for node in "abc"))
    actions = handle_all(machine, *(stopped(node, 12.0) for node in "abc"))
    assert Release(node="c", why="fewer nodes were requested") in actions


def test_fewer_nodes_with_spare_ones():
    """As many spare nodes stay as the job has."""
    machine = running_machine("a", "b", "c", at=1.0, spares=1, nnodes="1:3")
    assert scaled(*handle_all(machine, resize_requested(1, 1, 10.0))) == [2]
    handle_all(machine, *(checkpointed(node, 11.0) for node in "abc"))
    actions = handle_all(machine, *(stopped(node, 12.0) for node in "abc"))
    assert [action.node for action in actions if isinstance(action, Release)] == ["c"]
    assert set(machine.nodes) == {"a", "b"}


def test_a_lower_limit_that_no_worker_notices():
    """Fewer nodes at most than before, but not fewer than run: idle ones are released, and the workers go on."""
    machine = running_machine("a", "b", at=1.0, nnodes="1:4", last_call=5.0)
    handle_all(machine, joined("c", 10.0))
    actions = handle_all(machine, resize_requested(1, 2, 11.0))
    assert (scaled(*actions), actions[1]) == (
        [2],
        Release(node="c", why="fewer nodes were requested", frees_memory=True),
    )
    assert machine.phase is Phase.RUNNING


def test_more_nodes():
    """More are requested of the cluster. The run goes on until they are there, and then all save once."""
    machine = running_machine("a", "b", at=1.0)
    assert handle_all(machine, resize_requested(4, 4, 10.0)) == [Scale(nodes=4, why=f"{BY} requested 4 nodes")]
    assert handle_all(machine, joined("c", 20.0)) == []
    actions = handle_all(machine, joined("d", 30.0))
    assert actions[0] == request_checkpoint(1, "a", "b", why="d joined")
    assert (machine.job.min_nodes, machine.job.max_nodes) == (4, 4)


def test_more_nodes_than_ever_come():
    """MIN holds only when so many nodes have been there: a restart before needs no more nodes than before."""
    machine = running_machine("a", "b", at=1.0, max_restarts=1)
    handle_all(machine, resize_requested(40, 50, 10.0), failed("a", 11.0))
    assert (machine.phase, machine.roster) == (Phase.STARTING, ("a", "b"))
    assert machine.job.min_nodes == 2


def test_more_nodes_that_are_ready_already():
    """A spare node takes part at once."""
    machine = running_machine("a", "b", at=1.0, spares=1)
    handle_all(machine, joined("c", 5.0))
    actions = handle_all(machine, resize_requested(2, 3, 10.0))
    assert actions[1] == request_checkpoint(1, "a", "b", why=f"{BY} requested 2 to 3 nodes")


def test_resize_while_nodes_are_waited_for():
    """With fewer nodes it starts at once."""
    machine = gathering_machine(job("2:4"))
    handle_all(machine, joined("a", 1.0))
    actions = handle_all(machine, resize_requested(1, 1, 2.0))
    assert (scaled(*actions), actions[1].roster) == ([1], ("a",))


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RUNNING, Phase.SAVING, Phase.STOPPING])
def test_resize_in_each_phase(phase):
    """The next attempt has the number of nodes that was requested, and there is exactly one."""
    machine = machine_in(phase)
    actions = handle_all(machine, resize_requested(1, 1, 10.0))
    actions += handle_all(machine, *(checkpointed(node, 11.0) for node in "ab"))
    actions += handle_all(machine, *(stopped(node, 12.0) for node in "ab"))
    assert [action.roster for action in actions if isinstance(action, Launch)] == [("a",)]


@pytest.mark.parametrize(
    ("settings", "low", "high", "why"),
    [
        ({}, 3, 2, "3:2 is no range of nodes: the least is 1, and MIN is at most MAX"),
        ({}, 0, 2, "0:2 is no range of nodes: the least is 1, and MIN is at most MAX"),
        ({"nprocs": 4}, 1, 2, "the job asks for a number of workers (`nprocs`), not of nodes"),
        ({"multiple_of": 4}, 1, 1, "no 1 to 1 of the 2 nodes have a number of workers that is a multiple of 4"),
    ],
)
def test_a_size_that_is_refused(settings, low, high, why):
    machine = running_machine("a", "b", at=1.0, **settings)
    event = resize_requested(low, high, 2.0)
    assert machine.refusal(event) == why
    assert handle_all(machine, event) == []


def test_a_run_of_one_node_with_its_own_master_addr_cannot_grow():
    """Where its workers were told to meet there may be no way for another node."""
    machine = running_machine("a", at=1.0, master_addr="localhost")
    assert "it was started for one node" in machine.refusal(resize_requested(1, 2, 2.0))
    assert machine.refusal(resize_requested(1, 1, 2.0)) == ""


# Drain.


def test_drain():
    """All save, another attempt starts without the node, and its host is not used again."""
    machine = running_machine("a", "b", at=1.0, nnodes="1:2")
    actions = handle_all(machine, drain_requested("b", 10.0))
    assert actions == [
        Cordon(host="host-of-b", why="no node is used on the host of b (10.0.0.98) any more"),
        request_checkpoint(1, "a", "b", why=f"b is being drained: {BY} requested it"),
        saving_timer(610.0),
    ]
    handle_all(machine, checkpointed("a", 11.0), checkpointed("b", 11.0))
    actions = handle_all(machine, stopped("a", 12.0), stopped("b", 12.0))
    assert actions[1] == Release(node="b", why="it is being drained", frees_memory=True)
    assert handle_all(machine, joined("z", 13.0, host="host-of-b")) == [Release(node="z", why="its host is drained")]


def test_drain_of_the_only_node():
    """The workers go on until another node comes, however long that takes."""
    machine = running_machine("a", "b", at=1.0)
    handle_all(machine, drain_requested("b", 10.0), tick(1e6))
    assert machine.status.endswith("the workers go on until another node comes")
    assert machine.refusal(restart_requested(1e6)) == f"the nodes are too few for another attempt: {machine.status}"
    actions = handle_all(machine, joined("c", 2e6))
    assert actions[0] == request_checkpoint(1, "a", "b", why="c joined")


def test_fewer_nodes_while_too_few_are_left():
    """A drained node is needed until another comes, so fewer nodes take part only then."""
    machine = running_machine("a", "b", "c", at=1.0)
    handle_all(machine, drain_requested("b", 10.0), drain_requested("c", 10.0))
    assert scaled(*handle_all(machine, resize_requested(2, 2, 11.0))) == [2]
    assert machine.phase is Phase.RUNNING
    assert handle_all(machine, joined("d", 12.0))[0].why == "d joined"


def test_a_drained_host_stays_out_when_its_exclusion_ends():
    """It failed before and was left out for a while; then a person drained it."""
    machine = running_machine("a", "b", "c", at=1.0, nnodes="1:3", exclude_after=1, max_restarts=9)
    handle_all(machine, failed("b", 100.0))
    assert "host-of-b" in machine.run.health.excluded
    machine.run.health.drained.add("host-of-b")
    uncordoned = handle_all(machine, tick(1e5))
    assert [action for action in uncordoned if isinstance(action, Uncordon)] == []


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.RUNNING, Phase.SAVING, Phase.STOPPING])
def test_drain_in_each_phase(phase):
    """The next attempt runs without the node. A second request changes nothing."""
    machine = machine_in(phase)
    assert machine.refusal(drain_requested("b", 10.0)) == ""
    begin = [started(node, 10.0) for node in "ab"] if phase is Phase.STARTING else []
    actions = handle_all(machine, drain_requested("b", 10.0), drain_requested("b", 10.0), *begin, tick(10.5))
    actions += handle_all(machine, *(checkpointed(node, 11.0) for node in "ab"))
    actions += handle_all(machine, *(stopped(node, 12.0) for node in "ab"))
    assert [action.roster for action in actions if isinstance(action, Launch)] == [("a",)]
    assert len([action for action in actions if isinstance(action, Cordon)]) == 1


def test_drain_of_a_node_that_is_gone_is_refused():
    machine = running_machine("a", "b", at=1.0)
    assert machine.refusal(drain_requested("z", 2.0)) == "there is no z any more"
