"""Whole clusters in which hosts go, come, drain, fail and hang: nothing forbidden is ordered, and the run ends well.

What is forbidden is in `simulated`: two attempts at once, a grace cut short, rosters with nodes that are drained, lost,
left out or too many, restarts beyond the budget or for lost nodes, and waiting for nothing.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Cluster
from story import asked, job

from raylaunch.core.actions import Finish
from raylaunch.core.phases import STOP_MARGIN

FIXED = settings(derandomize=True, deadline=None, database=None)
FAULTS = ("kill", "cut", "rack", "drain", "agent", "crash", "hang", "progress", "signal")

kinds_of_jobs = st.fixed_dictionaries(
    {
        "last_call": st.sampled_from((5.0, 0.0, 30.0)),
        "multiple_of": st.sampled_from((1, 8)),
        "spares": st.sampled_from((0, 2)),
        "exclude_after": st.sampled_from((3, 1, 0)),
        "shutdown_timeout": st.sampled_from((30.0, 5.0, 0.0)),
    }
)


def lived(cluster: Cluster, *, until: float, every: float, at_most: int = 50_000) -> Cluster:
    """Faults until then; all hosts are back a while later."""
    cluster.suffer(until=until, every=every, kinds=FAULTS)
    cluster.live(at_most=at_most)
    return cluster


def is_well(cluster: Cluster) -> None:
    """The work was done in the end, and only failures that no lost node explains took a restart."""
    assert cluster.finish is not None, f"waits in {cluster.machine.phase} for {cluster.machine.awaited}"
    assert (cluster.finish.exit_code, cluster.machine.restarts <= cluster.own_failures) == (0, True)


@settings(FIXED, max_examples=40)
@given(st.integers(0, 10**6), kinds_of_jobs, st.sampled_from(((2,), (2, 3, 4))), st.sampled_from((1.0, 4.0, 25.0)))
def test_a_cluster_of_ten_hosts_gets_its_work_done(seed, settings, sizes, every):
    """Whatever happens for two minutes, more often than the run can start or seldom."""
    of = job("2:6", max_restarts=1000, **settings)
    is_well(lived(Cluster(of, hosts=10, seed=seed, silent=0.05, sizes=sizes), until=120.0, every=every))


@settings(FIXED, max_examples=20)
@given(st.integers(0, 10**6), kinds_of_jobs, st.sampled_from((0.0, 0.3, 3.0)))
def test_late_words_and_words_said_twice_do_no_harm(seed, settings, late):
    """The same, where what nodes say comes when it is true no more."""
    of = job("2:6", max_restarts=1000, **settings)
    cluster = Cluster(of, hosts=10, seed=seed, silent=0.05, late=late, twice=0.3)
    is_well(lived(cluster, until=120.0, every=3.0))


@settings(FIXED, max_examples=20)
@given(st.integers(0, 10**6), kinds_of_jobs)
def test_when_all_is_quiet_the_world_is_the_best_there_is(seed, settings):
    """Whatever was before: whoever is there before the workers finish, for long enough to be taken in, is."""
    of = job("2:6", max_restarts=1000, **settings)
    cluster = lived(Cluster(of, hosts=10, seed=seed), until=120.0, every=4.0)
    is_well(cluster)
    assert cluster.machine.workers >= cluster.best(cluster.now - of.last_call - 1.0)


@settings(FIXED, max_examples=30)
@given(st.integers(0, 10**6), st.floats(1.0, 120.0), kinds_of_jobs, st.integers(1, 2))
def test_a_person_who_wants_the_end_gets_it(seed, at, settings, times):
    """In any state: within the grace and a margin, or at once where it is said twice."""
    of = job("2:6", max_restarts=1000, **settings)
    cluster = Cluster(of, hosts=10, seed=seed, silent=0.2)
    for _ in range(times):
        cluster.expect(asked("SIGTERM", at))
    lived(cluster, until=120.0, every=3.0)
    assert (cluster.finish.exit_code, cluster.machine.handle(asked("SIGINT", 1e6))) == (143, [])
    assert cluster.now <= at + (of.shutdown_timeout + STOP_MARGIN if times == 1 else 0.0)


@settings(FIXED, max_examples=20)
@given(st.integers(0, 10**6), kinds_of_jobs)
def test_a_job_that_needs_all_its_nodes_gets_its_work_done(seed, settings):
    """A fixed size: nothing runs without a replacement."""
    of = job(8, max_restarts=1000, **settings)
    is_well(lived(Cluster(of, hosts=9, seed=seed, sizes=(4,)), until=120.0, every=10.0))


@settings(FIXED, max_examples=20)
@given(st.integers(0, 10**6), st.integers(0, 3))
def test_few_restarts_end_a_run_that_fails_by_itself(seed, restarts):
    """Its end is said, and is one of the known."""
    of = job("2:6", max_restarts=restarts)
    cluster = lived(Cluster(of, hosts=10, seed=seed), until=120.0, every=4.0)
    assert cluster.finish is not None
    assert cluster.finish.exit_code in (0, 1)
    assert cluster.finish.exit_code == 0 or cluster.own_failures > restarts


@settings(FIXED, max_examples=20)
@given(st.integers(0, 10**6))
def test_nodes_that_go_cost_no_restart(seed):
    """Without a single restart allowed, a run survives kills, cuts, racks and drains, whatever died there first."""
    cluster = Cluster(job("2:6", exclude_after=0), hosts=10, seed=seed)
    cluster.suffer(until=120.0, every=3.0, kinds=("kill", "cut", "rack", "drain"))
    cluster.live(at_most=50_000)
    is_well(cluster)


def test_thousands_of_nodes():
    """The same with 2,000 nodes of two sizes, on hardly more hosts."""
    of = job("1500:2000", max_restarts=1000, multiple_of=8, spares=20, exclude_after=1)
    cluster = Cluster(of, hosts=2050, seed=1, sizes=(2, 4))
    is_well(lived(cluster, until=20.0, every=4.0, at_most=100_000))


def test_ten_thousand_nodes_and_no_fault():
    """All come, start and finish, in one attempt."""
    cluster = Cluster(job(10_000), hosts=10_000, seed=1)
    cluster.live(at_most=100_000)
    assert cluster.finish == Finish(exit_code=0, why="all 20000 workers finished")
    assert cluster.machine.attempt == 1
