"""Simulated clusters in which hosts die, return, drain, fail and hang: every run ends as it should.

`simulation` fails at forbidden actions: two attempts at once, a grace cut short, rosters with too many nodes or with
drained, lost or excluded ones, restarts beyond the budget or for lost nodes, and waiting for nothing.
"""

from __future__ import annotations

from hypothesis import assume, example, given
from hypothesis import strategies as st
from machine_helpers import job, state_fields, stop_requested
from simulation import ClusterSimulation

from raylaunch.core.machine.events_and_actions import Finish
from raylaunch.core.machine.transitions import STOP_MARGIN
from raylaunch.errors import ExitCode
from tests.profiles import examples

FAULTS = (
    "host_dies",
    "host_unreachable",
    "rack_fails",
    "host_drained",
    "agent_dies",
    "script_crashes",
    "workers_hang",
    "progress_reported",
    "signal_forwarded",
)

kinds_of_jobs = st.fixed_dictionaries(
    {
        "last_call": st.sampled_from((5.0, 0.0, 30.0)),
        "multiple_of": st.sampled_from((1, 8)),
        "spares": st.sampled_from((0, 2)),
        "exclude_after": st.sampled_from((3, 1, 0)),
        "shutdown_timeout": st.sampled_from((30.0, 5.0, 0.0)),
    }
)


def run_with_faults(
    cluster: ClusterSimulation,
    *,
    until: float,
    every: float,
    at_most: int = 50_000,
    kinds: tuple[str, ...] = FAULTS,
) -> ClusterSimulation:
    """Run with faults until that time; all hosts return a while later."""
    cluster.schedule_faults(until=until, every=every, kinds=kinds)
    cluster.run(at_most=at_most)
    return cluster


def assert_finished(cluster: ClusterSimulation) -> None:
    """Assert exit code 0, and that only failures which no lost node explains spent restarts."""
    assert cluster.finish is not None, (
        f"waits in {cluster.machine.phase} for {state_fields(cluster.machine)['awaited']}"
    )
    assert (cluster.finish.exit_code, cluster.machine.restarts <= cluster.own_failures) == (0, True)


@examples(40)
@given(st.integers(0, 10**6), kinds_of_jobs, st.sampled_from(((2,), (2, 3, 4))), st.sampled_from((1.0, 4.0, 25.0)))
def test_ten_hosts_with_faults(seed, settings, sizes, every):
    """A run on ten hosts finishes after two minutes of faults, rare or more frequent than it can start.

    Of six nodes with 2, 3 or 4 workers, it may be that none together have a multiple of 8: that run ends, and says so.
    """
    assume(len(sizes) == 1 or settings.get("multiple_of", 1) < 8)
    a_job = job("2:6", max_restarts=1000, **settings)
    assert_finished(
        run_with_faults(
            ClusterSimulation(a_job, hosts=10, seed=seed, silent=0.05, sizes=sizes), until=120.0, every=every
        )
    )


@examples(20)
@given(st.integers(0, 10**6), kinds_of_jobs, st.sampled_from((0.0, 0.3, 3.0)))
def test_late_and_duplicate_reports(seed, settings, late):
    """The same, with reports that come late or twice."""
    a_job = job("2:6", max_restarts=1000, **settings)
    cluster = ClusterSimulation(a_job, hosts=10, seed=seed, silent=0.05, late=late, twice=0.3)
    assert_finished(run_with_faults(cluster, until=120.0, every=3.0))


@examples(20)
@given(st.integers(0, 10**6), kinds_of_jobs)
def test_largest_world_after_the_faults(seed, settings):
    """The last attempt includes all usable nodes that joined early enough for the last call."""
    a_job = job("2:6", max_restarts=1000, **settings)
    cluster = run_with_faults(ClusterSimulation(a_job, hosts=10, seed=seed), until=120.0, every=4.0)
    assert_finished(cluster)
    assert cluster.machine.world.size >= cluster.largest_world(cluster.now - a_job.last_call - 1.0)


@examples(30)
@example(162667, 51.0, {"last_call": 0.0}, 1)
@given(st.integers(0, 10**6), st.floats(1.0, 120.0), kinds_of_jobs, st.integers(1, 2))
def test_stop_request_ends_the_run(seed, at, settings, times):
    """In any state a stop request ends the run within the grace and a margin; a second request ends it at once.

    Unless the run has finished before the request, as in the example.
    """
    a_job = job("2:6", max_restarts=1000, **settings)
    cluster = ClusterSimulation(a_job, hosts=10, seed=seed, silent=0.2)
    for _ in range(times):
        cluster.schedule_event(stop_requested("SIGTERM", at))
    run_with_faults(cluster, until=120.0, every=3.0)
    assert cluster.finish.exit_code == (143 if cluster.now >= at else ExitCode.OK)
    assert cluster.machine.handle(stop_requested("SIGINT", 1e6)) == []
    assert cluster.now <= at + (a_job.shutdown_timeout + STOP_MARGIN if times == 1 else 0.0)


@examples(20)
@given(st.integers(0, 10**6), kinds_of_jobs)
def test_fixed_size_job_with_faults(seed, settings):
    """A job of fixed size finishes, though each lost node must be replaced first."""
    a_job = job(8, max_restarts=1000, **settings)
    assert_finished(run_with_faults(ClusterSimulation(a_job, hosts=9, seed=seed, sizes=(4,)), until=120.0, every=10.0))


@examples(20)
@given(st.integers(0, 10**6), st.integers(0, 3))
def test_run_with_few_restarts(seed, restarts):
    """A run with few restarts finishes, or ends with exit code 1 after more failures of its own than restarts."""
    a_job = job("2:6", max_restarts=restarts)
    cluster = run_with_faults(ClusterSimulation(a_job, hosts=10, seed=seed), until=120.0, every=4.0)
    assert cluster.finish is not None
    assert cluster.finish.exit_code in (0, 1)
    assert cluster.finish.exit_code == 0 or cluster.own_failures > restarts


@examples(40)
@given(st.integers(0, 10**6), kinds_of_jobs, st.sampled_from((1.0, 4.0, 25.0)))
def test_workers_that_stay(seed, settings, every):
    """Only those that have said so stay, and they never run without something to restore. The run finishes."""
    a_job = job("2:6", max_restarts=1000, **settings)
    cluster = ClusterSimulation(a_job, hosts=10, seed=seed, silent=0.05, late=0.1, twice=0.3, elastic=0.7)
    assert_finished(run_with_faults(cluster, until=120.0, every=every))


@examples(40)
@given(st.integers(0, 10**6), kinds_of_jobs, st.sampled_from((1.0, 4.0, 25.0)), st.sampled_from((0.0, 0.7)))
def test_drivers_that_die(seed, settings, every, elastic):
    """At any moment, also before they have told all nodes of an attempt: `driver_dies` says what follows."""
    a_job = job("2:6", max_restarts=1000, **settings)
    cluster = ClusterSimulation(a_job, hosts=10, seed=seed, silent=0.05, late=0.1, elastic=elastic, dying=0.3)
    kinds = (*FAULTS, *["driver_dies"] * len(FAULTS))
    assert_finished(run_with_faults(cluster, until=120.0, every=every, kinds=kinds))


@examples(20)
@given(st.integers(0, 10**6))
def test_lost_nodes_spend_no_restart(seed):
    """A run without restarts survives dead, unreachable and drained hosts, even if workers there died first."""
    cluster = ClusterSimulation(job("2:6", exclude_after=0), hosts=10, seed=seed)
    cluster.schedule_faults(
        until=120.0, every=3.0, kinds=("host_dies", "host_unreachable", "rack_fails", "host_drained")
    )
    cluster.run(at_most=50_000)
    assert_finished(cluster)


def test_two_thousand_nodes_with_faults():
    """2,000 nodes of two sizes on 2,050 hosts."""
    a_job = job("1500:2000", max_restarts=1000, multiple_of=8, spares=20, exclude_after=1)
    cluster = ClusterSimulation(a_job, hosts=2050, seed=1, sizes=(2, 4))
    assert_finished(run_with_faults(cluster, until=20.0, every=4.0, at_most=100_000))


def test_ten_thousand_nodes_without_faults():
    """All nodes join, start and finish in one attempt."""
    cluster = ClusterSimulation(job(10_000), hosts=10_000, seed=1)
    cluster.run(at_most=100_000)
    assert cluster.finish == Finish(exit_code=0, why="all 20000 workers finished")
    assert cluster.machine.attempt == 1
