"""The last words of a run, as golden texts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from raylaunch.cli.report import report
from raylaunch.core.failure import Failure, WorkerError
from raylaunch.core.result import Attempt, RunResult
from raylaunch.core.stacks import StackGroup

TRACE = """Traceback (most recent call last):
  File "/home/ana/train.py", line 88, in <module>
    main()
  File "/home/ana/train.py", line 61, in main
    raise ValueError("loss is NaN at step 3")
ValueError: loss is NaN at step 3
"""
BEGAN = "2026-01-01T00:00:00+00:00"
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:{port}"


@pytest.fixture(autouse=True)
def _in_kathmandu(monkeypatch) -> Iterator[None]:
    """Reports tell the time of day of whoever reads them."""
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def dead(rank: int, at: float, **more) -> Failure:
    folder = f"/home/ana/runs/train/7/attempt-2/rank-{rank}"
    body = {
        "attempt": 2,
        "node": f"node-{rank // 4 + 1}",
        "host": f"gpu-{rank // 4 + 1}",
        "rank": rank,
        "local_rank": rank % 4,
        "pid": 4000 + rank,
        "at": at,
        "exit_code": 1,
        "stdout": f"{folder}/stdout.log",
        "stderr": f"{folder}/stderr.log",
        "error_file": f"{folder}/error.json" if "error" in more or "spoilt" in more else "",
    }
    return Failure(**(body | more))


def raised(kind: str, message: str, trace: str = "", **more) -> dict[str, object]:
    return {"error": WorkerError(type=kind, message=message, traceback=trace, **more)}


def ended(
    why: str, failures: list[Failure], *, code: int = 1, cause: Failure | None = None, nodes: int = 2
) -> RunResult:
    roster = tuple(f"node-{number + 1}" for number in range(nodes))
    first = Attempt(
        number=1,
        roster=roster,
        launched_at=3.0,
        running_at=3.1,
        ended_at=12.4,
        why_launched="2 of 2 nodes; node-2 joined",
        why_ended="rank 1 on node-1 was killed by SIGKILL; restart 1 of 1",
        failures=(),
    )
    second = Attempt(
        number=2,
        roster=roster,
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
        addresses={node: f"10.0.0.{number + 1}" for number, node in enumerate(roster)},
        run_dir="/home/ana/runs/train/7",
        began=BEGAN,
    )


def failed(reason: str, cause: Failure, *others: Failure, nodes: int = 2) -> str:
    """The report of a run that ended by this."""
    why = f"rank {cause.rank} on {cause.node} {cause.what}; {reason}"
    return report(ended(why, [*others, cause], cause=cause, nodes=nodes))


NO_RESTARTS = "no restarts were allowed"


def test_exception(golden):
    """One exception on one rank, a peer's echo on others, and those we stopped: one cause, the rest grouped."""
    cause = dead(5, 19.9, **raised("ValueError", "loss is NaN at step 3", TRACE))
    echoes = [dead(rank, 19.95, **raised("RuntimeError", GLOO.format(port=rank))) for rank in (0, 1, 2, 4)]
    stopped = [dead(rank, 20.1, exit_code=-15, stopped=True) for rank in (3, 6, 7)]
    golden("report_exception", failed("the only restart is used", cause, *echoes, *stopped))


def test_three_nodes_at_once(golden):
    """The cause on one node, its echoes on two, heard in any order; one that was stopped at the end."""
    cause = dead(9, 19.900, **raised("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", TRACE))
    nccl = "NCCL communicator was aborted on rank {rank}."
    echoes = [
        dead(rank, 19.9 + rank / 100, **raised("DistBackendError", nccl.format(rank=rank)))
        for rank in range(12)
        if rank not in (7, 9)
    ]
    stopped = dead(7, 20.1, exit_code=-9, stopped=True)
    golden("report_three_nodes", failed("no restarts were allowed", cause, stopped, *echoes, nodes=3))


def test_signal(golden):
    """A death by signal: its name, and the end of its stderr in place of a traceback."""
    cause = dead(1, 19.0, exit_code=-11, tail="Fatal Python error: Segmentation fault\n\nCurrent thread: ...")
    golden("report_signal", failed(NO_RESTARTS, cause))


def test_exit_code(golden):
    """A worker that chose its own exit code."""
    golden("report_exit_code", failed("the same failure 3 times within 60 s", dead(0, 19.0, exit_code=7)))


def test_exit_code_of_a_shell(golden):
    """A command that passes on the death of its own child, with what that said."""
    tail = "./run.sh: line 3:  4711 Segmentation fault      python train.py"
    golden("report_shell", failed(NO_RESTARTS, dead(0, 19.0, exit_code=139, tail=tail)))


def test_import_error(golden):
    """The script cannot begin on a node that lacks a package."""
    trace = (
        'Traceback (most recent call last):\n  File "/home/ana/train.py", line 3, in <module>\n'
        "    import flash_attn\nModuleNotFoundError: No module named 'flash_attn'\n"
    )
    cause = dead(4, 12.7, **raised("ModuleNotFoundError", "No module named 'flash_attn'", trace))
    others = [replace(cause, rank=rank, local_rank=rank % 4, at=12.8) for rank in (5, 6, 7)]
    golden("report_import_error", failed("a restart cannot mend ModuleNotFoundError", cause, *others))


def test_missing_script(golden):
    """What could not begin has no traceback: its message says it all."""
    cause = dead(0, 12.5, **raised("CannotBeginError", "no script `tran.py` in /home/ana", hopeless=True))
    golden("report_missing_script", failed("a restart cannot mend that", cause))


def test_out_of_memory(golden):
    """Said because the kernel says so."""
    evidence = "out of memory: the kernel killed it at its container's limit, 63211 MiB resident"
    golden("report_out_of_memory", failed(NO_RESTARTS, dead(2, 19.0, exit_code=-9, evidence=evidence)))


def test_perhaps_out_of_memory(golden):
    """The kernel killed somebody, but does not say whom: the fact, and not more."""
    evidence = "the kernel killed 1 process of this container for lack of memory meanwhile"
    golden("report_perhaps_out_of_memory", failed(NO_RESTARTS, dead(2, 19.0, exit_code=-9, evidence=evidence)))


def test_killed_by_nobody_known(golden):
    """The same signal without evidence is only a kill."""
    golden("report_killed", failed(NO_RESTARTS, dead(2, 19.0, exit_code=-9)))


def test_malformed_error_file(golden):
    """Told beside the facts; the exit code is the worker's own."""
    cause = dead(1, 19.0, exit_code=3, spoilt="it is not JSON: Expecting value: line 1 column 1 (char 0)", tail="oh")
    golden("report_malformed_error_file", failed(NO_RESTARTS, cause))


def test_error_file_of_a_killed_worker(golden):
    """The file does not hide the signal, nor the signal the file."""
    cause = dead(1, 19.0, exit_code=-11, **raised("ValueError", "loss is NaN", TRACE, from_file=True))
    golden("report_killed_with_error_file", failed(NO_RESTARTS, cause))


def test_flat_error_file(golden):
    """Another writer's: a text of several lines, no traceback."""
    golden("report_flat_error_file", failed(NO_RESTARTS, dead(1, 19.0, **raised("error", "gave up\nat step 3"))))


def test_many_restarts(golden):
    """A long story is cut in the middle; all attempts with their reasons are in the log of events."""
    cause = dead(1, 1000.0, exit_code=7, attempt=40)
    killed = "rank 1 on node-1 was killed by SIGKILL"
    attempts = tuple(
        Attempt(
            number=number,
            roster=("node-1",),
            launched_at=number * 20.0,
            running_at=number * 20.0 + 0.1 if number != 3 else None,
            ended_at=number * 20.0 + 19.9,
            why_launched="",
            why_ended=f"{killed}; restart {number} of 39" if number < 40 else f"{killed}; all 39 restarts are used",
            failures=(cause,) if number == 40 else (),
        )
        for number in range(1, 41)
    )
    whole = ended("", [], cause=cause)
    why = f"rank 1 on node-1 {cause.what}; all 39 restarts are used"
    golden("report_many_restarts", report(replace(whole, attempts=attempts, restarts=39, why=why, seconds=1000.5)))


def test_nothing_is_kept(golden):
    """A run without a folder names no files; the end of stderr is there all the same."""
    cause = dead(1, 19.0, exit_code=3, stdout="", stderr="", tail="no such shard: 7")
    why = f"rank 1 on node-1 {cause.what}; {NO_RESTARTS}"
    golden("report_nothing_kept", report(replace(ended(why, [cause], cause=cause), run_dir="")))


def test_a_result_without_a_clock_still_tells_when():
    """Of a journal whose first line is lost."""
    cause = dead(1, 19.0, exit_code=7)
    text = report(replace(ended("", [cause], cause=cause), began=""))
    assert "\n  time      : 19.000 s of the run (6.500 s after its start)\n" in text


def test_the_cause_is_in_the_first_line_and_names_are_torchruns():
    """What people search logs for, spelled as torchrun spells it."""
    cause = dead(1, 19.0, exit_code=-11)
    lines = failed(NO_RESTARTS, cause).splitlines()
    assert lines[0] == "error: rank 1 was killed by SIGSEGV (attempt 2)"
    for line in (
        "  time      : 2026-01-01_05:45:19 (6.500 s after its start)",
        "  rank      : 1 (local_rank: 1)",
        "  exitcode  : -11 (pid: 4001) (SIGSEGV)",
        "  error_file: <N/A>",
        "  traceback : Signal 11 (SIGSEGV) received by PID 4001",
    ):
        assert line in lines


def test_finished(golden):
    """A run that survived a kill: each attempt, and the price of the restart."""
    golden("report_finished", report(ended("all 8 workers finished", [], code=0)))


TORCH = "/venv/lib/python3.11/site-packages/torch"
REDUCE = StackGroup(
    ranks=(0, 1, 2, 4, 5, 6, 7),
    frames=(
        f"{TORCH}/distributed/distributed_c10d.py:3252 in all_reduce",
        f"{TORCH}/distributed/c10d_logger.py:83 in wrapper",
        "/home/ana/train.py:41 in main",
        "/home/ana/train.py:88 in <module>",
    ),
)
HUNG = {"exit_code": -9, "hung": "no step for 2.1 s, at train.py:33 in fetch", "hung_at": "/home/ana/train.py:33"}


def hung(cause: Failure, groups: tuple[StackGroup, ...], **facts) -> str:
    others = [dead(rank, 20.1, exit_code=-15, stopped=True) for rank in range(8) if rank != cause.rank]
    why = f"rank {cause.rank} on {cause.node} {cause.what}; the only restart is used"
    whole = ended(why, [*others, cause], cause=cause)
    first, last = whole.attempts
    attempts = (
        replace(first, world_size=8, steps=120, first_step=0, last_step=119),
        replace(last, world_size=8, steps=30, lost_steps=3, pause=0.9, stacks=groups),
    )
    return report(replace(whole, attempts=attempts, **facts))


def test_a_hang(golden):
    """Who hung, where, and what the others waited in."""
    fetch = StackGroup(ranks=(3,), frames=("/home/ana/train.py:33 in fetch", "/home/ana/train.py:88 in <module>"))
    golden("report_hung", hung(dead(3, 17.4, **HUNG), (fetch, REDUCE)))


def test_a_hang_of_a_stopped_process(golden):
    """It could not say where it was; what is written to stderr before does not matter."""
    group = StackGroup(ranks=(3,), frames=(), note="stopped by a signal")
    cause = dead(3, 17.4, exit_code=-9, hung="no step for 2.1 s, stopped by a signal", stdout="", stderr="")
    golden("report_hung_stopped", hung(cause, (group, REDUCE)))


def test_stacks_of_many_kinds_are_cut():
    """The file has them all, where one is kept; deep ones are cut too."""
    deep = tuple(f"/home/ana/train.py:{line} in f{line}" for line in range(15))
    groups = tuple(StackGroup(ranks=(rank,), frames=deep[rank:]) for rank in range(10))
    text = hung(dead(0, 17.4, **HUNG), groups)
    assert "      /home/ana/train.py:11 in f11\n      ... 3 calls more\n" in text
    assert "    ... 2 groups more: stacks.txt has them all\n" in text
    assert "    ... 2 groups more\n" in hung(dead(0, 17.4, **HUNG), groups, run_dir="")


def test_an_elastic_run(golden):
    """Its timeline: how large each world was, how far it came and what the change cost."""
    whole = ended("all 12 workers finished", [], code=0)
    first, last = whole.attempts
    third = replace(last, number=3, why_ended="", world_size=12, steps=40, lost_steps=0, pause=0.4)
    never = replace(last, running_at=None, world_size=4, why_ended="node-3 joined")
    first = replace(first, world_size=8, steps=1, why_ended="node-2 was lost: nothing was heard of it for 5 s")
    golden("report_elastic", report(replace(whole, attempts=(first, never, third), restarts=2)))


def test_unavailable(golden):
    """Nodes that did not come: what was asked, and what each node has."""
    why = "1 of 2 nodes after 300 s\nasked: 2 x 8 workers (8 GPUs and 8 CPUs), each on a node of its own\nfits now: 1 of 2"
    golden("report_unavailable", report(ended(why, [], code=3)))


def test_stopped(golden):
    """A run stopped by a person is not called an error."""
    golden("report_stopped", report(ended("stopped by SIGINT", [], code=130)))
