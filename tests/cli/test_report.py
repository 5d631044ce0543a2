"""The last words of a run, as golden texts."""

from __future__ import annotations

from raylaunch.cli.report import report
from raylaunch.core.failure import Failure, WorkerError
from raylaunch.core.result import Attempt, RunResult

TRACE = """Traceback (most recent call last):
  File "/home/ana/train.py", line 88, in <module>
    main()
  File "/home/ana/train.py", line 61, in main
    raise ValueError("loss is NaN at step 3")
ValueError: loss is NaN at step 3
"""
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:{port}"


def dead(rank: int, at: float, **more) -> Failure:
    body = {
        "attempt": 2,
        "node": f"node-{rank // 4 + 1}",
        "rank": rank,
        "local_rank": rank % 4,
        "pid": 4000 + rank,
        "at": at,
        "exit_code": 1,
        "stdout": f"/home/ana/runs/train/7/attempt-2/rank-{rank}/stdout.log",
        "stderr": f"/home/ana/runs/train/7/attempt-2/rank-{rank}/stderr.log",
    }
    return Failure(**(body | more))


def ended(why: str, failures: list[Failure], *, code: int = 1, cause: Failure | None = None) -> RunResult:
    first = Attempt(
        number=1,
        roster=("node-1", "node-2"),
        launched_at=3.0,
        running_at=3.1,
        ended_at=12.4,
        why_launched="2 of 2 nodes; node-2 joined",
        why_ended="rank 1 on node-1 was killed by SIGKILL; restart 1 of 1",
        failures=(),
    )
    second = Attempt(
        number=2,
        roster=("node-1", "node-2"),
        launched_at=12.4,
        running_at=12.5,
        ended_at=20.0,
        why_launched=first.why_ended,
        why_ended=why,
        failures=tuple(failures),
    )
    return RunResult(
        exit_code=code,
        why=why,
        seconds=20.3,
        restarts=1,
        attempts=(first, second),
        cause=cause,
        addresses={"node-1": "10.0.0.1", "node-2": "10.0.0.2"},
        run_dir="/home/ana/runs/train/7",
    )


def test_exception(golden):
    """One exception on one rank, a peer's echo on others, and those we stopped: one cause, the rest grouped."""
    error = WorkerError(type="ValueError", message="loss is NaN at step 3", traceback=TRACE)
    cause = dead(5, 19.9, error=error)
    echoes = [
        dead(rank, 19.95, error=WorkerError(type="RuntimeError", message=GLOO.format(port=rank), traceback=""))
        for rank in (0, 1, 2, 4)
    ]
    stopped = [dead(rank, 20.1, exit_code=-15, stopped=True) for rank in (3, 6, 7)]
    why = f"rank 5 on node-2 {cause.what}; the only restart is used"
    golden("report_exception", report(ended(why, [*echoes, cause, *stopped], cause=cause)))


def test_signal(golden):
    """A death by signal: its name, and the end of its stderr in place of a traceback."""
    cause = dead(1, 19.0, exit_code=-11, tail="Fatal Python error: Segmentation fault\n\nCurrent thread: ...")
    why = f"rank 1 on node-1 {cause.what}; no restarts were allowed"
    golden("report_signal", report(ended(why, [cause], cause=cause)))


def test_exit_code(golden):
    """A worker that chose its own exit code."""
    cause = dead(0, 19.0, exit_code=7)
    why = f"rank 0 on node-1 {cause.what}; the same failure 3 times within 60 s"
    golden("report_exit_code", report(ended(why, [cause], cause=cause)))


def test_finished(golden):
    """A run that survived a kill: each attempt, and the price of the restart."""
    golden("report_finished", report(ended("all 8 workers finished", [], code=0)))


def test_unavailable(golden):
    """Nodes that did not come: what was asked, and what each node has."""
    why = "1 of 2 nodes after 300 s\nasked: 2 x 8 workers (8 GPUs and 8 CPUs), each on a node of its own\nfits now: 1 of 2"
    golden("report_unavailable", report(ended(why, [], code=3)))


def test_stopped(golden):
    """A run stopped by a person is not called an error."""
    golden("report_stopped", report(ended("stopped by SIGINT", [], code=130)))
