"""GPU bundles on a real Ray cluster: which GPUs the workers see there."""

from __future__ import annotations

import pytest

from tests.gpu import gpu_runs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(170)]


def visible(note):
    return (note["visible"] or "").split(",")


def test_a_bundle_of_all_gpus(launch, cluster):
    """Each worker sees all GPUs of its node's bundle, and LOCAL_RANK is the index of its own."""
    found = launch("look.py", cluster=cluster, gpus_per_worker=1).wait().notes("look")
    wanted = [str(index) for index in range(gpu_runs.count())]
    assert [note["local_rank"] for note in found] == list(range(gpu_runs.count()))
    assert all(sorted(visible(note)) == wanted for note in found), found
    assert {note["devices"] for note in found} == {gpu_runs.count()}
    assert len({note["gpu"] for note in found}) == gpu_runs.count()


def test_virtual_local_rank(launch, cluster):
    """With `virtual_local_rank`, LOCAL_RANK is 0, and each worker sees one GPU, another one than the others."""
    found = launch("look.py", cluster=cluster, gpus_per_worker=1, virtual_local_rank=True).wait().notes("look")
    assert {note["local_rank"] for note in found} == {0}
    assert sorted(note["visible"] for note in found) == [str(index) for index in range(gpu_runs.count())]
    assert {note["devices"] for note in found} == {1}


def test_two_nodes_share_a_gpu(launch, cluster):
    """Two agents with half a GPU each, one worker in each: both see the same GPU, and gloo reduces over it."""
    job = {"nnodes": 2, "placement": "pack", "nproc_per_node": 1, "gpus_per_worker": 0.5}
    found = launch("look.py", "gloo", cluster=cluster, **job).wait().notes("look")
    assert [(note["rank"], note["local_rank"]) for note in found] == [(0, 0), (1, 0)]
    assert len({note["visible"] for note in found}) == 1
    assert {note["devices"] for note in found} == {1}


def test_two_workers_share_a_gpu(launch, cluster):
    """One agent with two workers of half a GPU each: both see the one GPU of the bundle."""
    found = launch("look.py", "gloo", cluster=cluster, nproc_per_node=2, gpus_per_worker=0.5).wait().notes("look")
    assert [note["local_rank"] for note in found] == [0, 1]
    assert {note["devices"] for note in found} == {1}


def test_no_gpus_requested(launch, cluster):
    """A job that asks for no GPUs sees those of the machine: Ray's hiding of them is undone."""
    found = launch("look.py", "gloo", cluster=cluster, nproc_per_node=1, gpus_per_worker=0).wait().notes("look")
    assert found[0]["visible"] != ""
    assert found[0]["devices"] == gpu_runs.count()


def test_more_gpus_than_there_are(launch, cluster):
    """A job that asks for more GPUs than the cluster has says so, with what it has."""
    many = gpu_runs.count() + 1
    run = launch("look.py", cluster=cluster, nproc_per_node=many, gpus_per_worker=1, placement_timeout=5)
    run.process.wait(gpu_runs.SECONDS)
    assert run.process.returncode not in (0, None)
    assert f"{many} needed" in run.err, run.err[-4000:]
