"""The specification of a worker, made from that of its node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raylaunch.core.placement.environment import Assignment, Rendezvous
from raylaunch.node.protocol.messages import LaunchWorkers
from raylaunch.node.protocol.node_spec import NodeSpec, WorkerTemplate


@pytest.mark.parametrize("nhosts", [1, 2])
def test_the_interface_is_told_only_in_a_world_of_several_hosts(nhosts):
    """A world may span several hosts in one attempt, and not in the next."""
    template = WorkerTemplate(
        run_dir="/runs", kind="command", target="true", args=(), env={}, backend=None, preload=(), start_method="fork"
    )
    spec = NodeSpec(
        template=template,
        node="node-1",
        address="10.0.0.7",
        env={"A": "1"},
        interface_env={"GLOO_SOCKET_IFNAME": "eth0"},
        cwd="/",
        run_dir="/runs",
        page="/page",
        fast_dir="/files",
    )
    part = Assignment(
        attempt=1, node="node-1", node_rank=0, nnodes=2, base_rank=0, nproc=1, world_size=2, nhosts=nhosts
    )
    meeting = Rendezvous(master_addr="10.0.0.7", master_port=1, run_id="run", max_restarts=0, restart_count=0)
    env = spec.worker(part, 0, meeting).env
    assert env["A"] == "1"
    assert env.get("GLOO_SOCKET_IFNAME") == ("eth0" if nhosts > 1 else None)


@pytest.mark.parametrize("kept", [True, False])
def test_the_run_folder_is_told_if_files_are_kept(kept):
    """Also where a worker of another run has started this one."""
    template = WorkerTemplate(
        run_dir="/runs", kept=kept, kind="script", target="/home/me/train.py", name="charlm",
        args=("--key", "secret"), env={}, backend=None, preload=(), start_method="fork",
    )  # fmt: skip
    env = {"RAYLAUNCH_RUN_DIR": "/runs/of/another"}
    spec = NodeSpec(
        template=template,
        node="node-1",
        address="10.0.0.7",
        env=env,
        cwd="/",
        run_dir="/runs/a/1",
        page="/page",
        fast_dir="/files",
    )
    part = Assignment(attempt=1, node="node-1", node_rank=0, nnodes=1, base_rank=2, nproc=2, world_size=4)
    meeting = Rendezvous(master_addr="10.0.0.7", master_port=1, run_id="run", max_restarts=0, restart_count=0)
    worker = spec.worker(part, 1, meeting)
    assert worker.env.get("RAYLAUNCH_RUN_DIR") == ("/runs/a/1" if kept else None)
    assert worker.title == "raylaunch: train.py rank 3 of 4 (charlm)"


def test_the_gpus_of_the_node_are_told_beside_the_worker_s_own():
    """With `virtual_local_rank` its environment names its own only, and the choice of CPUs needs all."""
    template = WorkerTemplate(
        run_dir="/runs", kind="command", target="true", args=(), env={}, backend=None, preload=(), start_method="fork"
    )
    template = replace(template, virtual_local_rank=True, gpus_per_worker=2)
    env = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    spec = NodeSpec(
        template=template, node="node-1", address="", env=env, cwd="/", run_dir="/runs", page="/page", fast_dir="/files"
    )
    part = Assignment(attempt=1, node="node-1", node_rank=0, nnodes=1, base_rank=0, nproc=2, world_size=2)
    meeting = Rendezvous(master_addr="", master_port=1, run_id="run", max_restarts=0, restart_count=0)
    worker = spec.worker(part, 1, meeting)
    assert (worker.env["CUDA_VISIBLE_DEVICES"], worker.env["LOCAL_RANK"]) == ("6,7", "0")
    assert (worker.local_rank, worker.gpus, worker.node_devices) == (1, range(2, 4), env)


@pytest.mark.parametrize(("awaits", "expected"), [(True, "3"), (False, None)])
def test_workers_are_told_for_which_attempt_they_wait_for_files(awaits, expected):
    """A survivor is told only what changes from one attempt to the next, and may have to wait in both."""
    template = WorkerTemplate(
        run_dir="/runs", kind="script", target="", args=(), env={}, backend=None, preload=(), start_method="fork"
    )
    spec = NodeSpec(
        template=template, node="node-1", address="", env={}, cwd="/", run_dir="/runs", page="/page", fast_dir="/files"
    )
    part = Assignment(attempt=3, node="node-1", node_rank=0, nnodes=1, base_rank=0, nproc=1, world_size=1)
    meeting = Rendezvous(master_addr="", master_port=1, run_id="run", max_restarts=0, restart_count=0)
    (worker,) = spec.workers(LaunchWorkers(assignment=part, rendezvous=meeting, awaits_files=awaits))
    assert worker.env.get("RAYLAUNCH_AWAITS_FILES") == expected
