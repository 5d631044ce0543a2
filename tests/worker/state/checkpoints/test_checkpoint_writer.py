"""A commit on disk: complete or not there, read by plain `torch.distributed.checkpoint`, and by `State` in any world."""

from __future__ import annotations

import errno
import os
import resource
import threading
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save  # noqa: E402

from raylaunch.core.machine.commits import Commit, HeldCommit  # noqa: E402
from raylaunch.worker.state.checkpoints import checkpoint_writer  # noqa: E402
from raylaunch.worker.state.checkpoints.checkpoint_writer import (  # noqa: E402
    WriteProgress,
    report,
    write_checkpoint,
    write_newest,
)
from raylaunch.worker.state.checkpoints.durable_folder import DurableFolder  # noqa: E402
from raylaunch.worker.state.checkpoints.resharded import Resharded  # noqa: E402
from raylaunch.worker.state.commit_buffer import CommitBuffer  # noqa: E402
from raylaunch.worker.state.snapshots.snapshot import OBJECT, Snapshot  # noqa: E402
from tests.worker.state.checkpoints.test_resharded import (  # noqa: E402
    FSDP,
    WHOLE,
    buffer_with,
    committed,
    same,
    sharded,
    world,
)

SECONDS = 100.0


@pytest.fixture
def folder(tmp_path):
    return DurableFolder(str(tmp_path / "checkpoints"), 600.0, 2)


def in_threads(*calls) -> list[str]:
    """Call all at once, as several nodes do; return what they return."""
    found: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda n=n, call=call: found.update({n: call()})) for n, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return [found[number] for number in range(len(calls))]


def test_nodes_write_one_checkpoint_that_any_world_restores(folder):
    """Two nodes without a connection write it, with three ranks. It is what was committed, in worlds of 3 and of 2."""
    parts = committed(3, (3,), FSDP)
    nodes = parts[1:], parts[:1]
    paths = in_threads(*(lambda node=node: write_checkpoint(folder, node, SECONDS) for node in nodes))
    assert paths == ["", f"{folder.path}/step-8"]
    assert sorted(os.listdir(paths[1])) == [".metadata", "SHA256SUMS", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    for size in (3, 2):
        for rank in range(size):
            with world(rank, size, (size,), FSDP) as mesh:
                own = [sharded(mesh, name) for name in WHOLE]
                found, record = Resharded.of_checkpoint(paths[1], rank, own)
                assert (record.held.commit.steps, record.held.world_size) == (8, 3)
                model, optimizer = found.item(f"{OBJECT}model"), found.item(f"{OBJECT}optimizer")
                assert all(same(model[name], sharded(mesh, name)) for name in WHOLE)
                assert all(
                    same(optimizer["state"][n]["exp_avg"], sharded(mesh, name, 1)) for n, name in enumerate(WHOLE)
                )
                assert found.item("values")["nested"][0][1].tolist() == [rank] * 2
                assert found.item(f"{OBJECT}sampler")["position"].tolist() == [rank]


def test_plain_dcp_reads_it_and_converts_it(folder, tmp_path):
    path = write_checkpoint(folder, committed(2, (2,), FSDP), SECONDS)
    targets = {"model": {name: torch.zeros_like(whole) for name, whole in WHOLE.items()}}
    dcp.load(targets, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(targets["model"][name], whole) for name, whole in WHOLE.items())
    dcp_to_torch_save(path, str(tmp_path / "all.pt"))
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert all(torch.equal(found["model"][name], whole) for name, whole in WHOLE.items())
    assert torch.equal(found["optimizer"]["state"]["1"]["exp_avg"], WHOLE["uneven"] + 1)
    assert found["sampler"]["epoch"] == 3
    assert (found["raylaunch"]["steps"], found["raylaunch"]["values"]["rank"]) == (8, 0)


class Unknown:
    """Of the script, so that only its own processes can unpickle it."""

    def __reduce__(self):
        return refuse, ()


def refuse():
    raise AttributeError("there is no such class here")


def test_objects_that_only_the_script_knows_are_kept_for_it(folder):
    items = {f"{OBJECT}model": {"weight": torch.ones(3)}, "values": {"own": Unknown()}, f"{OBJECT}data": {"n": 5}}
    path = write_checkpoint(folder, [buffer_with(Snapshot(items, [f"{OBJECT}model"]), 0, 1)], SECONDS)
    found, _ = Resharded.of_checkpoint(path, 0, [])
    assert found.item(f"{OBJECT}model")["weight"].tolist() == [1, 1, 1]
    assert found.item(f"{OBJECT}data") == {"n": 5}
    with pytest.raises(AttributeError, match="there is no such class here"):
        found.item("values")


def test_another_checkpoint_is_refused(folder, tmp_path):
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "own", no_dist=True)
    with pytest.raises(ValueError, match="a checkpoint that `State` has not written"):
        Resharded.of_checkpoint(str(tmp_path / "own"), 0, [])


def one_part(steps_tensor: float = 1.0):
    return buffer_with(
        Snapshot({f"{OBJECT}model": {"weight": torch.full((3,), steps_tensor)}}, [f"{OBJECT}model"]), 0, 1
    )


def test_a_full_disk_costs_a_message_and_leaves_nothing(folder, monkeypatch):
    """The first part of it is written when the disk is full."""
    write_data = dcp.FileSystemWriter.write_data

    def full(self, plan, planner):
        write_data(self, plan, planner)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_writer.FileSystemWriter, "write_data", full)
    buffer = one_part()
    told = report(lambda: write_checkpoint(folder, [buffer], SECONDS), folder, buffer.header.held())
    assert told == (f"the state after 8 steps could not be written to {folder.path}: No space left on device")
    assert os.listdir(folder.path) == []


def test_what_the_disk_has_said_is_told_though_torch_hides_it(folder):
    """torch's own writer of tensors only says that it is at an unexpected place in the file."""
    tensors = {"weight": torch.ones(2**16)}
    buffer = buffer_with(Snapshot({f"{OBJECT}model": tensors}, [f"{OBJECT}model"]), 0, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, limits[1]))
    try:
        told = report(lambda: write_checkpoint(folder, [buffer], SECONDS), folder, buffer.header.held())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert told == f"the state after 8 steps could not be written to {folder.path}: {os.strerror(errno.EFBIG)}"
    assert os.listdir(folder.path) == []


def test_how_far_a_checkpoint_is_and_what_is_given_up_is_removed(folder, monkeypatch):
    """It is looked at, and given up, when its tensors are written."""
    progress, seen = WriteProgress(), []
    sums = checkpoint_writer.checksums.of

    def given_up(path):
        seen.append((progress.written, progress.total, os.path.getsize(path)))
        progress.discard()
        return sums(path)

    monkeypatch.setattr(checkpoint_writer.checksums, "of", given_up)
    with pytest.raises(FileNotFoundError):
        write_checkpoint(folder, [one_part()], SECONDS, progress)
    ((written, total, size),) = seen
    assert (written, total) == (size, 12)
    assert os.listdir(folder.path) == []


def model_of(path: str, own: list) -> dict:
    return Resharded.of_checkpoint(path, 0, own)[0].item(f"{OBJECT}model")


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "__1_0.distcp"])
@pytest.mark.parametrize("damage", ["empty", "short", "other", "missing"])
def test_a_damaged_checkpoint_is_named(folder, file, damage):
    path = write_checkpoint(folder, committed(2, (2,), FSDP), SECONDS)
    damaged = Path(path, file)
    data = damaged.read_bytes()
    damaged.unlink()
    if damage != "missing":
        damaged.write_bytes({"empty": b"", "short": data[: len(data) // 2], "other": b"\xd8" * len(data)}[damage])
    with world(0, 1, (1,), FSDP) as mesh, pytest.raises(ValueError, match=f"the checkpoint {path} cannot be read"):
        model_of(path, [sharded(mesh, name) for name in WHOLE])


def test_a_commit_that_is_overwritten_meanwhile_is_no_checkpoint(folder, monkeypatch):
    buffer = one_part()
    write_data = dcp.FileSystemWriter.write_data

    def slow(self, plan, planner):
        buffer.header.unseal()
        return write_data(self, plan, planner)

    monkeypatch.setattr(checkpoint_writer.FileSystemWriter, "write_data", slow)
    with pytest.raises(RuntimeError, match="training has overwritten the commit"):
        write_checkpoint(folder, [buffer], SECONDS)
    assert folder.checkpoints() == []


def test_a_node_that_never_comes_is_not_waited_for_forever(folder):
    with pytest.raises(TimeoutError, match="nothing was written of rank 1 in time"):
        write_checkpoint(folder, committed(2, (2,), FSDP)[:1], 0.1)
    assert os.listdir(folder.path) == []


def sealed_again(buffer, steps: int, **fields):
    """Say in the header of a buffer that what it has is the commit after so many steps, with these fields."""
    held, (tensors, pickled) = buffer.header.held(), buffer.header.sizes()
    buffer.header.seal(replace(held, commit=Commit(1, steps), **fields), tensors=tensors, pickled=pickled)
    return buffer


def test_at_the_end_the_newest_commit_that_all_have_is_written(folder):
    """Both ranks have made two, and rank 0 a third one."""
    older = [sealed_again(one, 7) for one in committed(2, (2,), FSDP)]
    common = committed(2, (2,), FSDP)
    newer = sealed_again(committed(2, (2,), FSDP)[0], 9)
    paths = in_threads(
        lambda: write_newest(folder, [older[0], common[0], newer], SECONDS),
        lambda: write_newest(folder, [older[1], common[1]], SECONDS),
    )
    assert paths == [f"{folder.path}/step-8", ""]
    assert os.listdir(folder.path) == ["step-8"]
    assert write_newest(folder, [common[0]], SECONDS) == "", "it is there already"


def test_at_the_end_a_node_may_still_publish_an_older_commit(folder, monkeypatch):
    """When the other one has already written its part of the newest, which is whole."""
    older = [sealed_again(one, 7) for one in committed(2, (2,), FSDP)]
    common = committed(2, (2,), FSDP)
    is_written = threading.Event()
    makedirs = os.makedirs

    def slow(path, **options):
        makedirs(path, **options)
        if threading.current_thread().name == "slow" and "step-7" in path:
            is_written.wait(SECONDS)

    def write_first() -> str:
        found = write_newest(folder, [older[1], common[1]], SECONDS)
        is_written.set()
        return found

    def write_slowly() -> str:
        threading.current_thread().name = "slow"
        return write_newest(folder, [older[0], common[0]], SECONDS)

    monkeypatch.setattr(checkpoint_writer.os, "makedirs", slow)
    assert in_threads(write_first, write_slowly) == ["", f"{folder.path}/step-8"]
    assert os.listdir(folder.path) == ["step-8"]


def test_at_the_end_an_incomplete_checkpoint_after_as_many_steps_is_replaced(folder):
    """Its file with the metadata is not there, so `State.restore` has passed over it."""
    path = os.path.join(folder.path, "step-8")
    os.makedirs(path)
    assert write_newest(folder, [one_part()], SECONDS) == path
    assert folder.checkpoints() == [("step-8", True)]


@pytest.mark.parametrize(
    ("ranks", "fields", "why"),
    [
        ([0, 1], {"digest": 5}, "parameters that DistributedDataParallel keeps equal differ"),
        ([0], {"sharers": 2}, r"the parts of the ranks \[1\] are missing"),
    ],
)
def test_parts_that_do_not_fit_together_are_not_written(folder, ranks, fields, why):
    """At the end an older commit is written instead."""
    common, newer = committed(2, (2,), FSDP), committed(2, (2,), FSDP)
    unfit = [sealed_again(newer[rank], 9, **(fields if rank == 0 else {})) for rank in ranks]
    with pytest.raises(ValueError, match=why):
        write_checkpoint(folder, unfit, SECONDS)
    assert write_newest(folder, [*common, *unfit], SECONDS) == f"{folder.path}/step-8"
    assert os.listdir(folder.path) == ["step-8"]


def light_part(rank: int, whole: torch.Tensor) -> CommitBuffer:
    """Write a light commit of two ranks after nine steps, without the tensor, which is equal on both."""
    found = Snapshot({f"{OBJECT}model": whole, "values": rank}, [f"{OBJECT}model"], {f"{OBJECT}model": lambda _: True})
    buffer = buffer_with(found, rank, 2)
    held = HeldCommit(rank=rank, world_size=2, commit=Commit(1, 9), sharers=2, digest=3, light=True)
    sizes = {"tensors": found.tensor_bytes, "pickled": len(found.pickled), "shared": found.shared_bytes}
    buffer.header.seal(held, **sizes)
    return buffer


def test_at_the_end_light_commits_are_not_written(folder):
    """They lack what is equal on all ranks: what is written is the last commit that has everything."""
    common = committed(2, (2,), FSDP)
    newer = [light_part(rank, torch.ones(10_000)) for rank in (0, 1)]
    assert write_newest(folder, [*common, *newer], SECONDS) == f"{folder.path}/step-8"


def test_no_gpu_is_touched(folder, monkeypatch):
    """DCP would copy through a stream of the current GPU, if there is one, though all tensors are on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert os.path.isdir(write_checkpoint(folder, committed(1, (1,), FSDP), SECONDS))
