"""The node writes commits of its workers to disk, in processes of its own, and training does not notice."""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.node.state import checkpoint_writes
from raylaunch.node.state.checkpoint_writes import CheckpointWrites, LastWrite
from raylaunch.worker.state.buffer_client import Request
from raylaunch.worker.state.checkpoints import checkpoint_process
from raylaunch.worker.state.commit_buffer import HEADER_BYTES, CommitBuffer, CommitHeader, WriteState
from tests.node.harness import Node, basic_env, mark, no_leaks, pipe, started_for_test, until
from tests.private_cluster import WARM_TORCH
from tests.warm_command import WarmCommand
from tests.worker.state.test_elastic_state import attempt

__all__ = ["mark", "no_leaks", "pipe"]

TRAINS = """
    import os, sys, time
    import torch
    from raylaunch.worker import State

    folder, until = sys.argv[1], sys.argv[2]
    told = []
    class Stderr:
        def write(self, text):
            told.append(text)
        def flush(self):
            pass
    sys.stderr = Stderr()
    torch.set_num_threads(1)
    model = torch.nn.Linear(3, 3)
    state = State(model=model, every=1, durable=folder)
    done = state.restore()
    print(done, state.get("sum") == model.weight.sum().item())
    deadline = time.monotonic() + 100
    step = done
    while time.monotonic() < deadline:
        torch.nn.init.constant_(model.weight, step)
        state["sum"] = model.weight.sum().item()
        state.commit(step)
        step += 1
        if until == "now" or (until == "written" and any(name.startswith("step-") and "." not in name
                                                         for name in os.listdir(folder))):
            break
        if until == "told" and any("could not be written" in text for text in told):
            break
        time.sleep(0.02)
    print(step, "".join(told).strip())
"""


@pytest.fixture
def own_torch_node(warm_torch, tmp_path, mark, pipe):
    """A node for this test alone, whose fork server is forked from a process that has imported torch."""
    env = basic_env(mark) | {WARM_TORCH: str(warm_torch.executable())}
    yield from started_for_test(Node(env=env, preload=("torch",)), tmp_path, mark, pipe)


def test_commits_are_written_in_a_run_and_at_its_end_and_the_next_run_begins_there(
    own_torch_node, tmp_path, warm_torch, monkeypatch
):
    """Before, a folder that cannot be written costs a message."""
    forks = SimpleNamespace(executable=str(warm_torch.executable()), stderr=sys.stderr)
    monkeypatch.setattr(checkpoint_writes, "sys", forks)
    own_torch_node.set(env=own_torch_node.supervisor.spec.env | {"RAYLAUNCH_DURABLE_EVERY": "0"})
    folder = Path("/proc/checkpoints")
    lines = attempt(own_torch_node, own_torch_node.script(TRAINS.replace("state.restore()", "0")), str(folder), "told")
    told = f"could not be written to {folder}: No such file or directory; training goes on"
    assert lines[1].endswith(told), lines

    own_torch_node.supervisor.state.files.drop(lambda *_: True)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    script = own_torch_node.script(TRAINS)
    first = attempt(own_torch_node, script, str(folder), "written")
    assert first[0].split()[0] == "0"
    steps = int(first[1].split()[0])
    assert "step-" in "".join(os.listdir(folder))
    memory = own_torch_node.supervisor.state
    until(lambda: memory.poll() or memory.write_last().is_over, "the last commit is not on disk")
    own_torch_node.supervisor.close()
    assert (folder / f"step-{steps}").exists()
    assert not [name for name in os.listdir(folder) if "incomplete" in name]
    alone = WarmCommand(warm_torch, script, str(folder), "now", env=basic_env("none"), cwd=tmp_path)
    out, err = alone.communicate(200)
    assert out.splitlines() == [f"{steps} True", f"{steps + 1} "], err
    assert (folder / f"step-{steps + 1}" / ".metadata").exists(), "under plain Python, the process itself writes it"


@pytest.mark.parametrize(
    ("program", "state", "outcome"),
    [
        ('print(\'{"failed": ""}\')', WriteState.WRITTEN, ""),
        ('print(\'{"failed": "no space"}\')', WriteState.FAILED, "no space"),
        (r"""print('{"failed": "no \\udce9"}')""", WriteState.FAILED, r"no \udce9"),
        ("import os; os.kill(os.getpid(), 9)", WriteState.FAILED, "the process that does it was ended"),
    ],
)
def test_what_became_of_a_write_is_in_the_buffer(monkeypatch, tmp_path, program, state, outcome):
    """Also if the process was killed. While it runs, no other one is started."""
    (tmp_path / "program.py").write_text(f"import sys\nsys.stdin.read()\n{program}\n")
    monkeypatch.setattr(checkpoint_process, "__file__", str(tmp_path / "program.py"))
    fd, commit = os.memfd_create("test"), Commit(1, 8)
    os.ftruncate(fd, HEADER_BYTES)
    buffer = CommitBuffer(os.dup(fd))
    held = HeldCommit(rank=0, world_size=1, commit=commit)
    buffer.header.seal(held, tensors=0, pickled=0, write=WriteState.TO_WRITE)
    with select.epoll() as epoll:
        writes = CheckpointWrites(epoll)
        writes.note_folder(Request(attempt=1, rank=0, index=2, folder=str(tmp_path), keep=1, write=1))
        writes.write({fd: (commit, buffer.header)}, 2)
        assert writes.fileno() == -1, "the other rank of the node has not sealed its part"
        writes.write({fd: (commit, buffer.header)}, 1)
        first = writes.fileno()
        writes.write({fd: (commit, buffer.header)}, 1)
        assert writes.fileno() == first
        while buffer.header.write_state is WriteState.TO_WRITE:
            assert epoll.poll(60)
            writes.poll({fd: (commit, buffer.header)})
    os.close(fd)
    assert (buffer.header.write_state, outcome in buffer.header.outcome) == (state, True)
    assert (writes.longest > 0) == (state is WriteState.WRITTEN), "only what was written tells how long that takes"


def written_last(writes: CheckpointWrites, epoll: select.epoll, fds: dict[int, Commit]) -> LastWrite:
    """Have the last checkpoint written, as the driver does; return what became of it."""
    while not (found := writes.write_last(fds)).is_over:
        assert epoll.poll(60)
        writes.poll({})
    return found


_WAITS = (
    f"import os, time\nwhile not os.path.exists(FILE):\n    time.sleep(0.01)\nprint('{json.dumps({'failed': ''})}')"
)
"""A program that writes a checkpoint until there is a file."""


def test_the_end_of_a_run_waits_for_what_is_being_written_and_then_for_the_last_commit(monkeypatch, tmp_path):
    lets_end = tmp_path / "ends"
    (tmp_path / "program.py").write_text(_WAITS.replace("FILE", repr(str(lets_end))))
    monkeypatch.setattr(checkpoint_process, "__file__", str(tmp_path / "program.py"))
    fd, commits = os.memfd_create("test"), [Commit(1, 8), Commit(1, 9)]
    header = CommitHeader(memoryview(bytearray(HEADER_BYTES)))
    header.set_outcome(WriteState.TO_WRITE, "")
    with select.epoll() as epoll:
        writes = CheckpointWrites(epoll)
        writes.note_folder(Request(attempt=1, rank=0, index=2, folder="/somewhere", keep=1, write=0))
        writes.write({fd: (commits[0], header)}, 1)
        first = writes.fileno()
        assert not writes.write_last({fd: commits[1]}).is_over
        assert writes.fileno() == first
        lets_end.touch()
        assert written_last(writes, epoll, {fd: commits[1]}) == LastWrite(is_over=True, folder="/somewhere")
    os.close(fd)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ('print(\'{"failed": "no space"}\')', "no space"),
        ('print(\'{"failed": ""}\')', ""),
        ("pass", "a checkpoint is not written: the process that does it was ended"),
        ("print(7)", "a checkpoint is not written: the process that does it does not answer as it should"),
    ],
)
def test_the_end_of_a_run_says_what_becomes_of_its_last_checkpoint(monkeypatch, tmp_path, program, why):
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setattr(checkpoint_process, "__file__", str(tmp_path / "program.py"))
    fd = os.memfd_create("test")
    with select.epoll() as epoll:
        writes = CheckpointWrites(epoll)
        writes.note_folder(Request(attempt=1, rank=0, index=2, folder="/somewhere", keep=1, write=0))
        assert written_last(writes, epoll, {fd: Commit(1, 8)}).why == why
    os.close(fd)


_STALLS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
try:
    print('{"written": 5, "total": 8}', flush=True)
    time.sleep(280)
finally:
    open(FILE, "w").close()
"""
"""A program that does not come to its end, and cleans up when it is told to end."""


def test_a_last_checkpoint_that_is_given_up_leaves_no_process_and_nothing_incomplete(monkeypatch, tmp_path):
    cleaned = tmp_path / "cleaned"
    (tmp_path / "program.py").write_text(_STALLS.replace("FILE", repr(str(cleaned))))
    monkeypatch.setattr(checkpoint_process, "__file__", str(tmp_path / "program.py"))
    fd = os.memfd_create("test")
    with select.epoll() as epoll:
        writes = CheckpointWrites(epoll)
        writes.note_folder(Request(attempt=1, rank=0, index=2, folder="/somewhere", keep=1, write=0))
        wanted = LastWrite(is_over=False, folder="/somewhere", written=5, total=8)
        while writes.write_last({fd: Commit(1, 8)}) != wanted:
            assert epoll.poll(60)
            writes.poll({})
        writes.close()
    assert cleaned.exists()
    os.close(fd)


def test_the_process_that_writes_sees_no_gpu(monkeypatch, tmp_path):
    """Else torch would initialize CUDA there, also after the run, when its GPUs are somebody else's."""
    (tmp_path / "program.py").write_text(
        f"import json, os\njson.dump(dict(os.environ), open({str(tmp_path / 'env')!r}, 'w'))"
    )
    monkeypatch.setattr(checkpoint_process, "__file__", str(tmp_path / "program.py"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    fd = os.memfd_create("test")
    with select.epoll() as epoll:
        writes = CheckpointWrites(epoll)
        writes.note_folder(Request(attempt=1, rank=0, index=2, folder="/somewhere", keep=1, write=0))
        while not writes.write_last({fd: Commit(1, 8)}).is_over:
            assert epoll.poll(60)
            writes.poll({})
    env = json.loads((tmp_path / "env").read_text())
    assert (env["CUDA_VISIBLE_DEVICES"], env["HIP_VISIBLE_DEVICES"]) == ("", "")
    assert env["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    os.close(fd)


def test_where_no_folder_is_named_nothing_is_written_at_the_end():
    with select.epoll() as epoll:
        assert CheckpointWrites(epoll).write_last({0: Commit(1, 8)}) == LastWrite(is_over=True)
