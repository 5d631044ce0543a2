"""Which GPUs workers see: the sets of visible devices of each rank, on nodes that claim GPUs (`ray start --num-gpus`)."""

from __future__ import annotations

import json
from collections import Counter
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
names = [*{devices.VARIABLES}, "LOCAL_RANK", "KIND"]
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


def on(*kinds: str, **job: Any) -> dict[str, Any]:
    """A job whose workers are on the nodes of these kinds, of which each rank knows its own."""
    nodes = {
        f"label:kind={kind}": {"env": {"KIND": kind}} if kind in kinds else {"nproc_per_node": 0} for kind in NODES
    }
    return {"entrypoint": {"script": "train.py"}, "nnodes": 1, "nodes": nodes, **job}


def told(run: Run, workers: int) -> list[dict[str, str]]:
    assert run.code == 0, run.err
    return [json.loads(run.log(rank)) for rank in range(workers)]


def by_kind(run: Run, workers: int) -> dict[str, list[str | None]]:
    """Return what the ranks on each kind of node see, sorted: Ray names the GPUs of a bundle in any order."""
    found: dict[str, list[str | None]] = {}
    for env in told(run, workers):
        names = env.get("CUDA_VISIBLE_DEVICES")
        found.setdefault(env["KIND"], []).append(None if names is None else ",".join(sorted(names.split(","))))
    return found


def test_two_agents_on_a_host_have_different_gpus(launcher):
    """Also if Ray tells its actors no GPUs, and with a variable of ROCm on a machine without it."""
    found = by_kind(launcher.run(**on("plain", "told", "untold", nnodes=6, nproc_per_node=2, gpus_per_worker=1)), 12)
    for seen in found.values():
        assert sorted(Counter(seen).values()) == [2, 2]
        assert sorted(",".join(set(seen)).split(",")) == ["0", "1", "2", "3"]
    assert found.keys() == {"plain", "told", "untold"}


def test_parts_of_gpus(launcher):
    """Two agents with halves of GPUs: each worker sees its node's GPU, or GPUs, as it is."""
    (found,) = by_kind(launcher.run(**on("plain", nnodes=2, nproc_per_node=2, gpus_per_worker=0.5)), 4).values()
    assert found[0] == found[1] != found[2] == found[3]
    assert {len(names.split(",")) for names in found} == {1}


def test_each_worker_sees_its_own_gpu(launcher):
    """With `virtual_local_rank`, also on a node whose raylet was restricted to some."""
    job = on("plain", "some", nnodes=2, nproc_per_node=4, gpus_per_worker=1, virtual_local_rank=True)
    job["nodes"]["label:kind=some"]["nproc_per_node"] = 2
    found = by_kind(run := launcher.run(**job), 6)
    assert {kind: sorted(seen) for kind, seen in found.items()} == {"plain": ["0", "1", "2", "3"], "some": ["2", "3"]}
    assert {env["LOCAL_RANK"] for env in told(run, 6)} == {"0"}


@pytest.mark.parametrize(("gpus", "nproc", "each"), [(2, 2, 2), (0.5, 4, 1)])
def test_each_worker_sees_its_own_gpus(launcher, gpus, nproc, each):
    """With `virtual_local_rank`: as many as it has, and with whole GPUs nobody else's."""
    run = launcher.run(**on("untold", nproc_per_node=nproc, gpus_per_worker=gpus, virtual_local_rank=True))
    found = [names.split(",") for names in by_kind(run, nproc)["untold"]]
    assert {len(names) for names in found} == {each}
    if gpus >= 1:
        assert sorted(name for names in found for name in names) == ["0", "1", "2", "3"]
    else:
        assert found[0] == found[1] != found[2] == found[3]
    assert {env["LOCAL_RANK"] for env in told(run, nproc)} == {"0"}


def test_too_few_gpus_for_virtual_local_rank(launcher):
    """The job's own variable leaves too few. It is said once, before anything has started."""
    job = on("plain", nproc_per_node=2, gpus_per_worker=0, virtual_local_rank=True)
    job["nodes"]["label:kind=plain"]["env"]["CUDA_VISIBLE_DEVICES"] = "7"
    run = launcher.run(**job)
    assert run.code not in (0, -1)
    assert "needs 2 GPUs for its workers, and CUDA_VISIBLE_DEVICES is 7" in run.err, run.err


def test_workers_without_gpus_of_their_own(launcher):
    """They see what their node sees: all of the machine, or what its raylet was restricted to."""
    kinds = ("plain", "untold", "some")
    run = launcher.run(**on(*kinds, nnodes=3, nproc_per_node=2, gpus_per_worker=0, placement="spread"))
    assert by_kind(run, 6) == {"plain": [None] * 2, "untold": [None] * 2, "some": ["2,3"] * 2}


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
    assert found == {"ROCR_VISIBLE_DEVICES": "0", "ASCEND_RT_VISIBLE_DEVICES": "5", "LOCAL_RANK": "0", "KIND": "told"}


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


GROUPS = """
import json
import ray, raylaunch
from ray.util.placement_group import placement_group

class Rank:
    pass

ray.init(log_to_driver=False, logging_level="ERROR")
shared = placement_group([{"GPU": 1, "CPU": 1}] * 2, "STRICT_PACK")
settings = {"placement_group": shared, "nproc_per_node": 1, "gpus_per_worker": 0.5, "cpus_per_worker": 0.5}
settings |= {"backend": "none", "preload": [], "show": "none"}
with raylaunch.WorkerGroup(Rank, **settings) as trainer, raylaunch.WorkerGroup(Rank, name="other", **settings) as other:
    print(json.dumps([[place.gpus for place in group.ranks] for group in (trainer, other)]))
"""


def test_groups_share_the_gpus_of_a_placement_group(launcher):
    """`ranks` of a `WorkerGroup` tells which GPU a rank sees: that of its bundle, of which each group has a half."""
    done = launcher.python(launcher.script(GROUPS, "program.py"))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[[")]  # Ray may print, too
    one, other = json.loads(line)
    assert one == other
    assert [len(gpus) for gpus in one] == [1, 1]
    assert one[0] != one[1]
