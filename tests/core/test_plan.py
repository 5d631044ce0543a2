"""Who would run where, and why the other nodes would not do."""

from __future__ import annotations

import pytest
from story import job

from raylaunch.core.plan import NodeFacts, Plan, Seat, Skipped, make_plan


def node(last: int, *, cpus: float = 8, gpus: float = 0, busy_cpus: float = 0, busy_gpus: float = 0) -> NodeFacts:
    """10.0.0.<last>, with so much of everything, some of it busy."""
    return NodeFacts(
        node_id=f"id-{last}",
        address=f"10.0.0.{last}",
        cpus=cpus,
        gpus=gpus,
        free_cpus=cpus - busy_cpus,
        free_gpus=gpus - busy_gpus,
    )


def plan(*nodes: NodeFacts, local: bool = False, **settings: object) -> Plan:
    return make_plan(job(**settings), nodes, local=local)


def seated(found: Plan) -> list[str]:
    return [seat.node_id for seat in found.seats]


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
    assert [skipped.node_id for skipped in found.skipped] == ["id-1"]


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
    assert found.bundle == {}


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
        "asked: 2 x 2 workers (1 CPUs), each on a node of its own\n"
        "fits now: 1 of 2\n"
        "10.0.0.2: 0.5 of 8 CPUs free, 1 needed"
    )


def test_a_cluster_without_nodes():
    """It is said as it is."""
    found = plan(nnodes="1:3", nproc_per_node=1)
    assert not found.feasible
    assert found.shortage == (
        "asked: 1 to 3 x 1 workers (1 CPUs), each on a node of its own\nfits now: 0 of 1\nthe cluster has no nodes"
    )


@pytest.mark.parametrize(
    ("settings", "asked", "bundle"),
    [
        (
            {"nproc_per_node": 8, "gpus_per_worker": 1},
            "2 x 8 workers (8 GPUs and 8 CPUs), each on a node of its own",
            {"GPU": 8, "CPU": 8},
        ),
        ({"nnodes": 1, "cpus_per_worker": 0, "placement": "pack"}, "1 x 1 workers (no resources)", {}),
    ],
)
def test_the_request_in_words_and_as_a_bundle(settings, asked, bundle):
    """One agent with its workers is one bundle; what is not needed is not in it."""
    found = plan(**settings)
    assert (found.asked, found.bundle) == (asked, bundle)


# What the job leaves open.


@pytest.mark.parametrize(
    ("word", "nodes", "nproc", "assumed"),
    [
        ("auto", (node(1, gpus=4), node(2, gpus=8)), 4, "nproc_per_node: 4 (GPUs of a node)"),
        ("auto", (node(1, cpus=6), node(2)), 6, "nproc_per_node: 6 (CPUs of a node)"),
        ("gpu", (node(1, gpus=2), node(2, gpus=2)), 2, "nproc_per_node: 2 (GPUs of a node)"),
        ("cpu", (node(1, gpus=2), node(2, gpus=2)), 8, "nproc_per_node: 8 (CPUs of a node)"),
        ("auto", (), 1, "nproc_per_node: 1 (CPUs of a node)"),
        ("gpu", (), 1, "nproc_per_node: 1 (GPUs of a node)"),
    ],
)
def test_workers_by_a_word(word, nodes, nproc, assumed):
    """As many as the smaller of the two nodes has."""
    found = plan(*nodes, nproc_per_node=word)
    assert found.nproc == nproc
    assert assumed in found.assumed


def test_workers_by_a_word_look_at_the_best_nodes():
    """A third node with fewer GPUs, or with none, does not make the others smaller."""
    assert plan(node(1, gpus=8), node(2, gpus=8), node(3, gpus=1), node(4), nproc_per_node="gpu").nproc == 8


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
    assert found.gpus == gpus
    assert [line for line in found.assumed if "gpus_per_worker" in line] == ([assumed] if assumed else [])


def test_no_gpus_no_gpu_is_reserved():
    """A laptop runs the job on its CPUs."""
    found = plan(node(1), local=True)
    assert found.gpus == 0
    assert "gpus_per_worker: 0 (the nodes have no GPUs)" in found.assumed
