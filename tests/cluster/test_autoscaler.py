"""A cluster that grows and shrinks by Ray's own autoscaler, whose only input is our placement groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import Launcher, left_in_ray, wait_until
from tests.private_cluster import Autoscaler, Cluster, marked, private_cluster

pytestmark = [pytest.mark.ray, pytest.mark.own_cluster, pytest.mark.timeout(300)]

SCRIPT = """
import os, pathlib, time
from raylaunch.worker import checkpointed, should_checkpoint

saved = pathlib.Path("saved")
done = int(saved.read_text()) if saved.exists() else 0
while int(os.environ["WORLD_SIZE"]) < 2:
    time.sleep(0.05)
    done += 1
    if should_checkpoint(done):
        saved.write_text(str(done))
        checkpointed(done)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head with resources for many agents, which need a node each; one more node can be added."""
    with private_cluster(cpus=4, lean=True, autoscaler=Autoscaler(cpus=2, most=1)) as found:
        yield found


def nodes(cluster: Cluster) -> int:
    """Return how many nodes have a raylet."""
    names = [Path(f"/proc/{pid}/comm") for pid in marked(cluster.mark)]
    return sum(name.exists() and name.read_text() == "raylet\n" for name in names)


def script(launcher: Launcher) -> dict[str, str]:
    return {"script": launcher.script(SCRIPT)}


def test_a_cluster_grows_for_a_job_that_takes_more_and_shrinks_after_it(launcher: Launcher, cluster: Cluster):
    """The slot that is requested elsewhere adds a node, nearly always after the run has started with one. No step is lost."""
    run = launcher.run(
        entrypoint=script(launcher), nnodes="1:2", nproc_per_node=1, placement="spread", last_call=0.1, max_restarts=0
    )
    assert run.code == 0, run.err
    worlds = [attempt["world_size"] for attempt in run.result["attempts"]]
    assert worlds in ([1, 2], [2])  # the node may come before the agent of the first is up
    assert run.result["lost_steps"] == 0
    assert left_in_ray(cluster) == []
    wait_until(lambda: nodes(cluster) == 1, 100, "the other node to be taken down")


def test_a_cluster_that_cannot_grow_so_far(launcher: Launcher, cluster: Cluster):
    """No node is started for a gang that cannot be complete, and the run reports what was missing.

    It waits, though no node has a GPU: where there is an autoscaler, one may be added.
    """
    gang = {"nnodes": 3, "nproc_per_node": 1, "gpus_per_worker": 1, "placement": "spread"}
    run = launcher.run(entrypoint=script(launcher), placement_timeout=3, **gang)
    assert run.code == 3
    assert "0 of 3 nodes after 3 s" in run.err
    assert run.out == ""  # though Ray has words of its own for it
    assert nodes(cluster) == 1
