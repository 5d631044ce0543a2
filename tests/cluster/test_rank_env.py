"""`raylaunch.rank_env`: ranks for a caller's own actors, in its own placement group."""

from __future__ import annotations

import json

import pytest

from raylaunch.worker_group.rank_env import ranks_on
from tests.private_cluster import private_cluster
from tests.warm_command import WarmCommand

PROGRAM = """
import json, os, signal, socket, sys, time
import ray, raylaunch
from ray.util.placement_group import placement_group

ray.init(log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=1)
class Rank:
    def join(self, env):
        import torch, torch.distributed as dist
        os.environ.update(env)
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(total)
        return int(total), ray.get_runtime_context().get_node_id()

    def join_another(self, address):
        # as frameworks do to send weights to their rollout engines: rank 0 serves a store of its own
        import torch.distributed as dist
        store, rank, size = next(iter(dist.rendezvous(f"tcp://{address}", int(os.environ["RANK"]), 3)))
        store.set(f"rank-{rank}", "here")
        store.wait([f"rank-{other}" for other in range(size)])
        return size

def options(group, bundle):
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle)}

group = placement_group([{"CPU": 1}] * 4, strategy="PACK")
found = {}
with raylaunch.rank_env(group, bundles=[3, 0, 2]) as ranks:
    found["again"] = raylaunch.rank_env(group, bundles=[0, 2, 3]).bundles == ranks.bundles
    found["bundles"] = sorted(ranks.bundles)
    found["env"] = [[env[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")] for env in ranks]
    address = ranks[0]["MASTER_ADDR"], int(ranks[0]["MASTER_PORT"])
    with socket.socket() as other:
        try:
            other.bind(address)
            found["held"] = False
        except OSError:
            found["held"] = True
    actors = [Rank.options(**options(group, bundle)).remote() for bundle in ranks.bundles]
    joined = ray.get([actor.join.remote(env) for actor, env in zip(actors, ranks)])
    found["sums"], nodes = map(list, zip(*joined))
    found["grouped"] = len({*nodes}) == int(ranks[2]["GROUP_RANK"]) + 1 and nodes == sorted(nodes, key=nodes.index)
    with raylaunch.rank_env(group, bundles=ranks.bundles) as more:
        told = f"{more[0]['MASTER_ADDR']}:{more[0]['MASTER_PORT']}"
        found["another"] = ray.get([actor.join_another.remote(told) for actor in actors])
found["two each"] = len(raylaunch.rank_env(group, 2))
for wrong in ({"bundles": [4]}, {"bundles": []}, {"nproc_per_bundle": 0}):
    try:
        raylaunch.rank_env(group, **wrong)
    except ValueError as error:
        found.setdefault("refused", []).append(str(error))
large = placement_group([{"CPU": 100}])
try:
    raylaunch.rank_env(large, timeout=0.2)
except raylaunch.ClusterError as error:
    found["pending"] = str(error)
ray.util.remove_placement_group(large)
for actor in actors:
    ray.kill(actor)
del actor, actors
def holders():
    from ray._private.state import actors
    return [a["State"] for a in actors().values() if a["State"] != "DEAD" and a["ActorClassName"] == "PortHolder"]
deadline = time.monotonic() + 60
while holders() and time.monotonic() < deadline:
    time.sleep(0.1)
found["left"] = holders()
found["group"] = ray.util.placement_group_table(group)["state"]
print(json.dumps(found), flush=True)
"""


def test_ranks_of_one_node_follow_each_other() -> None:
    """LOCAL_RANK counts on a node, over all of its bundles."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    found = [tuple(int(env[name]) for name in names) for env in ranks_on(["a", "a", "b"])]
    assert found == [(0, 0, 3, 2, 0, 2), (1, 1, 3, 2, 0, 2), (2, 0, 3, 1, 1, 2)]


@pytest.mark.ray
@pytest.mark.own_cluster
@pytest.mark.timeout(300)
def test_actors_of_the_caller_become_ranks(tmp_path) -> None:
    """On two nodes: they form a process group, and another one that rank 0 serves; the port was theirs all the time."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with private_cluster(cpus=2, lean=True, imports=("torch.distributed",)) as cluster:
        cluster.add_node(cpus=2)
        assert cluster.warm is not None
        command = WarmCommand(cluster.warm, str(tmp_path / "program.py"), env=cluster.env(), cwd=tmp_path)
        out, err = command.communicate(200)
    assert command.wait() == 0, err
    found = json.loads(out)
    env = found.pop("env")
    assert [rank for rank, *_ in env] == ["0", "1", "2"]
    assert env in (
        [["0", "0", "2", "0"], ["1", "1", "2", "0"], ["2", "0", "1", "1"]],
        [["0", "0", "1", "0"], ["1", "0", "2", "1"], ["2", "1", "2", "1"]],
    )
    assert found == {
        "again": True,
        "bundles": [0, 2, 3],
        "held": True,
        "sums": [6, 6, 6],
        "grouped": True,
        "another": [3, 3, 3],
        "two each": 8,
        "refused": [
            "`bundles` has each index once, from 0 to 3, and at least one, not [4]",
            "`bundles` has each index once, from 0 to 3, and at least one, not []",
            "`nproc_per_bundle` is 1 or more, not 0",
        ],
        "pending": "Ray has not reserved the placement group within 0.2 s; `ray status` shows what is free",
        "left": [],
        "group": "CREATED",
    }
