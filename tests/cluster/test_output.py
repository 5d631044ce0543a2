"""Output from workers to files and to the terminal: torchrun's options, complete, and never in the way."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from raylaunch.cluster.agent import agent as agent_module
from raylaunch.cluster.agent.agent import Outbox
from raylaunch.cluster.driver.run_folder import RunFolder
from raylaunch.core.job.job import Job
from raylaunch.node.logs.tail import LogOutput

pytestmark = pytest.mark.timeout(300)
ray = pytest.mark.ray


def output(size: int) -> LogOutput:
    return LogOutput(rank=0, stream="stdout", data=b"x" * size)


def test_events_go_at_once_but_the_last_after_all_output(monkeypatch):
    """A failure must not wait for much output; the end of the attempt must."""
    monkeypatch.setattr(agent_module, "_MOST_AT_ONCE", 100)
    box = Outbox()
    box.put_output([output(60) for _ in range(4)])
    box.put("failed", last=False)
    box.put("over", last=True)
    box.put("after", last=False)
    assert box.take(more_output=True) == (["failed"], [output(60)] * 2)
    assert box.take(more_output=True) == ([], [output(60)] * 2)
    assert not box.has_some(more_output=True)
    assert box.take(more_output=True) == ([], [])
    assert box.has_some(more_output=False)
    assert box.take(more_output=False) == (["over", "after"], [])
    assert not box.has_some(more_output=False)


def test_the_last_event_waits_for_output_of_later_messages(monkeypatch):
    """Even if nothing more is read."""
    monkeypatch.setattr(agent_module, "_MOST_AT_ONCE", 10)
    box = Outbox()
    box.put_output([output(10), output(10)])
    box.put("over", last=True)
    assert box.take(more_output=False) == ([], [output(10)])
    assert box.take(more_output=False) == (["over"], [output(10)])


def test_logs_are_not_read_while_the_driver_is_behind(monkeypatch):
    """What was not read stays in its file."""
    monkeypatch.setattr(agent_module, "_FULL", 100)
    box = Outbox()
    assert not box.full
    box.put_output([output(60), output(60)])
    assert box.full
    box.take(more_output=False)
    assert not box.full


HELLO = """
import os, sys
rank = os.environ["RANK"]
print("out", rank)
print("keep", rank)
print("err", rank, file=sys.stderr)
"""


@ray
def test_tee_redirects_and_filters(launcher):
    """Each stream of each rank has its own setting, on two nodes; the files have everything."""
    script = launcher.script(HELLO)
    run = launcher.run(
        entrypoint={"script": script},
        show="raw",
        tee="1:1",
        redirects="0:2",
        role="trainer",
        duplicate_stdout_filters=["keep"],
    )
    assert run.code == 0, run.err
    assert sorted(run.out.splitlines()) == [
        *("[trainer1]:keep 1", "[trainer1]:keep 3", "[trainer1]:out 1", "[trainer1]:out 3"),
        *("keep 0", "keep 2", "out 0", "out 2"),
    ]
    assert sorted(line for line in run.err.splitlines() if "raylaunch" not in line) == ["err 1", "err 3"]
    for rank in range(4):
        assert run.log(rank) == f"out {rank}\nkeep {rank}\n"
        assert run.log(rank, name="stderr.log") == f"err {rank}\n"
    filtered = (run.run_dir / "attempt-1" / "filtered_stdout.log").read_text()
    assert sorted(filtered.splitlines()) == ["[trainer1]:keep 1", "[trainer1]:keep 3"]


@ray
def test_torchruns_layout_keeps_the_logs_of_every_attempt(launcher):
    """`<log_dir>/<run id>_<random>/attempt_<from 0>/<rank>`, with our own files in the run's folder."""
    script = launcher.script(
        """
        import os, sys
        count = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print("attempt", count, os.environ["TORCHELASTIC_ERROR_FILE"])
        if int(count) < 2: raise ValueError(count)
        """
    )
    run = launcher.run(
        entrypoint={"script": script},
        nnodes=1,
        nproc_per_node=1,
        max_restarts=2,
        run_id="job7",
        log_dir="logs",
        log_layout="torchrun",
    )
    assert run.code == 0, run.err
    (folder,) = (launcher.folder / "logs").glob("*_*")
    assert re.fullmatch(r"job7_[0-9a-f]{8}", folder.name)
    assert f"logs in {folder}" in run.err
    logs = [folder / f"attempt_{index}" / "0" for index in range(3)]
    lines = [f"attempt {index} {path}/error.json\n" for index, path in enumerate(logs)]
    assert [(path / "stdout.log").read_text() for path in logs] == lines
    assert run.out == "".join(lines)
    assert [json.loads((path / "error.json").read_text())["message"]["message"] for path in logs[:2]] == [
        "ValueError: 0",
        "ValueError: 1",
    ]
    assert {path.name for path in folder.iterdir() if path.is_file()} == {
        *("job.yaml", "plan.json", "events.jsonl", "result.json", "report.html"),
    }
    job = Job(run_id="job7", log_dir=str(folder.parent), log_layout="torchrun")
    assert RunFolder.create(job, "job7", print).where != str(folder)


NOWHERE = """
import os, signal, sys, time
path = os.readlink("/proc/self/fd/1")
print(path, repr(os.environ["TORCHELASTIC_ERROR_FILE"]))
print("not shown", file=sys.stderr)
print("last words", end="")
if sys.argv[1] == "wait":
    time.sleep(280)
if sys.argv[1] == "fail" and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGABRT)
"""


@ray
@pytest.mark.parametrize(("how", "code"), [("fail", 1), ("wait", 130)])
def test_nothing_is_kept(launcher, until, how, code):
    """`log_dir: /dev/null`: output is shown, and nothing of the run is left on any disk."""
    script = launcher.script(NOWHERE)
    run = launcher.start(
        entrypoint={"script": script, "args": [how]}, log_dir="/dev/null", show="raw", redirects=2, tee="0:1"
    )
    if how == "wait":
        run.out = "".join(run.process.stdout.readline() for _ in range(4))
        run.process.send_signal(signal.SIGINT)
    shown = run.out
    run.wait()
    run.out = shown + run.out
    assert run.code == code, run.err
    paths = {Path(path) for path in re.findall(r"(\S+) ''$", run.out, re.MULTILINE)} - {Path()}
    paths = {Path(str(path).removeprefix("[default0]:")) for path in paths}
    assert len(paths) == 4 if how == "wait" else paths  # who fails may be quicker than the others
    assert run.out.count("last words") == (4 if how == "wait" else run.out.count(" ''"))
    assert "not shown" not in run.out
    assert "no logs are kept" in run.err
    assert "  logs of rank" not in run.err
    assert "  run folder:" not in run.err
    assert sorted(os.listdir(launcher.folder)) == ["job.yaml", "train.py"]
    until(lambda: not any(path.parents[2].exists() for path in paths), 100, "the temporary folders to be gone")


@ray
def test_many_ranks_with_many_lines(launcher):
    """32 ranks with 2,000 lines each: whole in the files, and with `tee` whole and in order on the terminal."""
    script = launcher.script(
        """
        import os, sys
        rank = os.environ["RANK"]
        for number in range(2_000):
            sys.stdout.write(f"{rank} {number} {'x' * 190}\\n")
            if number % 10 == 0: sys.stderr.write(f"{rank} {number}\\n")
        """
    )
    run = launcher.run(entrypoint={"script": script}, nproc_per_node=16, cpus_per_worker=0.1, show="raw", tee=3)
    assert run.code == 0, run.err[-2000:]
    shown: dict[tuple[str, str], list[str]] = {}
    for text in (run.out, run.err):
        for line in text.splitlines():
            if not line.startswith("raylaunch:"):
                header, rank, rest = re.fullmatch(r"(\[default\d+\]:)(\d+) (.*)", line).groups()
                assert header == f"[default{int(rank) % 16}]:"
                shown.setdefault((rank, "err" if text is run.err else "out"), []).append(rest)
    assert len(shown) == 64
    for rank in range(32):
        lines = [f"{number} {'x' * 190}" for number in range(2_000)]
        assert shown[str(rank), "out"] == lines
        assert shown[str(rank), "err"] == [str(number) for number in range(0, 2_000, 10)]
        assert run.log(rank) == "".join(f"{rank} {line}\n" for line in lines)


@ray
def test_a_slow_terminal_slows_no_worker(launcher, until):
    """The terminal is read only after the run: lines are whole, and missing ones are counted."""
    script = launcher.script(
        """
        import os, sys
        line = os.environ["RANK"] + "x" * 1022 + "\\n"
        for _ in range(64): sys.stdout.write(line * 256)
        """
    )
    run = launcher.start(entrypoint={"script": script}, show="raw", nnodes=1, nproc_per_node=4)
    until(lambda: list(launcher.folder.glob("runs/*/*/result.json")), 100, "the run to end")
    assert run.process.poll() is None
    run.wait()
    assert run.code == 0, run.err
    size = 64 * 256 * 1024
    assert [len(run.log(rank)) for rank in range(4)] == [size] * 4
    missing = sum(map(int, re.findall(r"raylaunch: (\d+) bytes of output are not shown", run.err)))
    missing += sum(map(int, re.findall(r"raylaunch: (\d+) bytes of rank", run.err)))
    assert missing > 0
    assert len(run.out) + missing == 4 * size
    assert {len(line) for line in run.out.splitlines()} == {1023}


@ray
def test_the_last_output_comes_before_the_report(launcher):
    """Even much output without a line end, of a worker that was killed right afterwards."""
    script = launcher.script(
        """
        import os, sys
        if os.environ["RANK"] == "3":
            sys.stderr.write("x" * 12_000_000 + "\\nlast words")
            os.kill(os.getpid(), 9)
        import time; time.sleep(280)
        """
    )
    run = launcher.run(entrypoint={"script": script}, show="all", shutdown_timeout=5, nnodes=1, nproc_per_node=4)
    assert run.code == 1
    told, report = run.err.split("error: ", 1)
    assert sum(map(len, re.findall("x{100,}", told))) == 12_000_000
    assert "\n[3] last words\n" in told
    assert "SIGKILL" in report


@ray
def test_a_reader_that_goes_away(launcher):
    """`| head -1`: the run goes on to its end."""
    script = launcher.script("import os\nfor number in range(10_000): print(os.environ['RANK'], number)")
    run = launcher.start(
        entrypoint={"script": script}, show="raw", nnodes=1, env={}
    )  # a new interpreter, which flushes
    assert run.process.stdout.readline()
    run.process.stdout.close()
    run.process.stdout = open(os.devnull)  # noqa: SIM115
    run.wait()
    assert run.code == 0, run.err
    assert run.log(1).count("\n") == 10_000
    assert "BrokenPipe" not in run.err
