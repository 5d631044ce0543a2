"""What an agent is told, and the specification of a worker, which its node makes of that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raylaunch.core.job.job import Entrypoint, Job
from raylaunch.core.placement.environment import Assignment, Rendezvous
from raylaunch.core.placement.plan import NodeFacts, make_plan, settled
from raylaunch.node.protocol.node_spec import AgentSpec, NodeSpec

COMMAND = Job(entrypoint=Entrypoint(command="true"), gpus_per_worker=0)
MEETING = Rendezvous(master_addr="10.0.0.7", master_port=1, run_id="run", max_restarts=0, restart_count=0)


def agent(job: Job, run_dir: str = "/runs") -> AgentSpec:
    return AgentSpec(job=job, run_dir=run_dir, address=None, submitter_env={}, cwd="/", ray_address="")


def node(told: AgentSpec, env: dict[str, str], **more: Any) -> NodeSpec:
    files: dict[str, Any] = {"cwd": "/", "run_dir": "/runs/a/1", "page": "/page", "fast_dir": "/files"}
    return NodeSpec(agent=told, address="10.0.0.7", env=env, **files, **more)


@pytest.mark.parametrize(
    ("gpus", "settings", "backend", "each"),
    [
        ([8], {"nproc_per_node": 8}, None, 1),
        ([8], {"nproc_per_node": 16}, "gloo", 0),
        ([1], {"nproc_per_node": 4}, "gloo", 0),
        ([8], {"nproc_per_node": 8, "gpus_per_worker": 0}, "gloo", 0),
        ([1], {"nproc_per_node": 2, "gpus_per_worker": 0.5}, "gloo", 0.5),
        ([8], {"nproc_per_node": 4, "gpus_per_worker": 2}, None, 2),
        ([8, 0], {"nproc_per_node": 2, "nnodes": 2, "gpus_per_worker": 0}, "gloo", 0),
        ([8, 0], {"nprocs": 2, "nnodes": 1}, None, 1),
        ([1], {"nproc_per_node": 2, "gpus_per_worker": 0, "backend": "nccl"}, "nccl", 0),
    ],
)
def test_the_backend_of_functions(gpus, settings, backend, each):
    """NCCL needs a GPU for each rank, whatever GPUs a worker may see. None: that of the device, nccl for CUDA."""
    nodes = [
        NodeFacts(node_id=f"id-{number}", address=f"10.0.0.{number}", cpus=32, gpus=has, free_cpus=32, free_gpus=has)
        for number, has in enumerate(gpus)
    ]
    job = Job(entrypoint=Entrypoint(function="work:train"), **settings)
    told = agent(settled(job, make_plan(job, nodes, local=False)))
    assert (told.backend, told.gpus_per_worker) == (backend, each)


@pytest.mark.parametrize("nhosts", [1, 2])
def test_the_interface_is_told_only_in_a_world_of_several_hosts(nhosts):
    """A world may span several hosts in one attempt, and not in the next."""
    spec = node(agent(COMMAND), {"A": "1"}, interface_env={"GLOO_SOCKET_IFNAME": "eth0"})
    part = Assignment(
        attempt=1, node="node-1", node_rank=0, nnodes=2, base_rank=0, nproc=1, world_size=2, nhosts=nhosts
    )
    env = spec.worker(part, 0, MEETING).env
    assert env["A"] == "1"
    assert env.get("GLOO_SOCKET_IFNAME") == ("eth0" if nhosts > 1 else None)


@pytest.mark.parametrize("kept", [True, False])
def test_the_run_folder_is_told_if_files_are_kept(kept):
    """Also where a worker of another run has started this one."""
    entry = Entrypoint(script="/home/me/train.py", args=["--key", "secret"])
    told = agent(replace(COMMAND, entrypoint=entry, name="charlm"), run_dir="/runs/a/1" if kept else "")
    part = Assignment(attempt=1, node="node-1", node_rank=0, nnodes=1, base_rank=2, nproc=2, world_size=4)
    worker = node(told, {"RAYLAUNCH_RUN_DIR": "/runs/of/another"}).worker(part, 1, MEETING)
    assert worker.env.get("RAYLAUNCH_RUN_DIR") == ("/runs/a/1" if kept else None)
    assert worker.title == "raylaunch: train.py rank 3 of 4 (charlm)"


def test_the_gpus_of_the_node_are_told_beside_the_worker_s_own():
    """With `virtual_local_rank` its environment names its own only, and the choice of CPUs needs all."""
    env = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    spec = node(agent(replace(COMMAND, virtual_local_rank=True, gpus_per_worker=2)), env)
    part = Assignment(attempt=1, node="node-1", node_rank=0, nnodes=1, base_rank=0, nproc=2, world_size=2)
    worker = spec.worker(part, 1, MEETING)
    assert (worker.env["CUDA_VISIBLE_DEVICES"], worker.env["LOCAL_RANK"]) == ("6,7", "0")
    assert (worker.local_rank, worker.gpus, worker.node_devices) == (1, range(2, 4), env)
