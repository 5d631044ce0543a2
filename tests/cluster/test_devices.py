"""Which GPUs workers see: the sets of visible devices of each rank, on nodes that claim GPUs (`ray start --num-gpus`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raylaunch.core.placement import devices
from tests.cluster.conftest import Launcher, Run, left_in_ray, wait_until
from tests.private_cluster import Cluster, end_marked, marked, private_cluster
from tests.warm_python import WarmPython

pytestmark = [pytest.mark.ray, pytest.mark.own_cluster, pytest.mark.timeout(300)]

LOOK = f"""
import json, os
names = [*{devices.VARIABLES}, "LOCAL_RANK"]
print(json.dumps({{name: os.environ[name] for name in names if name in os.environ}}))
"""
NODES = ("head", "plain", "told", "untold", "some")
"""Kinds of nodes, by their labels: all but the head have GPUs."""


@pytest.fixture(scope="module")
def claimed() -> Iterator[Cluster]:
    """A head without GPUs; and four nodes that claim GPUs, with other variables in the raylet's environment."""
    told = {"ROCR_VISIBLE_DEVICES": "0", "ONEAPI_DEVICE_SELECTOR": "", "ASCEND_RT_VISIBLE_DEVICES": "5"}
    with private_cluster(cpus=4, gpus=0, labels="kind=head", lean=True) as cluster:
        cluster.add_node(cpus=4, gpus=4, labels="kind=plain", env={"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"})
        # Ray reads what a raylet is restricted to when it is imported, so workers of these are not forked.
        cluster.add_node(cpus=4, gpus=4, labels="kind=told", env=told, forks=False)
        cluster.add_node(cpus=4, gpus=4, labels="kind=untold", env={"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"})
        some = {"CUDA_VISIBLE_DEVICES": "2,3", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
        cluster.add_node(cpus=4, gpus=2, labels="kind=some", env=some, forks=False)
        yield cluster
        wait_until(lambda: left_in_ray(cluster) == [], 100, "actors and placement groups to be gone")


@pytest.fixture
def launcher(claimed: Cluster, tmp_path: Path, warm_torch: WarmPython) -> Iterator[Launcher]:
    found = Launcher(tmp_path, claimed, warm_torch=lambda: warm_torch)
    found.script(LOOK)
    try:
        yield found
    finally:
        for run in found.runs:
            end_marked(run.mark)
    wait_until(lambda: not any(marked(run.mark) for run in found.runs), 100, "processes to be gone")


def on(kind: str, **job: Any) -> dict[str, Any]:
    """A job whose workers are on the nodes of one kind."""
    others = {f"label:kind={other}": {"nproc_per_node": 0} for other in NODES if other != kind}
    return {"entrypoint": {"script": "train.py"}, "nnodes": 1, "nodes": others, **job}


def told(run: Run, workers: int) -> list[dict[str, str]]:
    assert run.code == 0, run.err
    return [json.loads(run.log(rank)) for rank in range(workers)]


def visible(run: Run, workers: int) -> list[str | None]:
    """Return what each rank sees, sorted: Ray names the GPUs of a bundle in any order."""
    found = [env.get("CUDA_VISIBLE_DEVICES") for env in told(run, workers)]
    return [None if names is None else ",".join(sorted(names.split(","))) for names in found]


@pytest.mark.parametrize("kind", ["plain", "told", "untold"])
def test_two_agents_on_a_host_have_different_gpus(launcher, kind):
    """Also if Ray tells its actors no GPUs, and with a variable of ROCm on a machine without it."""
    run = launcher.run(**on(kind, nnodes=2, nproc_per_node=2, gpus_per_worker=1))
    found = visible(run, 4)
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert sorted(f"{found[0]},{found[2]}".split(",")) == ["0", "1", "2", "3"]


def test_parts_of_gpus(launcher):
    """Two agents with halves of GPUs: each worker sees its node's GPU, or GPUs, as it is."""
    found = visible(launcher.run(**on("plain", nnodes=2, nproc_per_node=2, gpus_per_worker=0.5)), 4)
    assert found[0] == found[1] != found[2] == found[3]
    assert {len(names.split(",")) for names in found} == {1}


@pytest.mark.parametrize(
    ("kind", "gpus", "nproc", "each"), [("plain", 1, 4, 1), ("untold", 2, 2, 2), ("plain", 0.5, 4, 1)]
)
def test_each_worker_sees_its_own_gpus(launcher, kind, gpus, nproc, each):
    """With `virtual_local_rank`: as many as it has, and with whole GPUs nobody else's."""
    run = launcher.run(**on(kind, nproc_per_node=nproc, gpus_per_worker=gpus, virtual_local_rank=True))
    found = [names.split(",") for names in visible(run, nproc)]
    assert {len(names) for names in found} == {each}
    if gpus >= 1:
        assert sorted(name for names in found for name in names) == ["0", "1", "2", "3"]
    else:
        assert found[0] == found[1] != found[2] == found[3]
    assert {env["LOCAL_RANK"] for env in told(run, nproc)} == {"0"}


def test_too_few_gpus_for_virtual_local_rank(launcher):
    """The job's own variable leaves too few. It is said once, before anything has started."""
    job = on("plain", nproc_per_node=2, gpus_per_worker=0, virtual_local_rank=True)
    job["nodes"]["label:kind=plain"] = {"env": {"CUDA_VISIBLE_DEVICES": "7"}}
    run = launcher.run(**job)
    assert run.code not in (0, -1)
    assert "needs 2 GPUs for its workers, and CUDA_VISIBLE_DEVICES is 7" in run.err, run.err


@pytest.mark.parametrize(("kind", "expected"), [("plain", None), ("untold", None), ("some", "2,3")])
def test_workers_without_gpus_of_their_own(launcher, kind, expected):
    """They see what their node sees: all of the machine, or what its raylet was restricted to."""
    run = launcher.run(**on(kind, nproc_per_node=2, gpus_per_worker=0))
    assert visible(run, 2) == [expected, expected]


def test_gpus_of_a_restricted_raylet(launcher):
    run = launcher.run(**on("some", nproc_per_node=2, gpus_per_worker=1, virtual_local_rank=True))
    assert sorted(visible(run, 2)) == ["2", "3"]


def test_the_submitters_gpus_are_not_the_workers(launcher):
    """Variables of other accelerators too: a driver on the cluster has some of them set to "" by Ray."""
    env = {
        "HIP_VISIBLE_DEVICES": "",
        "ZE_AFFINITY_MASK": "9",
        "ASCEND_RT_VISIBLE_DEVICES": "9",
        "GPU_DEVICE_ORDINAL": "9",
    }
    run = launcher.start(env=env, **on("told", nproc_per_node=1, gpus_per_worker=1)).wait()
    (found,) = told(run, 1)
    (gpu,) = found.pop("CUDA_VISIBLE_DEVICES")
    assert gpu in "0123"
    assert found == {"ROCR_VISIBLE_DEVICES": "0", "ASCEND_RT_VISIBLE_DEVICES": "5", "LOCAL_RANK": "0"}


def test_nodes_with_and_without_gpus(launcher):
    """A job without GPUs for its workers may use both, and all ranks of a function have the same backend."""
    text = "def work():\n    import torch.distributed as dist\n    print(dist.get_backend())\n"
    launcher.script(text, "work.py")
    others = {f"label:kind={kind}": {"nproc_per_node": 0} for kind in NODES[2:]}
    job = {"nodes": others, "placement": "spread", "nproc_per_node": 1, "gpus_per_worker": 0}
    run = launcher.run(entrypoint={"function": "work:work"}, nnodes=2, **job)
    assert run.code == 0, run.err
    assert [run.log(rank) for rank in range(2)] == ["gloo\n"] * 2
    run = launcher.run(**on("plain", nproc_per_node=2) | {"entrypoint": {"function": "work:work"}})
    assert run.code != 0
    assert "this torch has no `nccl` backend" in run.err, run.err
