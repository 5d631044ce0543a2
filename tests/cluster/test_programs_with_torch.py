"""Programs that use Ray, whose own actors use torch: `rank_env`, and examples."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.test_worker_group import outcome, torch_env
from tests.private_cluster import Cluster, private_cluster

__all__ = ["torch_env"]

pytestmark = [pytest.mark.ray, pytest.mark.own_cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes, whose actors and drivers find torch imported, which takes each of them 2 s of CPU."""
    with private_cluster(cpus=2, lean=True, imports=("torch.distributed", "torch.nn.parallel")) as found:
        found.add_node(cpus=2)
        yield found


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


def test_actors_of_the_caller_become_ranks(launcher) -> None:
    """On two nodes: they form a process group, and another one that rank 0 serves; the port was theirs all the time."""
    done = launcher.python(launcher.script(PROGRAM, "program.py"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
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


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_reinforcement_learning_goes_on(launcher, torch_env):
    """The example gets the same reward where a rank of the policy and an actor of its own are killed."""
    done = launcher.python(str(EXAMPLES / "rl_catch.py"), "--iterations", "6", "--kill", env=torch_env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a rank has died: resuming after iteration 3" in done.stdout
    first, second = re.findall(r"final reward ([\d.]+)", done.stdout)
    assert first == second


def test_an_adapter_has_the_methods_of_verl(launcher, torch_env):
    """Its program ends with the same loss where a rank is killed."""
    done = launcher.python(str(EXAMPLES / "verl_adapter.py"), "--steps", "6", "--kill", env=torch_env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(set(re.findall(r"final loss ([\d.]+)", done.stdout))) == 1
    assert "restart 1 of 3" in done.stderr

    program = """
    sys.path.insert(0, os.environ["EXAMPLES"])
    import cloudpickle, verl_adapter
    cloudpickle.register_pickle_by_value(verl_adapter)  # the ranks cannot import it

    class Worker(Counter):
        modes = ["ONE_TO_ALL", "ALL_TO_ALL", "DP_COMPUTE", "RANK_ZERO"]
        one, many, own, zero = [verl_adapter.register(mode)(lambda self, value: (self.rank, value)) for mode in modes]
        later = verl_adapter.register("ONE_TO_ALL", blocking=False)(lambda self: self.count)

    ray.init(log_to_driver=False, logging_level="ERROR")
    pool = verl_adapter.RayResourcePool([2], use_gpu=False, max_colocate_count=2)
    group = verl_adapter.RayWorkerGroup(pool, verl_adapter.RayClassWithInitArgs(Worker, 1, step=3))
    found = {
        "size": group.world_size,
        "one": group.one([1, 2]),
        "many": [group.many(["a", "b"]), group.own(value=["a", "b"])],
        "zero": group.zero("x"),
        "later": group.later().get(),
        "all": [group.execute_all_sync("one", ["a", "b"]), group.execute_all_async("one", "ab").get()],
        "first": [group.execute_rank_zero_sync("add", 2), group.execute_rank_zero_async("add", 2).get()],
    }
    group.group.close()
    pool.remove()
    print(json.dumps(found))
    """
    assert outcome(launcher, program, EXAMPLES=str(EXAMPLES), **torch_env) == {
        "size": 2,
        "one": [[0, [1, 2]], [1, [1, 2]]],
        "many": [[[0, "a"], [1, "b"]]] * 2,
        "zero": [0, "x"],
        "later": [1, 1],
        "all": [[[0, "a"], [1, "b"]], [[0, "ab"], [1, "ab"]]],
        "first": [7, 13],
    }
