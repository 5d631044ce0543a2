"""The plan of a job: which nodes run which ranks, and why other nodes are skipped."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machine_helpers import job

from raylaunch.core.job.job import NodeRule
from raylaunch.core.placement.plan import NodeFacts, NodePlan, Plan, SkippedNode, SpareNode, make_plan, settled


def node(
    last: int, *, cpus: float = 8, gpus: float = 0, busy_cpus: float = 0, busy_gpus: float = 0, **labels: str
) -> NodeFacts:
    """Return facts of a node at 10.0.0.<last>, some of whose resources are in use."""
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


def planned_nodes(found: Plan) -> list[str]:
    """Return the ids of the nodes that run workers."""
    return [planned.node_id for planned in found.seats]


def workers(found: Plan) -> dict[str, tuple[int, ...]]:
    """Return ranks by node id."""
    return {planned.node_id: planned.ranks for planned in found.seats}


def bundles(found: Plan) -> list[tuple[int, tuple[str, ...]]]:
    """Return (number of workers, nodes to avoid) of each bundle, in the order of the requests."""
    return [(bundle.nproc, bundle.avoid) for bundle in found.bundles]


# Nodes and ranks.


def test_cluster_is_spread_by_default():
    """Each agent has a node of its own; nodes are in the natural order of addresses, ranks are consecutive."""
    found = plan(node(10), node(9), nproc_per_node=2)
    assert found.seats == (
        NodePlan(node_id="id-9", address="10.0.0.9", node_rank=0, ranks=(0, 1)),
        NodePlan(node_id="id-10", address="10.0.0.10", node_rank=1, ranks=(2, 3)),
    )
    assert found.feasible
    assert "placement: spread (a cluster)" in found.assumed


def test_single_machine_is_packed_by_default():
    """On a local Ray, all agents share the machine."""
    found = plan(node(1), local=True, nproc_per_node=2)
    assert planned_nodes(found) == ["id-1", "id-1"]
    assert found.skipped == ()
    assert "placement: pack (one machine)" in found.assumed


@pytest.mark.parametrize(
    ("placement", "local", "expected"), [("pack", False, ["id-1", "id-1"]), ("spread", True, ["id-1"])]
)
def test_placement_of_the_job_wins(placement, local, expected):
    """Nothing is assumed then."""
    found = plan(node(1), local=local, placement=placement)
    assert planned_nodes(found) == expected
    assert not any("placement" in line for line in found.assumed)


def test_packing_fills_one_node_after_the_other():
    found = plan(node(1, cpus=5), node(2), nnodes=3, nproc_per_node=2, placement="pack")
    assert planned_nodes(found) == ["id-1", "id-1", "id-2"]
    assert found.skipped == ()


def test_shortage_of_packed_nodes():
    found = plan(node(1, cpus=5), nnodes=3, nproc_per_node=2, placement="pack")
    assert planned_nodes(found) == ["id-1", "id-1"]
    assert found.shortage == (
        "requested: 3 nodes with 2 workers each (2 CPUs per node)\nroom for: 2 of 3 nodes\n"
        "10.0.0.1: 1 of 5 CPUs free, 2 needed\n"
        "it could start now with `cpus_per_worker=0.8`, `nproc_per_node=1` or `nnodes=2:3`"
    )


def test_elastic_job_takes_up_to_max_nodes():
    """It can start with MIN nodes."""
    found = plan(node(1), node(2), node(3), nnodes="1:2")
    assert (found.min_nodes, found.max_nodes) == (1, 2)
    assert planned_nodes(found) == ["id-1", "id-2"]
    assert found.skipped == (SkippedNode(node_id="id-3", address="10.0.0.3", why="not needed"),)


def test_workers_without_resources_fit_anywhere():
    """Workers that reserve neither GPU nor CPU may share a busy node."""
    found = plan(node(1, cpus=1, busy_cpus=1), nnodes=5, nproc_per_node=4, cpus_per_worker=0, placement="pack")
    assert planned_nodes(found) == ["id-1"] * 5
    assert {tuple(bundle.resources) for bundle in found.bundles} == {()}


# Skipped nodes and shortages.


def test_busy_node_is_skipped():
    """The reason says what is free, what exists, and what is needed."""
    found = plan(node(1, gpus=8, cpus=96), node(2, gpus=8, cpus=96, busy_gpus=5), nproc_per_node=8)
    assert planned_nodes(found) == ["id-1"]
    why = "3 of 8 GPUs free, 8 needed, 96 of 96 CPUs free, 8 needed"
    assert found.skipped == (SkippedNode(node_id="id-2", address="10.0.0.2", why=why),)
    assert not found.feasible
    assert found.possible, "when the node is free"


@pytest.mark.parametrize("settings", [{"nproc_per_node": 9}, {"nproc_per_node": 1, "nnodes": 3}, {"nprocs": 17}])
def test_a_job_that_no_free_nodes_could_hold(settings):
    """It is not only the other jobs that it would have to wait for."""
    found = plan(node(1), node(2, busy_cpus=7.5), **{"nnodes": 1, "placement": "spread"} | settings)
    assert not found.possible
    assert plan(node(1), node(2), nnodes=1, nproc_per_node=1, placement="spread").possible


def test_text_of_a_shortage():
    """What was requested, what fits, and what each skipped node lacks."""
    found = plan(node(1), node(2, busy_cpus=7.5), nproc_per_node=2, cpus_per_worker=0.5)
    assert found.shortage == (
        "requested: 2 nodes with 2 workers each (1 CPU per node), on different Ray nodes\n"
        "room for: 1 of 2 nodes\n"
        "10.0.0.2: 0.5 of 8 CPUs free, 1 needed\n"
        "it could start now with `placement=pack`, `cpus_per_worker=0.2`, `nproc_per_node=1` or `nnodes=1:2`"
    )


def test_shortage_of_an_empty_cluster():
    found = plan(nnodes="1:3", nproc_per_node=1)
    assert not found.feasible
    assert found.shortage == (
        "requested: 1 to 3 nodes with 1 worker each (1 CPU per node), on different Ray nodes\nroom for: 0 of 1 nodes\nthe cluster has no nodes"
    )


@pytest.mark.parametrize(
    ("settings", "asked", "resources"),
    [
        (
            {"nproc_per_node": 8, "gpus_per_worker": 1},
            "2 nodes with 8 workers each (8 GPUs and 8 CPUs per node), on different Ray nodes",
            {"GPU": 8, "CPU": 8},
        ),
        ({"nnodes": 1, "cpus_per_worker": 0, "placement": "pack"}, "1 node with 1 worker (no resources)", {}),
    ],
)
def test_request_as_text_and_as_bundles(settings, asked, resources):
    """One agent with its workers is one bundle; resources that are not needed are omitted."""
    found = plan(**settings)
    assert (found.asked, found.bundles[0].resources) == (asked, resources)


# Values that the job leaves open.


@pytest.mark.parametrize(
    ("word", "nodes", "nproc", "assumed"),
    [
        ("auto", (node(1, gpus=4), node(2, gpus=8)), [4, 8], "nproc_per_node: 4 or 8 (GPUs of each node)"),
        ("auto", (node(1, cpus=6), node(2)), [6, 8], "nproc_per_node: 6 or 8 (CPUs of each node)"),
        ("xpu", (node(1, gpus=2), node(2, gpus=2)), [2, 2], "nproc_per_node: 2 (GPUs of a node)"),
        ("gpu", (node(1, gpus=2), node(2, gpus=2)), [2, 2], "nproc_per_node: 2 (GPUs of a node)"),
        ("cpu", (node(1, gpus=2), node(2, gpus=2)), [8, 8], "nproc_per_node: 8 (CPUs of a node)"),
        ("auto", (), [1, 1], "nproc_per_node: 1 (CPUs of a node)"),
        ("gpu", (), [1, 1], "nproc_per_node: 1 (GPUs of a node)"),
    ],
)
def test_nproc_per_node_as_a_word(word, nodes, nproc, assumed):
    """As many workers as each node has GPUs or CPUs, as for torchrun."""
    found = plan(*nodes, nproc_per_node=word)
    assert [bundle.nproc for bundle in found.bundles] == nproc
    assert assumed in found.assumed


def test_nproc_per_node_as_a_word_prefers_the_largest_nodes():
    """Nodes with fewer GPUs are skipped if they are not needed."""
    found = plan(node(4), node(3, gpus=1), node(2, gpus=8), node(1, gpus=8), nproc_per_node="gpu")
    assert workers(found) == {"id-1": tuple(range(8)), "id-2": tuple(range(8, 16))}
    assert {skipped.why for skipped in found.skipped} == {"not needed"}
    assert bundles(found) == [(8, ()), (8, ())]


# Unequal nodes.


def test_ranks_are_consecutive_on_unequal_nodes():
    """7 + 8 + 8 + 8 workers, in the order of addresses."""
    nodes = (node(1, gpus=7), node(2, gpus=8), node(3, gpus=8), node(4, gpus=8))
    found = plan(*nodes, nnodes=4, nproc_per_node="gpu")
    assert [(ranks[0], ranks[-1]) for ranks in workers(found).values()] == [(0, 6), (7, 14), (15, 22), (23, 30)]
    assert found.workers == 31
    assert found.asked == (
        "1 node with 7 workers (7 GPUs and 7 CPUs) and 3 nodes with 8 workers each (8 GPUs and 8 CPUs per node), on different Ray nodes"
    )


def test_small_bundle_avoids_larger_nodes():
    """7 workers would fit on the node for 8; 8 workers fit on no other node anyway."""
    found = plan(node(1, gpus=7), node(2, gpus=8), nproc_per_node="gpu")
    assert bundles(found) == [(7, ("id-2",)), (8, ())]


def test_rule_sets_the_workers_of_a_node():
    """By address or label; the last match counts, and the plan names all matching rules."""
    rules = {
        "10.0.0.*": NodeRule(nproc_per_node=3),
        "label:zone=b": NodeRule(nproc_per_node=2),
        "10.0.0.2": NodeRule(env={"A": "1"}),
    }
    found = plan(node(1), node(2, zone="b"), nproc_per_node=4, nodes=rules)
    assert workers(found) == {"id-1": (0, 1, 2), "id-2": (3, 4)}
    assert [planned.rules for planned in found.seats] == [("10.0.0.*",), ("10.0.0.*", "label:zone=b", "10.0.0.2")]
    assert bundles(found) == [(3, ("id-2",)), (2, ("id-1",))]


def test_rule_can_exclude_a_node():
    """With `nproc_per_node: 0` another node is used, and all bundles avoid the node."""
    found = plan(node(1), node(2), node(3), nodes={"10.0.0.1": NodeRule(nproc_per_node=0)})
    assert planned_nodes(found) == ["id-2", "id-3"]
    assert bundles(found) == [(1, ("id-1",)), (1, ("id-1",))]
    found = plan(node(1), nnodes=1, nodes={"10.0.0.1": NodeRule(nproc_per_node=0)})
    assert found.skipped == (SkippedNode(node_id="id-1", address="10.0.0.1", why="no workers are meant for it"),)


def test_unmatched_rules_cause_warnings():
    """Rules for subnets are not reported, nor any rules for an empty cluster."""
    rules = {"10.0.0.9": NodeRule(), "label:zone=x": NodeRule(), "10.9.0.0/16": NodeRule(), "10.0.0.1": NodeRule()}
    assert plan(node(1), nodes=rules).warnings == (
        "`nodes`: `10.0.0.9` matches no node of the cluster",
        "`nodes`: `label:zone=x` matches no node of the cluster",
    )
    assert plan(nodes=rules).warnings == ()


def test_gang_may_include_busy_nodes():
    """The bundles are for the best nodes, even if busy now; ranks are planned only on those with room."""
    found = plan(node(1, gpus=4), node(2, gpus=8, busy_gpus=1), nproc_per_node="gpu")
    assert workers(found) == {"id-1": (0, 1, 2, 3)}
    assert [nproc for nproc, _ in bundles(found)] == [4, 8]
    assert found.skipped[0].why == "7 of 8 GPUs free, 8 needed, 8 of 8 CPUs free, 8 needed"


def test_nodes_with_room_come_before_larger_busy_nodes():
    """The job can start now, with fewer workers."""
    found = plan(node(1, gpus=8, busy_gpus=8), node(2, gpus=4), nnodes=1, nproc_per_node="gpu")
    assert planned_nodes(found) == ["id-2"]
    assert [nproc for nproc, _ in bundles(found)] == [4]


def test_impossible_bundle_is_still_requested():
    """Each node says what it lacks."""
    found = plan(node(1), nnodes=1, nproc_per_node="cpu", cpus_per_worker=2)
    assert bundles(found) == [(8, ())]
    assert found.skipped[0].why == "8 of 8 CPUs free, 16 needed"


def test_future_nodes_get_the_most_common_number_of_workers():
    """First come the best nodes as a gang, then the other nodes, then nodes that do not exist yet."""
    nodes = (node(1, cpus=2), node(2, cpus=4), node(3, cpus=4))
    found = plan(*nodes, nnodes="2:5", nproc_per_node="cpu")
    assert bundles(found) == [(4, ()), (4, ()), (2, ("id-2", "id-3")), (4, ()), (4, ())]
    assert found.asked == (
        "2 to 5 of these nodes: 4 nodes with 4 workers each (4 CPUs per node) and 1 node with 2 workers (2 CPUs), on different Ray nodes"
    )


def test_gang_is_in_the_order_of_addresses():
    """Ranks follow this order too; agents at the same address are told apart only by it."""
    nodes = (node(1, cpus=2), node(2, cpus=4), node(3, cpus=3))
    assert [nproc for nproc, _ in bundles(plan(*nodes, nnodes=3, nproc_per_node="cpu"))] == [2, 4, 3]


# Spare nodes.


def test_spare_nodes_come_last():
    """They have no ranks, and do not count as nodes of the job."""
    found = plan(node(1), node(2), node(3), node(4), nnodes="1:2", spares=1, nproc_per_node=2)
    assert workers(found) == {"id-1": (0, 1), "id-2": (2, 3)}
    assert found.spares == (SpareNode(node_id="id-3", address="10.0.0.3"),)
    assert found.skipped == (SkippedNode(node_id="id-4", address="10.0.0.4", why="not needed"),)
    assert (found.min_nodes, found.max_nodes, len(found.bundles)) == (1, 2, 3)
    assert found.workers == 4
    assert found.asked == "1 to 2 nodes with 2 workers each (2 CPUs per node), on different Ray nodes, and 1 spare node"


def test_missing_spare_nodes_do_not_delay_the_job():
    """They are requested, and the plan says why a node cannot be a spare."""
    found = plan(node(1), node(2), node(3, busy_cpus=7), nnodes=2, spares=2, nproc_per_node=2)
    assert found.feasible
    assert found.spares == ()
    assert len(found.bundles) == 4
    assert found.skipped[0].why == "1 of 8 CPUs free, 2 needed"
    assert found.asked.endswith("and 2 spare nodes")


def test_spare_nodes_may_share_a_single_machine():
    found = plan(node(1), local=True, nnodes=2, spares=1, nproc_per_node=2)
    assert planned_nodes(found) == ["id-1", "id-1"]
    assert found.spares == (SpareNode(node_id="id-1", address="10.0.0.1"),)


def test_spare_nodes_with_nprocs():
    """Spares have as many workers as the largest node; without room for the job there are no spares."""
    found = plan(node(1), node(2), node(3), nnodes=2, nprocs=5, spares=1)
    assert workers(found) == {"id-1": (0, 1, 2), "id-2": (3, 4)}
    assert [spare.node_id for spare in found.spares] == ["id-3"]
    assert [nproc for nproc, _ in bundles(found)] == [3, 2, 3]
    assert (found.min_nodes, found.max_nodes) == (2, 2)
    assert plan(node(1, cpus=3), node(2, cpus=1), node(3, cpus=3), nnodes=3, nprocs=6, spares=1).spares == ()


def test_future_spare_nodes_have_the_most_common_size():
    found = plan(node(1, cpus=2), node(2, cpus=4), node(3, cpus=4), nnodes=3, spares=1, nproc_per_node="cpu")
    assert [nproc for nproc, _ in bundles(found)] == [2, 4, 4, 4]
    assert found.max_nodes == 3


# A total number of workers (`nprocs`).


def test_nprocs_uses_as_few_nodes_as_possible():
    """Nodes with the most room come first."""
    found = plan(node(1, busy_cpus=6), node(2, busy_cpus=2), node(3, busy_cpus=4), nnodes=1, nprocs=8)
    assert workers(found) == {"id-2": (0, 1, 2, 3, 4, 5), "id-3": (6, 7)}
    assert (found.min_nodes, found.max_nodes) == (2, 2)
    assert found.skipped == (SkippedNode(node_id="id-1", address="10.0.0.1", why="not needed"),)
    assert "nnodes: 2 (for 8 workers)" in found.assumed
    assert bundles(found) == [(6, ()), (2, ())]


def test_nprocs_with_nnodes_is_split_evenly():
    """The nodes differ by one worker at most."""
    found = plan(node(1), node(2), node(3), nnodes=3, nprocs=7)
    assert workers(found) == {"id-1": (0, 1, 2), "id-2": (3, 4), "id-3": (5, 6)}


def test_nprocs_below_nnodes():
    """No agent is without a worker."""
    assert workers(plan(node(1), node(2), node(3), nnodes=3, nprocs=2)) == {"id-1": (0,), "id-2": (1,)}


def test_nprocs_on_a_single_machine():
    """One agent has all workers, unless `nnodes` says otherwise."""
    assert workers(plan(node(1), local=True, nnodes=1, nprocs=5)) == {"id-1": (0, 1, 2, 3, 4)}
    assert [planned.ranks for planned in plan(node(1), local=True, nnodes=2, nprocs=5).seats] == [(0, 1, 2), (3, 4)]


def test_nprocs_beyond_the_free_resources():
    """Busy nodes are requested, and further nodes like the largest if all are too few."""
    found = plan(node(1, busy_cpus=4), node(2, cpus=4), nnodes=1, nprocs=12)
    assert [nproc for nproc, _ in bundles(found)] == [8, 4]
    assert found.shortage == (
        "requested: 1 node with 8 workers (8 CPUs) and 1 node with 4 workers (4 CPUs), on different Ray nodes\n"
        "room for: 1 of 2 nodes\n"
        "10.0.0.2: 4 of 4 CPUs free, 8 needed\n"
        "it could start now with `cpus_per_worker=0.5` or `nprocs=8`"
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
def test_gpus_per_worker_with_nprocs(settings, gpus, assumed):
    """One each if the nodes have enough: here 5, 2 and 1."""
    found = plan(node(1, gpus=5), node(2, gpus=2), node(3, gpus=1), **settings)
    assert found.bundles[0].gpus == gpus
    assert [line for line in found.assumed if "gpus_per_worker" in line] == ([assumed] if assumed else [])


def test_settled_job_has_the_numbers_of_the_plan():
    """With `nprocs`, `nnodes: 1` means as many as needed."""
    requested = job(nnodes=1, nprocs=12)
    assert settled(requested, make_plan(requested, [node(1), node(2)], local=False)).nnodes == 2
    requested = job(nnodes="1:2")
    assert settled(requested, make_plan(requested, [node(1), node(2)], local=False)) == replace(
        requested, gpus_per_worker=0
    )


@pytest.mark.parametrize("word", ["gpu", "xpu"])
def test_nproc_per_node_gpu_without_gpus_is_an_error(word):
    """Waiting for nodes would not help. The message has the word that was written."""
    with pytest.raises(ValueError, match=f"`nproc_per_node: {word}`, but there is no GPU on any node"):
        plan(node(1), nproc_per_node=word)


@pytest.mark.parametrize(
    ("settings", "gpus", "assumed"),
    [
        ({"nproc_per_node": 4}, 4, "gpus_per_worker: 1"),
        ({"nproc_per_node": 5}, 0, "gpus_per_worker: 0 (no node has 5 GPUs)"),
        ({"nproc_per_node": "cpu"}, 0, "gpus_per_worker: 0 (one worker for each CPU)"),
        ({"nproc_per_node": 2, "gpus_per_worker": 2}, 4, None),
        ({"nproc_per_node": 2, "gpus_per_worker": 0}, 0, None),
        ({"nproc_per_node": 1, "gpus_per_worker": 0.5}, 0.5, None),
        ({"nproc_per_node": 3, "gpus_per_worker": 0.1}, 0.3, None),
        ({"nproc_per_node": 3, "gpus_per_worker": 0.5}, 2, None),  # Ray reserves whole ones above 1
    ],
)
def test_gpus_per_worker(settings, gpus, assumed):
    """One each if the nodes have enough; a number in the job is used as it is."""
    found = plan(node(1, gpus=4), node(2, gpus=4), **settings)
    assert found.bundles[0].gpus == gpus
    assert [line for line in found.assumed if "gpus_per_worker" in line] == ([assumed] if assumed else [])


def test_no_gpus_are_reserved_without_gpus():
    found = plan(node(1), local=True)
    assert found.bundles[0].gpus == 0
    assert "gpus_per_worker: 0 (the nodes have no GPUs)" in found.assumed


@pytest.mark.parametrize(("part", "fit"), [(0.1, 10), (0.3, 3), (0.5, 2), (1, 1)])
def test_as_many_parts_of_a_gpu_fit_as_there_are(part, fit):
    """Ten tenths make a whole, which a division of floats does not find."""
    found = plan(node(1, cpus=64, gpus=1), nnodes=20, nproc_per_node=1, gpus_per_worker=part, placement="pack")
    assert len(found.seats) == fit
