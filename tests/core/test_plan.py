"""Who would run where, and why the other nodes would not do."""

from __future__ import annotations

import pytest
from story import job

from raylaunch.core.job import NodeRule
from raylaunch.core.layout import NodeFacts
from raylaunch.core.plan import Plan, Seat, Skipped, Spare, make_plan, settled


def node(
    last: int, *, cpus: float = 8, gpus: float = 0, busy_cpus: float = 0, busy_gpus: float = 0, **labels: str
) -> NodeFacts:
    """10.0.0.<last>, with so much of everything, some of it busy."""
    return NodeFacts(
        node_id=f"id-{last}",
        address=f"10.0.0.{last}",
        cpus=cpus,
        gpus=gpus,
        free_cpus=cpus - busy_cpus,
        free_gpus=gpus - busy_gpus,
        labels=labels,
    )


def plan(*nodes: NodeFacts, local: bool = False, **settings: object) -> Plan:
    return make_plan(job(**settings), nodes, local=local)


def seated(found: Plan) -> list[str]:
    return [seat.node_id for seat in found.seats]


def workers(found: Plan) -> dict[str, tuple[int, ...]]:
    """Ranks by node."""
    return {seat.node_id: seat.ranks for seat in found.seats}


def bundles(found: Plan) -> list[tuple[int, tuple[str, ...]]]:
    """Workers and nodes to avoid, in the order they are asked for."""
    return [(bundle.nproc, bundle.avoid) for bundle in found.bundles]


# Who runs where.


def test_a_cluster_is_spread():
    """Each agent on a node of its own, in the natural order of addresses, ranks counted through."""
    found = plan(node(10), node(9), nproc_per_node=2)
    assert found.seats == (
        Seat(node_id="id-9", address="10.0.0.9", node_rank=0, ranks=(0, 1)),
        Seat(node_id="id-10", address="10.0.0.10", node_rank=1, ranks=(2, 3)),
    )
    assert found.feasible
    assert "placement: spread (a cluster)" in found.assumed


def test_one_machine_is_packed():
    """On a Ray that was started for the job, agents share the machine."""
    found = plan(node(1), local=True, nproc_per_node=2)
    assert seated(found) == ["id-1", "id-1"]
    assert found.skipped == ()
    assert "placement: pack (one machine)" in found.assumed


@pytest.mark.parametrize(
    ("placement", "local", "expected"), [("pack", False, ["id-1", "id-1"]), ("spread", True, ["id-1"])]
)
def test_the_word_of_the_job_wins(placement, local, expected):
    """And nothing is assumed then."""
    found = plan(node(1), local=local, placement=placement)
    assert seated(found) == expected
    assert not any("placement" in line for line in found.assumed)


def test_packing_fills_one_node_after_the_other():
    """The first takes as many as fit."""
    found = plan(node(1, cpus=5), node(2), nnodes=3, nproc_per_node=2, placement="pack")
    assert seated(found) == ["id-1", "id-1", "id-2"]
    assert found.skipped == ()


def test_packed_nodes_that_are_full_say_so():
    """Where more is wanted than fits."""
    found = plan(node(1, cpus=5), nnodes=3, nproc_per_node=2, placement="pack")
    assert seated(found) == ["id-1", "id-1"]
    assert found.shortage == ("asked: 3 x 2 workers (2 CPUs)\nfits now: 2 of 3\n10.0.0.1: 1 of 5 CPUs free, 2 needed")


def test_an_elastic_job_takes_what_there_is():
    """From MIN on it can start; MAX is what it takes."""
    found = plan(node(1), node(2), node(3), nnodes="1:2")
    assert (found.min_nodes, found.max_nodes) == (1, 2)
    assert seated(found) == ["id-1", "id-2"]
    assert found.skipped == (Skipped(node_id="id-3", address="10.0.0.3", why="not needed"),)


def test_nothing_needed_fits_anywhere():
    """Workers that reserve neither GPU nor CPU are no load."""
    found = plan(node(1, cpus=1, busy_cpus=1), nnodes=5, nproc_per_node=4, cpus_per_worker=0, placement="pack")
    assert seated(found) == ["id-1"] * 5
    assert {tuple(bundle.resources) for bundle in found.bundles} == {()}


# Why not.


def test_a_node_that_is_too_busy_is_skipped():
    """The reason has what is free, what there is, and what was needed."""
    found = plan(node(1, gpus=8, cpus=96), node(2, gpus=8, cpus=96, busy_gpus=5), nproc_per_node=8)
    assert seated(found) == ["id-1"]
    why = "3 of 8 GPUs free, 8 needed, 96 of 96 CPUs free, 8 needed"
    assert found.skipped == (Skipped(node_id="id-2", address="10.0.0.2", why=why),)
    assert not found.feasible


def test_a_shortage_in_words():
    """What was asked, what fits, and each node that does not."""
    found = plan(node(1), node(2, busy_cpus=7.5), nproc_per_node=2, cpus_per_worker=0.5)
    assert found.shortage == (
        "asked: 2 x 2 workers (1 CPU), each on a node of its own\n"
        "fits now: 1 of 2\n"
        "10.0.0.2: 0.5 of 8 CPUs free, 1 needed"
    )


def test_a_cluster_without_nodes():
    """It is said as it is."""
    found = plan(nnodes="1:3", nproc_per_node=1)
    assert not found.feasible
    assert found.shortage == (
        "asked: 1 to 3 x 1 worker (1 CPU), each on a node of its own\nfits now: 0 of 1\nthe cluster has no nodes"
    )


@pytest.mark.parametrize(
    ("settings", "asked", "resources"),
    [
        (
            {"nproc_per_node": 8, "gpus_per_worker": 1},
            "2 x 8 workers (8 GPUs and 8 CPUs), each on a node of its own",
            {"GPU": 8, "CPU": 8},
        ),
        ({"nnodes": 1, "cpus_per_worker": 0, "placement": "pack"}, "1 x 1 worker (no resources)", {}),
    ],
)
def test_the_request_in_words_and_as_bundles(settings, asked, resources):
    """One agent with its workers is one bundle; what is not needed is not in it."""
    found = plan(**settings)
    assert (found.asked, found.bundles[0].resources) == (asked, resources)


# What the job leaves open.


@pytest.mark.parametrize(
    ("word", "nodes", "nproc", "assumed"),
    [
        ("auto", (node(1, gpus=4), node(2, gpus=8)), [4, 8], "nproc_per_node: 4 or 8 (GPUs of each node)"),
        ("auto", (node(1, cpus=6), node(2)), [6, 8], "nproc_per_node: 6 or 8 (CPUs of each node)"),
        ("gpu", (node(1, gpus=2), node(2, gpus=2)), [2, 2], "nproc_per_node: 2 (GPUs of a node)"),
        ("cpu", (node(1, gpus=2), node(2, gpus=2)), [8, 8], "nproc_per_node: 8 (CPUs of a node)"),
        ("auto", (), [1, 1], "nproc_per_node: 1 (CPUs of a node)"),
        ("gpu", (), [1, 1], "nproc_per_node: 1 (GPUs of a node)"),
    ],
)
def test_workers_by_a_word(word, nodes, nproc, assumed):
    """As many as each node has, as torchrun finds them on each."""
    found = plan(*nodes, nproc_per_node=word)
    assert [bundle.nproc for bundle in found.bundles] == nproc
    assert assumed in found.assumed


def test_workers_by_a_word_look_at_the_best_nodes():
    """A third node with fewer GPUs, or with none, is not needed."""
    found = plan(node(4), node(3, gpus=1), node(2, gpus=8), node(1, gpus=8), nproc_per_node="gpu")
    assert workers(found) == {"id-1": tuple(range(8)), "id-2": tuple(range(8, 16))}
    assert {skipped.why for skipped in found.skipped} == {"not needed"}
    assert bundles(found) == [(8, ()), (8, ())]


# Nodes that differ.


def test_ranks_are_counted_through_unequal_nodes():
    """7 + 8 + 8 + 8: each node has its own number, by address."""
    nodes = (node(1, gpus=7), node(2, gpus=8), node(3, gpus=8), node(4, gpus=8))
    found = plan(*nodes, nnodes=4, nproc_per_node="gpu")
    assert [(ranks[0], ranks[-1]) for ranks in workers(found).values()] == [(0, 6), (7, 14), (15, 22), (23, 30)]
    assert found.workers == 31
    assert found.asked == (
        "1 x 7 workers (7 GPUs and 7 CPUs) and 3 x 8 workers (8 GPUs and 8 CPUs), each on a node of its own"
    )


def test_a_small_bundle_keeps_off_larger_nodes():
    """7 workers would fit where 8 are meant to be; 8 fit nowhere else anyway."""
    found = plan(node(1, gpus=7), node(2, gpus=8), nproc_per_node="gpu")
    assert bundles(found) == [(7, ("id-2",)), (8, ())]


def test_a_rule_sets_the_workers_of_a_node():
    """By address or label; the last one counts, and the plan names all that match."""
    rules = {
        "10.0.0.*": NodeRule(nproc_per_node=3),
        "label:zone=b": NodeRule(nproc_per_node=2),
        "10.0.0.2": NodeRule(env={"A": "1"}),
    }
    found = plan(node(1), node(2, zone="b"), nproc_per_node=4, nodes=rules)
    assert workers(found) == {"id-1": (0, 1, 2), "id-2": (3, 4)}
    assert [seat.rules for seat in found.seats] == [("10.0.0.*",), ("10.0.0.*", "label:zone=b", "10.0.0.2")]
    assert bundles(found) == [(3, ("id-2",)), (2, ("id-1",))]


def test_a_rule_can_keep_a_node_out():
    """No workers there: another node is taken, and none of the bundles may land there."""
    found = plan(node(1), node(2), node(3), nodes={"10.0.0.1": NodeRule(nproc_per_node=0)})
    assert seated(found) == ["id-2", "id-3"]
    assert bundles(found) == [(1, ("id-1",)), (1, ("id-1",))]
    found = plan(node(1), nnodes=1, nodes={"10.0.0.1": NodeRule(nproc_per_node=0)})
    assert found.skipped == (Skipped(node_id="id-1", address="10.0.0.1", why="no workers are meant for it"),)


def test_a_rule_for_nobody_is_told():
    """Of a subnet only the nodes can tell; and a cluster without nodes says nothing about rules."""
    rules = {"10.0.0.9": NodeRule(), "label:zone=x": NodeRule(), "10.9.0.0/16": NodeRule(), "10.0.0.1": NodeRule()}
    assert plan(node(1), nodes=rules).warnings == (
        "`nodes`: `10.0.0.9` matches no node of the cluster",
        "`nodes`: `label:zone=x` matches no node of the cluster",
    )
    assert plan(nodes=rules).warnings == ()


def test_busy_nodes_are_waited_for():
    """The gang is what fits best in the end; the ranks are those of the nodes that would do now."""
    found = plan(node(1, gpus=4), node(2, gpus=8, busy_gpus=1), nproc_per_node="gpu")
    assert workers(found) == {"id-1": (0, 1, 2, 3)}
    assert [nproc for nproc, _ in bundles(found)] == [4, 8]
    assert found.skipped[0].why == "7 of 8 GPUs free, 8 needed, 8 of 8 CPUs free, 8 needed"


def test_nodes_with_room_are_taken_before_larger_ones_without():
    """The job starts now, with fewer workers."""
    found = plan(node(1, gpus=8, busy_gpus=8), node(2, gpus=4), nnodes=1, nproc_per_node="gpu")
    assert seated(found) == ["id-2"]
    assert [nproc for nproc, _ in bundles(found)] == [4]


def test_what_no_node_can_ever_hold():
    """It is asked for as it is, and each node says what it lacks."""
    found = plan(node(1), nnodes=1, nproc_per_node="cpu", cpus_per_worker=2)
    assert bundles(found) == [(8, ())]
    assert found.skipped[0].why == "8 of 8 CPUs free, 16 needed"


def test_nodes_to_come_get_the_commonest_number():
    """The gang is the best there is; then the other nodes; who comes later has what most have."""
    nodes = (node(1, cpus=2), node(2, cpus=4), node(3, cpus=4))
    found = plan(*nodes, nnodes="2:5", nproc_per_node="cpu")
    assert bundles(found) == [(4, ()), (4, ()), (2, ("id-2", "id-3")), (4, ()), (4, ())]
    assert found.asked == ("2 to 5 of 4 x 4 workers (4 CPUs) and 1 x 2 workers (2 CPUs), each on a node of its own")


def test_the_gang_is_in_the_order_of_addresses():
    """As the ranks are: agents at one address are told apart by their order alone."""
    nodes = (node(1, cpus=2), node(2, cpus=4), node(3, cpus=3))
    assert [nproc for nproc, _ in bundles(plan(*nodes, nnodes=3, nproc_per_node="cpu"))] == [2, 4, 3]


# Spare nodes.


def test_spare_nodes_come_after_those_that_run():
    """Asked for beside the others, with no ranks; they do not count as nodes of the job."""
    found = plan(node(1), node(2), node(3), node(4), nnodes="1:2", spares=1, nproc_per_node=2)
    assert workers(found) == {"id-1": (0, 1), "id-2": (2, 3)}
    assert found.spares == (Spare(node_id="id-3", address="10.0.0.3"),)
    assert found.skipped == (Skipped(node_id="id-4", address="10.0.0.4", why="not needed"),)
    assert (found.min_nodes, found.max_nodes, len(found.bundles)) == (1, 2, 3)
    assert found.workers == 4
    assert found.asked == "1 to 2 x 2 workers (2 CPUs), each on a node of its own, and 1 spare node"


def test_a_spare_node_that_is_missing_keeps_nobody_waiting():
    """It is asked for, and why a node will not do is shown."""
    found = plan(node(1), node(2), node(3, busy_cpus=7), nnodes=2, spares=2, nproc_per_node=2)
    assert found.feasible
    assert found.spares == ()
    assert len(found.bundles) == 4
    assert found.skipped[0].why == "1 of 8 CPUs free, 2 needed"
    assert found.asked.endswith("and 2 spare nodes")


def test_spare_nodes_share_one_machine_as_others_do():
    """A local Ray has room for them."""
    found = plan(node(1), local=True, nnodes=2, spares=1, nproc_per_node=2)
    assert seated(found) == ["id-1", "id-1"]
    assert found.spares == (Spare(node_id="id-1", address="10.0.0.1"),)


def test_spare_nodes_of_so_many_workers():
    """As large as the largest share, on what the others leave; where the others do not fit, nothing is spare."""
    found = plan(node(1), node(2), node(3), nnodes=2, nprocs=5, spares=1)
    assert workers(found) == {"id-1": (0, 1, 2), "id-2": (3, 4)}
    assert [spare.node_id for spare in found.spares] == ["id-3"]
    assert [nproc for nproc, _ in bundles(found)] == [3, 2, 3]
    assert (found.min_nodes, found.max_nodes) == (2, 2)
    assert plan(node(1, cpus=3), node(2, cpus=1), node(3, cpus=3), nnodes=3, nprocs=6, spares=1).spares == ()


def test_spare_nodes_are_of_the_commonest_kind_where_none_is_known():
    """As nodes to come are."""
    found = plan(node(1, cpus=2), node(2, cpus=4), node(3, cpus=4), nnodes=3, spares=1, nproc_per_node="cpu")
    assert [nproc for nproc, _ in bundles(found)] == [2, 4, 4, 4]
    assert found.max_nodes == 3


# So many workers in all.


def test_so_many_workers_on_as_few_nodes_as_hold_them():
    """As many as fit on each, the roomiest first."""
    found = plan(node(1, busy_cpus=6), node(2, busy_cpus=2), node(3, busy_cpus=4), nnodes=1, nprocs=8)
    assert workers(found) == {"id-2": (0, 1, 2, 3, 4, 5), "id-3": (6, 7)}
    assert (found.min_nodes, found.max_nodes) == (2, 2)
    assert found.skipped == (Skipped(node_id="id-1", address="10.0.0.1", why="not needed"),)
    assert "nnodes: 2 (for 8 workers)" in found.assumed
    assert bundles(found) == [(6, ()), (2, ())]


def test_so_many_workers_evenly_on_so_many_nodes():
    """Shares that differ by one at most."""
    found = plan(node(1), node(2), node(3), nnodes=3, nprocs=7)
    assert workers(found) == {"id-1": (0, 1, 2), "id-2": (3, 4), "id-3": (5, 6)}


def test_fewer_workers_than_nodes():
    """No agent without a worker."""
    assert workers(plan(node(1), node(2), node(3), nnodes=3, nprocs=2)) == {"id-1": (0,), "id-2": (1,)}


def test_so_many_workers_on_one_machine():
    """One agent has them all, unless the job says how many."""
    assert workers(plan(node(1), local=True, nnodes=1, nprocs=5)) == {"id-1": (0, 1, 2, 3, 4)}
    assert [seat.ranks for seat in plan(node(1), local=True, nnodes=2, nprocs=5).seats] == [(0, 1, 2), (3, 4)]


def test_too_many_workers_in_all():
    """Busy nodes are waited for, and further nodes like the largest where all together are too few."""
    found = plan(node(1, busy_cpus=4), node(2, cpus=4), nnodes=1, nprocs=12)
    assert [nproc for nproc, _ in bundles(found)] == [8, 4]
    assert found.shortage == (
        "asked: 1 x 8 workers (8 CPUs) and 1 x 4 workers (4 CPUs), each on a node of its own\n"
        "fits now: 1 of 2\n"
        "10.0.0.2: 4 of 4 CPUs free, 8 needed"
    )
    assert [nproc for nproc, _ in bundles(plan(node(1), nnodes=1, nprocs=20))] == [8, 8, 4]
    assert [nproc for nproc, _ in bundles(plan(nnodes=1, nprocs=20))] == [20]


@pytest.mark.parametrize(
    ("settings", "gpus", "assumed"),
    [
        ({"nnodes": 1, "nprocs": 8}, 5, "gpus_per_worker: 1"),
        ({"nnodes": 1, "nprocs": 9}, 0, "gpus_per_worker: 0 (the nodes do not have one for each)"),
        ({"nnodes": 2, "nprocs": 4}, 2, "gpus_per_worker: 1"),
        ({"nnodes": 3, "nprocs": 3}, 1, "gpus_per_worker: 1"),
        ({"nnodes": 3, "nprocs": 6}, 0, "gpus_per_worker: 0 (the nodes do not have one for each)"),
        ({"nnodes": 1, "nprocs": 2, "gpus_per_worker": 2}, 4, None),
    ],
)
def test_gpus_of_so_many_workers(settings, gpus, assumed):
    """One each where the nodes have enough: here 5, 2 and 1."""
    found = plan(node(1, gpus=5), node(2, gpus=2), node(3, gpus=1), **settings)
    assert found.bundles[0].gpus == gpus
    assert [line for line in found.assumed if "gpus_per_worker" in line] == ([assumed] if assumed else [])


def test_the_driver_waits_for_as_many_nodes_as_the_plan_found():
    """`nnodes: 1` means as many as needed beside `nprocs`, and is itself elsewhere."""
    asked = job(nnodes=1, nprocs=12)
    assert settled(asked, make_plan(asked, [node(1), node(2)], local=False)).nnodes == 2
    asked = job(nnodes="1:2")
    assert settled(asked, make_plan(asked, [node(1), node(2)], local=False)) is asked


def test_gpus_are_asked_for_where_there_are_none():
    """That is an error of the job, not a shortage that time could mend."""
    with pytest.raises(ValueError, match="no node of the cluster has a GPU"):
        plan(node(1), nproc_per_node="gpu")


@pytest.mark.parametrize(
    ("settings", "gpus", "assumed"),
    [
        ({"nproc_per_node": 4}, 4, "gpus_per_worker: 1"),
        ({"nproc_per_node": 5}, 0, "gpus_per_worker: 0 (no node has 5 GPUs)"),
        ({"nproc_per_node": "cpu"}, 0, "gpus_per_worker: 0 (one worker for each CPU)"),
        ({"nproc_per_node": 2, "gpus_per_worker": 2}, 4, None),
        ({"nproc_per_node": 2, "gpus_per_worker": 0}, 0, None),
    ],
)
def test_gpus_of_a_worker(settings, gpus, assumed):
    """One each where the nodes have enough; a number in the job is taken as it is."""
    found = plan(node(1, gpus=4), node(2, gpus=4), **settings)
    assert found.bundles[0].gpus == gpus
    assert [line for line in found.assumed if "gpus_per_worker" in line] == ([assumed] if assumed else [])


def test_no_gpus_no_gpu_is_reserved():
    """A laptop runs the job on its CPUs."""
    found = plan(node(1), local=True)
    assert found.bundles[0].gpus == 0
    assert "gpus_per_worker: 0 (the nodes have no GPUs)" in found.assumed
