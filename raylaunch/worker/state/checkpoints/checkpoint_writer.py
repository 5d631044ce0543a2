"""Writes a commit to disk as a checkpoint of `torch.distributed.checkpoint` (DCP).

Several processes write one checkpoint, each the parts that it has. They need no connection: what DCP's planner must
know of all ranks is in files of the checkpoint, which is a folder that all of them see. The one that has the part of
rank 0 completes it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan

from raylaunch.core.machine.commits import Commit, HeldCommit
from raylaunch.core.text import count
from raylaunch.worker.state.checkpoints import checksums, dcp_parts, known_pickles
from raylaunch.worker.state.checkpoints.dcp_parts import RECORDS, CommitPart
from raylaunch.worker.state.checkpoints.durable_folder import METADATA, DurableFolder
from raylaunch.worker.state.commit_buffer import CommitBuffer
from raylaunch.worker.state.snapshots.snapshot import OBJECT

_PROBE_BYTES = 2**16
_POLL_SECONDS = 0.05
_WRITE_SECONDS = 3600.0
"""How long another writer may take."""
_GRACE_SECONDS = 2.0
"""At the end of a run: how long an older commit is complete before it is taken, though a newer one may follow."""


class WriteProgress:
    """How far the writers of this process are. Any thread may look."""

    def __init__(self) -> None:
        self.total = 0
        """The number of bytes of all tensors to write; 0: not known yet."""
        self._writers: list[CheckpointWriter] = []
        self._files: list[str] = []

    def begin(self, writer: CheckpointWriter) -> None:
        """Register a writer of this process."""
        self._writers.append(writer)

    def add(self, path: str, plan: SavePlan) -> None:
        """Register what is to be written to the files whose names begin with a path."""
        found = [item.tensor_data for item in plan.items if item.tensor_data is not None]
        self.total += sum(one.chunk.sizes.numel() * one.properties.dtype.itemsize for one in found)
        self._files.append(path)

    def discard(self) -> None:
        """Remove what is written, unless it is complete."""
        for writer in self._writers:
            writer.discard()

    @property
    def written(self) -> int:
        """The number of bytes in the files of this process so far."""
        found = 0
        for prefix in self._files:
            folder, name = os.path.split(prefix)
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                found += sum(one.stat().st_size for one in entries if one.name.startswith(name))
        return found


class CheckpointWriter:
    """Writes one checkpoint, or its share of it."""

    def __init__(
        self,
        folder: DurableFolder,
        buffers: Sequence[CommitBuffer],
        seconds: float,
        progress: WriteProgress | None = None,
    ) -> None:
        """`buffers`: parts of the same commit. `seconds`: how long to wait until other writers have begun.

        Raises ValueError where the parts do not fit together.
        """
        self._folder = folder
        self._buffers = buffers
        by_rank = {held.rank: buffer for buffer in buffers if (held := buffer.header.held()) is not None}
        self._parts = [*dcp_parts.parts_of(by_rank).values()]
        self._held = self._parts[0].held
        self._seconds = seconds
        self._progress = progress or WriteProgress()
        self._progress.begin(self)
        self.path = folder.incomplete(self._held.commit.steps, buffers[0].header.token)

    @property
    def commit(self) -> Commit:
        """The commit of which this writes the parts."""
        return self._held.commit

    def publish_plans(self) -> None:
        """Tell the other writers what there is to write of these ranks. Raises OSError."""
        os.makedirs(self.path, exist_ok=True)
        self._planners = [dcp_parts.save_planner(state_dict(part), part.held.rank) for part in self._parts]
        for part, planner in zip(self._parts, self._planners, strict=True):
            self._publish("plan", part.held.rank, planner.create_local_plan())

    @property
    def has_all_plans(self) -> bool:
        """Whether each rank's part is somewhere."""
        return all(os.path.exists(self._file("plan", rank)) for rank in range(self._held.world_size))

    def write(self) -> str:
        """Write, and return the path of the complete checkpoint; "": another writer completes it.

        Raises OSError, TimeoutError where another writer does not do its share in time, RuntimeError where a part was
        overwritten meanwhile, and what pickle and DCP raise.
        """
        ranks = range(self._held.world_size)
        writer = FileSystemWriter(self.path, per_thread_copy_ahead=0)  # else it waits for a stream of the GPU, if any
        writer.set_up_storage_writer(is_coordinator=True)
        plans, metadata = self._planners[0].create_global_plan(
            [self._await("plan", rank, self._seconds) for rank in ranks]
        )
        plans = writer.prepare_global_plan(plans)
        own = [planner.finish_plan(plans[part.held.rank]) for part, planner in self._mine()]
        for part, plan in zip(self._parts, own, strict=True):
            self._progress.add(os.path.join(self.path, f"__{part.held.rank}_"), plan)
        for (part, planner), plan, buffer in zip(self._mine(), own, self._buffers, strict=True):
            try:
                results = writer.write_data(plan, planner).wait()
            except RuntimeError:
                self._write_probe()  # torch does not say what the disk has said
                raise
            if buffer.header.held() != part.held:
                raise RuntimeError("training has overwritten the commit before it was on disk")
            names = {result.storage_data.relative_path for result in results}
            self._publish("result", part.held.rank, (results, self._sums(names)))
        if self._parts[0].held.rank != 0:
            return ""
        found = [self._await("result", rank, _WRITE_SECONDS) for rank in ranks]
        writer.finish(metadata, [results for results, _ in found])
        sums = self._sums({METADATA})
        for _, of_rank in found:
            sums |= of_rank
        checksums.write(self.path, sums)
        for rank in ranks:
            os.unlink(self._file("plan", rank))
            os.unlink(self._file("result", rank))
        return self._folder.complete(self.path, self._held.commit.steps)

    def _mine(self) -> Iterator[tuple[CommitPart, DefaultSavePlanner]]:
        return zip(self._parts, self._planners, strict=True)

    def discard(self) -> None:
        """Remove what is written, so that a full disk is not the fuller for it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _write_probe(self) -> None:
        """Write a small file. Raises OSError where the disk takes nothing more."""
        with contextlib.suppress(FileNotFoundError), open(self._file("probe", 0), "wb") as file:
            file.write(bytes(_PROBE_BYTES))

    def _sums(self, names: Iterable[str]) -> dict[str, str]:
        """Return the checksums of files, which were just written: they are read from memory."""
        return {name: checksums.of(os.path.join(self.path, name)) for name in names}

    def _file(self, kind: str, rank: int) -> str:
        return os.path.join(self.path, f".{kind}-{rank}")

    def _publish(self, kind: str, rank: int, what: Any) -> None:
        path = self._file(kind, rank)
        with open(f"{path}.tmp", "wb") as file:
            pickle.dump(what, file)
        os.rename(f"{path}.tmp", path)

    def _await(self, kind: str, rank: int, seconds: float) -> Any:
        path, deadline = self._file(kind, rank), time.monotonic() + seconds
        while not os.path.exists(path):
            if not os.path.exists(self.path):
                raise RuntimeError("another node could not write its part")
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing was written of rank {rank} in time")
            time.sleep(_POLL_SECONDS)
        with open(path, "rb") as file:
            return known_pickles.load(file)


def state_dict(part: CommitPart) -> dict[str, Any]:
    """Return what is on disk of a part: the objects, and under a key of our own what belongs to the rank.

    What rank 0 has besides models and optimizers is there in its ordinary form too, if it can be unpickled here.
    """
    found = part.state_dict()
    records: dict[str, Any] = {f"rank_{part.held.rank}": pickle.dumps(part.record())}
    if part.held.rank == 0:
        records |= {"steps": part.held.commit.steps, "world_size": part.held.world_size}
        for name in [name for name, item in part.items.items() if not item.of_world]:
            with contextlib.suppress(Exception):
                (found if name.startswith(OBJECT) else records)[name.removeprefix(OBJECT)] = part.load(name)
    return {**found, RECORDS: records}


def write_checkpoint(
    folder: DurableFolder, buffers: Sequence[CommitBuffer], seconds: float, progress: WriteProgress | None = None
) -> str:
    """Write the commit that these buffers have; return its path, or "" as `CheckpointWriter.write` does."""
    writer = CheckpointWriter(folder, buffers, seconds, progress)
    try:
        writer.publish_plans()
        return writer.write()
    except BaseException:
        writer.discard()
        raise


def write_newest(
    folder: DurableFolder, buffers: Sequence[CommitBuffer], seconds: float, progress: WriteProgress | None = None
) -> str:
    """Write the newest commit in these buffers that all ranks have; return as `write_checkpoint`.

    For the end of a run: every node has the last commits of its ranks, and does not know what others have. Raises
    TimeoutError if other nodes do not come, and what `CheckpointWriter.write` raises.
    """
    writers = _writers(folder, buffers, seconds, progress)
    if not writers or folder.has(writers[0].commit.steps):
        return ""
    try:
        for writer in writers:
            writer.publish_plans()
        chosen = _whole(writers, seconds)
        path = chosen.write()
    except BaseException:
        for writer in writers:
            writer.discard()
        raise
    for writer in writers[: writers.index(chosen)]:
        writer.discard()  # but no older one, which others may be about to publish: `complete` removes it
    return path


def _whole(writers: Sequence[CheckpointWriter], seconds: float) -> CheckpointWriter:
    """Wait until the newest commit has the parts of all ranks, or, after a while, an older one. Return its writer."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < seconds:
        for writer in writers if waited > _GRACE_SECONDS else writers[:1]:
            if writer.has_all_plans:
                return writer
        time.sleep(_POLL_SECONDS)
    raise TimeoutError("there is no commit of which the nodes that are left have the parts of all ranks")


def _writers(
    folder: DurableFolder, buffers: Sequence[CommitBuffer], seconds: float, progress: WriteProgress | None
) -> list[CheckpointWriter]:
    """Return a writer for each commit that these buffers have, the newest first. Each rank has one part of it."""
    found: dict[tuple[Commit, int, int], dict[int, CommitBuffer]] = {}
    for buffer in buffers:
        held = buffer.header.held()
        if held is not None and not held.light:
            found.setdefault((held.commit, held.world_size, buffer.header.token), {})[held.rank] = buffer
    writers = []
    for key in sorted(found, reverse=True):
        with contextlib.suppress(ValueError):  # the parts do not fit together; an older commit may be whole
            own = [found[key][rank] for rank in sorted(found[key])]
            writers.append(CheckpointWriter(folder, own, seconds, progress))
    return writers


def report(write: Callable[[], str], folder: DurableFolder, held: HeldCommit | None) -> str:
    """Write, and return what to tell a person; "": all is well."""
    try:
        write()
    except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
        what = f"the state after {count(held.commit.steps, 'step')}" if held is not None else "the state"
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else f"{error}".split("\n", 1)[0]
        return f"{what} could not be written to {folder.path}: {why or type(error).__name__}"
    return ""
