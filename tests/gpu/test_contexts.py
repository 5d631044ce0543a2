"""Who has a CUDA context: workers, and nobody else; and after their end nobody."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.gpu import gpu_runs
from tests.gpu.gpu_runs import holders, wait_until
from tests.private_cluster import marked

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(110)]


def up(launch, **job):
    """Start ranks that stay, and return their run and their process ids."""
    run = launch("look.py", "stay", **job)
    wanted = gpu_runs.count()
    wait_until(lambda: len(run.notes("look")) == wanted or run.process.poll() is not None, 90, "the ranks")
    assert run.process.poll() is None, run.err[-4000:]
    return run, [note["pid"] for note in run.notes("look")]


def test_only_workers_hold_the_gpu(launch, record_property):
    """While a run goes on, workers are the only processes of it with the GPU's device open, also for nvidia-smi."""
    run, workers = up(launch)
    titles = {pid: gpu_runs.command_line(pid) for pid in holders(run.mark)}
    assert sorted(titles) == sorted(workers), titles
    listed = [pid for pid, _ in gpu_runs.smi()]
    assert not set(listed) & (set(marked(run.mark)) - set(workers)), listed
    assert "fresh interpreters" not in run.err, "to import torch made it unsafe to fork workers"
    record_property("nvidia-smi lists", f"{len(set(listed) & set(workers))} of {len(workers)} workers")
    record_property("processes of the run", len(marked(run.mark)))
    (run.folder / "leave").touch()
    run.wait()
    assert holders(run.mark) == []


def test_checkpoints_are_written_without_the_gpu(launch, tmp_path):
    """The process that writes checkpoints of `State` does not have the GPU's device open."""
    folder = tmp_path / "checkpoints"
    run = launch("keeps_state.py", "1e8", "6", max_restarts=1, durable=str(folder), durable_every=0)
    seen = set()
    while run.process.poll() is None:
        seen |= {gpu_runs.command_line(pid) for pid in holders(run.mark)} - {""}
        time.sleep(0.02)
    assert run.process.returncode == 0, run.err[-4000:]
    assert list(folder.iterdir())
    assert [line for line in seen if "raylaunch: keeps_state.py rank" not in line] == []


def test_a_module_that_asks_for_cuda(launch, record_property):
    """Workers can use the GPU though a preloaded module has called `torch.cuda.is_available()`."""
    preload = ["torch", "asks_for_cuda"]
    run = launch("look.py", preload=preload, env={"PYTHONPATH": str(gpu_runs.SCRIPTS)}).wait()
    assert len(run.notes("look")) == gpu_runs.count()
    assert "cannot preload" not in run.err, run.err
    record_property("workers are", "fresh" if "fresh interpreters" in run.err else "forked")


@pytest.mark.parametrize("who", ["fork server", "driver", "everything but the workers"])
def test_nothing_is_left_on_the_gpu(launch, record_property, who):
    """After kill -9 of the fork server, of the driver, or of all but the workers, the GPU is free within seconds."""
    run, workers = up(launch, max_restarts=1)
    words = {"fork server": ["raylaunch: fork server"], "driver": ["job.json"]}
    for word in words.get(who, ["raylaunch: fork server", "raylaunch: subreaper", "job.json"]):
        for pid in set(run.processes(word)) - set(workers):
            os.kill(pid, signal.SIGKILL)
    seconds = wait_until(lambda: not set(holders(run.mark)) & set(workers), 30, f"the workers' end: {who}")
    record_property("until the GPU was free", f"{seconds:.2f} s")
    if who == "fork server":
        wait_until(lambda: any(note["attempt"] == 2 for note in run.notes("look")), 60, "the second attempt")
        (run.folder / "leave").touch()
        run.wait()
    else:
        run.process.wait(30)
        wait_until(lambda: not marked(run.mark), 30, "the end of the rest")


def test_an_agent_is_killed(launch, cluster, record_property):
    """On a cluster, kill -9 of the agent frees the GPU, and another agent runs the next attempt on it."""
    run, workers = up(launch, cluster=cluster)
    (agent,) = [pid for pid in marked(cluster.mark) if "raylaunch: agent" in gpu_runs.command_line(pid)]
    os.kill(agent, signal.SIGKILL)
    seconds = wait_until(lambda: not set(holders(run.mark)) & set(workers), 30, "the workers' end")
    record_property("until the GPU was free", f"{seconds:.2f} s")
    wait_until(lambda: any(note["attempt"] == 2 for note in run.notes("look")), 60, "the second attempt")
    (run.folder / "leave").touch()
    run.wait()
