"""Whole runs on a running cluster, as a person starts them: the command, its exit code, its words, its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from raylaunch.core import journal

pytestmark = [pytest.mark.ray, pytest.mark.timeout(150)]

ALL_REDUCE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), dist.get_rank()
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), "attempt", attempt)
"""


def test_survives_kills(launcher):
    """Workers killed in two attempts: the world comes back each time, the run ends well, stdout is rank 0's alone."""
    dies = (
        "if attempt < 2 and rank == 1 + attempt: os.kill(os.getpid(), 9)\ndist.barrier()\ndist.destroy_process_group()"
    )
    script = launcher.script(ALL_REDUCE + dies)
    run = launcher.run(entrypoint={"script": script}, max_restarts=2)
    assert run.code == 0, run.err
    assert run.out == "sum 4 attempt 0\nsum 4 attempt 1\nsum 4 attempt 2\n"
    assert "rank 1 on node-1 was killed by SIGKILL; restart 1 of 2" in run.err
    assert "rank 2 on node-" in run.err
    assert "all 4 workers finished" in run.err
    assert run.result["restarts"] == 2
    assert [len(attempt["roster"]) for attempt in run.result["attempts"]] == [2, 2, 2]
    assert run.log(3, attempt=3) == "sum 4 attempt 2\n"


def test_journal_replays(launcher):
    """The events of a real run, played again, give the same actions."""
    script = launcher.script(ALL_REDUCE + "if attempt == 0 and rank == 3: sys.exit(7)\ndist.barrier()")
    run = launcher.run(entrypoint={"script": script}, max_restarts=1)
    assert run.code == 0, run.err
    job, entries = journal.read((run.run_dir / "events.jsonl").read_text().splitlines())
    events = [entry.event for entry in entries if entry.event is not None]
    assert journal.replay(job, events) == entries
    assert len(entries) > 6


def test_one_root_cause(launcher):
    """Past the budget: exit code 1, and a report that names the rank, its exception with traceback, and its logs."""
    script = launcher.script(ALL_REDUCE + "if rank == 2: raise ValueError('loss is NaN')\ndist.barrier()")
    run = launcher.run(entrypoint={"script": script}, max_restarts=1)
    assert run.code == 1
    assert "error: rank 2 raised ValueError: loss is NaN (attempt 2)" in run.err
    assert "raise ValueError('loss is NaN')" in run.err
    assert "train.py" in run.err.split("error: rank 2")[1]
    assert "not restarted: the only restart is used" in run.err
    assert "as a consequence" in run.err
    assert run.result["cause"]["rank"] == 2
    assert Path(run.result["cause"]["stderr"]).read_text().count("ValueError: loss is NaN") == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "train.py`: No such file or directory"),
        ("print('never'\n", "SyntaxError"),
        ("import no_such_module\n", "No module named 'no_such_module'"),
    ],
    ids=["missing", "syntax", "import"],
)
def test_hopeless_stops_at_once(launcher, text, words):
    """A failure that a restart cannot mend spends none of the restarts, and says so."""
    if text is not None:
        launcher.script(text)
    run = launcher.run(entrypoint={"script": str(launcher.folder / "train.py")}, max_restarts=3)
    assert run.code == 1
    assert words in run.err
    assert "not restarted: a restart cannot mend" in run.err
    assert run.result["restarts"] == 0


def test_same_failure_thrice(launcher):
    """The same exception at the same place three times is the last, though the budget would allow more."""
    script = launcher.script("raise RuntimeError('no data')")
    run = launcher.run(entrypoint={"script": script}, max_restarts=9)
    assert run.code == 1
    assert "the same failure 3 times within 60 s" in run.err
    assert len(run.result["attempts"]) == 3


def test_what_cannot_be_placed(launcher):
    """More than the cluster has: after placement_timeout, exit code 3, what was asked and what each node has."""
    script = launcher.script("print('never')")
    run = launcher.run(entrypoint={"script": script}, nproc_per_node=64, placement_timeout=2)
    assert run.code == 3
    assert "0 of 2 nodes after 2 s" in run.err
    assert "asked: 2 x 64 workers (64 CPUs)" in run.err
    assert "4 of 4 CPUs free, 64 needed" in run.err
    assert run.out == ""


def test_plan_starts_nothing(launcher):
    """`--plan` says who would run where, what was assumed, and why a node would not do; there is no run folder."""
    script = launcher.script("print('never')")
    run = launcher.start(entrypoint={"script": script}, plan=True).wait()
    assert run.code == 0, run.err
    assert "would start 4 workers on 2 nodes" in run.out
    assert "gpus_per_worker: 0 (the nodes have no GPUs)" in run.out
    assert not list(launcher.folder.glob("runs"))
    run = launcher.start("placement=spread", entrypoint={"script": script}, plan=True).wait()
    assert "would wait: 1 of 2 nodes fit now" in run.out


def test_command_and_module(launcher):
    """A command runs as it is; a module runs as `python -m` would; both have torchrun's environment."""
    run = launcher.run(entrypoint={"command": "/bin/sh", "args": ["-c", "echo $RANK of $WORLD_SIZE at $LOCAL_RANK"]})
    assert run.code == 0, run.err
    assert run.log(3) == "3 of 4 at 1\n"
    launcher.script("import sys; print(__name__, sys.argv[1:])", name="pack.py")
    run = launcher.start(entrypoint={"module": "pack", "args": ["--lr", "3e-4"]}, log_dir="second/runs")
    run.folder = launcher.folder / "second"
    run.wait()
    assert run.code == 0, run.err
    assert run.out == "__main__ ['--lr', '3e-4']\n"


def test_function_of_a_config(launcher):
    """A function gets its arguments and a process group that is there before it and gone after it."""
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
    run = launcher.run(entrypoint={"function": "pack:main", "args": [3], "kwargs": {"scale": 0.5}})
    assert run.code == 0, run.err
    assert run.out == "gloo 6.0\n"


def test_show_all(launcher):
    """`show: all` prefixes each line with its rank; `show: none` shows nothing; the files have everything."""
    script = launcher.script("import os, sys; print('hello'); print('oops', file=sys.stderr)")
    run = launcher.run(entrypoint={"script": script}, show="all")
    assert sorted(run.out.splitlines()) == ["[0] hello", "[1] hello", "[2] hello", "[3] hello"]
    assert "[3] oops" in run.err


def test_wide_output(launcher):
    """Ten thousand lines of rank 0 arrive whole and in order."""
    script = launcher.script("import os\nfor i in range(10_000): print(i, 'x' * 50)")
    run = launcher.run(entrypoint={"script": script})
    assert run.code == 0
    assert run.out.splitlines() == [f"{i} {'x' * 50}" for i in range(10_000)]
    assert run.log(1) == run.out
