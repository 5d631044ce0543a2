"""Dumps of torch's Flight Recorder: how one is asked for, and that a file of another form does no harm."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raylaunch.core.failures.stacks import GroupCalls
from raylaunch.node.supervisor.stack_dumps import FlightRecorder


def entry(number: int, state: str = "completed", **more: Any) -> dict[str, Any]:
    return {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce",
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
    } | more


class Asked:
    """A worker that may be asked."""

    def __init__(self, folder: Path) -> None:
        os.mkfifo(folder / "recorder-3.pipe")
        self.pipe = os.open(folder / "recorder-3.pipe", os.O_RDONLY | os.O_NONBLOCK)
        self.dump = folder / "dump-3"
        self.dump.write_bytes(pickle.dumps({"entries": [entry(99)]}))  # from before
        os.utime(self.dump, ns=(1, 1))
        self.recorder = FlightRecorder(str(folder / "recorder-3.pipe"), str(self.dump))


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Asked]:
    found = Asked(tmp_path)
    yield found
    os.close(found.pipe)


def test_a_worker_is_asked_and_what_it_writes_then_is_read(asked):
    """What an earlier request has left is not."""
    assert os.read(asked.pipe, 9) == b"1"
    assert not asked.recorder.poll()
    entries = [
        entry(4),
        entry(5, "started"),
        entry(6, "scheduled", profiling_name="nccl:broadcast"),
        entry(77, "scheduled", is_p2p=True),
        entry(2, process_group=("7", "")),
    ]
    asked.dump.write_bytes(pickle.dumps({"version": "2.10", "entries": entries}, protocol=2))
    assert asked.recorder.poll()
    assert asked.recorder.calls == (
        GroupCalls(group="default_pg", called=6, ended=4, waits_in="all_reduce"),
        GroupCalls(group="7", called=2, ended=2),
    )


class Runs:
    """What a pickle can do where it may name functions."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"entries": [entry(1)], "more": Runs()}),
        pickle.dumps({"entries": [entry(1)]})[:-9],
        pickle.dumps({"entries": 3}),
        pickle.dumps([{"is_p2p": False}]),
        b"",
    ],
    ids=["runs", "half", "other", "list", "empty"],
)
def test_anything_else_is_no_answer(asked, tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    asked.dump.write_bytes(data)
    assert not asked.recorder.poll()
    assert not Path("ran").exists()


def test_a_large_file_is_not_read(asked):
    os.truncate(asked.dump, 2**26 + 1)
    assert not asked.recorder.poll()


def test_who_has_no_pipe_is_not_waited_for(tmp_path):
    """Or nobody who reads it, as after the end of NCCL."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none", tmp_path / "pipe"):
        recorder = FlightRecorder(str(path), str(tmp_path / "dump"))
        assert (recorder.poll(), recorder.calls) == (True, ())


RECORDS = """
import pickle, sys, time
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
if hasattr(c10d, "_dump_fr_trace"):
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    until = time.monotonic() + 60
    while not pickle.loads(found := c10d._dump_fr_trace())["entries"][0]["retired"] and time.monotonic() < until:
        time.sleep(0.01)  # a thread of gloo's notes the end of the call, perhaps after the call has returned
    open(sys.argv[1], "wb").write(found)
"""


def test_torch_writes_what_is_read(asked, torch_node):
    """The same recorder, of gloo, which has no pipe."""
    os.utime(asked.dump, ns=(1, 1))
    outcome = torch_node.run(torch_node.script(RECORDS), str(asked.dump))
    assert outcome.exit_code == 0, outcome.stderr()
    if asked.dump.stat().st_mtime_ns == 1:
        pytest.skip("this torch records nothing of gloo")
    assert asked.recorder.poll()
    (calls,) = asked.recorder.calls or ()
    assert (calls.group, calls.called, calls.ended) == ("default_pg", 1, 1)
