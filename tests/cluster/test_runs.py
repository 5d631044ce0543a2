"""Whole runs on a running cluster, as a person starts them: the command, exit code, output and folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from raylaunch.core.record import journal

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

ALL_REDUCE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), "attempt", attempt)
"""


def test_survives_kills(launcher):
    """Workers killed in two attempts: all ranks start again, the run succeeds, stdout has only rank 0's output.

    Played again, the events give the same actions.
    """
    # Not before all have printed: they are stopped at once when one dies.
    dies = "dist.barrier()\nif attempt < 2 and rank == attempt: os.kill(os.getpid(), 9)\n"
    dies += "dist.barrier()\ndist.destroy_process_group()"
    script = launcher.script(ALL_REDUCE + dies)
    run = launcher.run(entrypoint={"script": script}, nproc_per_node=1, max_restarts=2)
    assert run.code == 0, run.err
    assert run.out == "sum 2 attempt 0\nsum 2 attempt 1\nsum 2 attempt 2\n"
    for number in (1, 2):  # whoever is heard of first: the one that was killed, or one that lost it
        assert re.search(rf"rank \d on node-\d .*; restart {number} of 2", run.err)
    assert "all 2 workers finished" in run.err
    assert run.result["restarts"] == 2
    assert [len(attempt["roster"]) for attempt in run.result["attempts"]] == [2, 2, 2]
    assert run.log(1, attempt=3) == "sum 2 attempt 2\n"
    job, entries = journal.read((run.run_dir / "events.jsonl").read_text().splitlines())
    events = [entry.event for entry in entries if entry.event is not None]
    assert journal.replay(job, events) == entries
    assert len(entries) > 6


def test_one_root_cause(launcher):
    """No restarts left: exit code 1, and a report that names the rank, its exception with traceback, and its logs."""
    script = launcher.script(ALL_REDUCE + "if rank == 1: raise ValueError('loss is NaN')\ndist.barrier()")
    run = launcher.run(entrypoint={"script": script}, nnodes=1, nproc_per_node=2, max_restarts=1)
    assert run.code == 1
    assert "error: rank 1 raised ValueError: loss is NaN (attempt 2)" in run.err
    assert "raise ValueError('loss is NaN')" in run.err
    assert "train.py" in run.err.split("error: rank 1")[1]
    assert "not restarted: the only restart is used" in run.err
    assert "as a consequence" in run.err
    assert run.result["cause"]["rank"] == 1
    assert Path(run.result["cause"]["stderr"]).read_text().count("ValueError: loss is NaN") == 1


def test_a_failure_that_no_restart_can_mend(launcher):
    """It spends no restart, and the report says so."""
    run = launcher.run(entrypoint={"script": launcher.script("import no_such_module")}, nnodes=1, max_restarts=3)
    assert (run.code, run.result["resume"]) == (93, "pointless")
    assert "No module named 'no_such_module'" in run.err
    assert "not restarted: a restart cannot mend" in run.err
    assert run.result["restarts"] == 0


def test_the_same_failure_three_times(launcher):
    """The same exception at the same place for the third time ends the run, though restarts are left."""
    script = launcher.script("raise RuntimeError('no data')")
    run = launcher.run(entrypoint={"script": script}, nnodes=1, max_restarts=9)
    assert run.code == 93
    assert "the same failure 3 times within 60 s" in run.err
    assert len(run.result["attempts"]) == 3


def test_what_cannot_be_placed(launcher):
    """More than the cluster has: after placement_timeout exit code 3, what was requested and what each node has."""
    script = launcher.script("print('never')")
    run = launcher.run(entrypoint={"script": script}, nproc_per_node=64, placement_timeout=2)
    assert run.code == 3
    assert "0 of 2 nodes after 2 s" in run.err
    assert "requested: 2 nodes with 64 workers each (64 CPUs per node)" in run.err
    assert "4 of 4 CPUs free, 64 needed" in run.err
    assert "it could start now with `cpus_per_worker=0` or `nproc_per_node=2`" in run.err
    assert run.out == ""


def test_gpus_that_a_cluster_cannot_have(launcher):
    """Without an autoscaler nobody adds any: to wait would be in vain."""
    script = launcher.script("print('never')")
    run = launcher.run(entrypoint={"script": script}, gpus_per_worker=1)
    assert run.code == 3
    assert "no node of the cluster has any, and there is no autoscaler that could add one" in run.err
    assert "with `gpus_per_worker: 0` it runs on CPUs" in run.err
    assert "requesting" not in run.err


def test_plan_starts_nothing(launcher):
    """`--plan` prints the placement, the assumptions, and why nodes are skipped; there is no run folder."""
    script = launcher.script("print('never')")
    run = launcher.start(entrypoint={"script": script}, plan=True).wait()
    assert run.code == 0, run.err
    assert "would start 4 workers on 2 nodes" in run.out
    assert "gpus_per_worker: 0 (the nodes have no GPUs)" in run.out
    assert not list(launcher.folder.glob("runs"))
    run = launcher.start("placement=spread", entrypoint={"script": script}, plan=True).wait()
    assert "cannot start: there is no room for 2 nodes like this" in run.out
    assert run.code == 3


def test_a_module(launcher):
    """It runs as by `python -m`; each rank's output goes where the job says."""
    launcher.script("import os, sys; print(__name__, sys.argv[1:]); print('oops', file=sys.stderr)", name="pack.py")
    run = launcher.run(entrypoint={"module": "pack", "args": ["--lr", "3e-4"]}, log_dir="second/runs", show="all")
    assert run.code == 0, run.err
    assert sorted(run.out.splitlines()) == [f"[{rank}] __main__ ['--lr', '3e-4']" for rank in range(4)]
    assert "[3] oops" in run.err
    (log,) = launcher.folder.glob("second/runs/*/latest/attempt-1/rank-3/stderr.log")
    assert log.read_text() == "oops\n"


def test_function_of_a_config(launcher):
    """A function gets its arguments, and a process group that is made before and destroyed after it."""
    launcher.script(
        """
        import torch, torch.distributed as dist
        def main(steps, *, scale=1.0):
            total = torch.full((1,), scale * steps)
            dist.all_reduce(total)
            print(dist.get_backend(), total.item())
        """,
        name="pack.py",
    )
    function = {"function": "pack:main", "args": [3], "kwargs": {"scale": 0.5}}
    run = launcher.run(entrypoint=function, nnodes=1, nproc_per_node=2)
    assert run.code == 0, run.err
    assert run.out == "gloo 3.0\n"
