"""The present attempt's workers on a node, as its supervisor knows them, and their GPUs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from raylaunch.core.machine.workers_status import WorkerExit
from raylaunch.core.newtypes import NodeTime
from raylaunch.core.placement import devices
from raylaunch.core.placement.devices import GpuUse
from raylaunch.core.placement.environment import Assignment
from raylaunch.node.linux import nvml
from raylaunch.worker.heartbeats.shared_page import MAX_NUMBER
from raylaunch.worker.runtime.spec import WorkerSpec

PART_BYTES = 2**23
"""The size of each part of a result but the last, which is smaller. The agent copies one between two reports."""
_GPU_POLL_SECONDS = 5.0
_MOST_GPU_SECONDS = 0.5
"""How long a failure waits for what the driver says of its GPUs."""
_GPU_LOG_SECONDS = 60.0
"""How long before the attempt a fault may have been logged: the kernel's log has a clock of its own, and the last
attempt's fault may be this one's.
"""
_GPU_MEMORY_STEPS = 64
"""In how many steps memory is told; time is in steps of ten per cent."""


class ResultFile:
    """What a function returned or raised, pickled: the rest of its worker's report file."""

    def __init__(self, file: BinaryIO) -> None:
        """`file` is open at the beginning of the result, and is this object's own."""
        self._file = file
        self._start = file.tell()

    def read(self, offset: int) -> bytes:
        """Return the part that begins at this byte of the result. One of less than `PART_BYTES` is the last."""
        return os.pread(self._file.fileno(), PART_BYTES, self._start + offset)

    def close(self) -> None:
        """Free the memory."""
        self._file.close()


@dataclass(slots=True)
class AttemptState:
    """What a supervisor knows of an attempt, from the order on, before its workers are forked."""

    assignment: Assignment
    workers: tuple[WorkerSpec, ...] = ()
    """By local rank."""
    pids: tuple[int, ...] = ()
    """Process ids by local rank, once the workers are forked."""
    ends: dict[int, bool] = field(default_factory=dict)
    """By rank: whether it has ended well. It has all and only the workers whose processes are gone."""
    late_failures: list[WorkerExit] = field(default_factory=list)
    """Failures of workers that were told to stop, to be told when all are gone."""
    results: dict[int, ResultFile] = field(default_factory=dict)
    """What functions have returned or raised, by rank."""
    finished: bool = False
    """All workers have ended, and that was dealt with."""
    shown: set[int] = field(default_factory=set)
    """Ranks that have ended, and whose last progress was reported."""
    gpus: GpuMonitor = field(init=False)
    """Looks at the GPUs of the workers."""

    def __post_init__(self) -> None:
        """Raise ValueError if the shared page cannot hold the number of the attempt."""
        if not 0 <= self.attempt < MAX_NUMBER:
            msg = f"there is no attempt {self.attempt}"
            raise ValueError(msg)
        self.gpus = GpuMonitor(self.workers)

    @property
    def attempt(self) -> int:
        return self.assignment.attempt

    def close(self) -> None:
        """Free the memory of what functions have returned, and look at GPUs no more."""
        self.gpus.close()
        for result in self.results.values():
            result.close()
        self.results.clear()

    def exits_with_server(self, server: str, *, stopped: bool) -> list[WorkerExit]:
        """Return the exit of each worker that died with its fork server, which can report none of them.

        `server` names the process whose death it was, as in `FailureRecord.killed_with`.
        """
        return [
            WorkerExit(
                attempt=self.attempt,
                rank=rank,
                local_rank=local_rank,
                pid=self.pids[local_rank] if local_rank < len(self.pids) else 0,
                exit_code=-signal.SIGKILL,
                stopped=stopped,
                killed_with=server,
                at=NodeTime(time.monotonic()),
            )
            for local_rank, rank in enumerate(self.assignment.ranks)
            if rank not in self.ends
        ]

    def take_finished(self) -> bool:
        """Return once, when all workers have ended: whether all did so well."""
        if self.finished or not set(self.assignment.ranks) <= set(self.ends):
            return False
        self.finished = True
        return all(self.ends.values())

    def take_late_failures(self) -> tuple[WorkerExit, ...]:
        """Return the failures of workers that were told to stop, once."""
        late, self.late_failures = tuple(self.late_failures), []
        return late

    def live(self) -> list[tuple[int, int, int]]:
        """Return (local rank, rank, process id) of each worker that was forked and has not ended."""
        return [worker for worker in self.forked() if worker[1] not in self.ends]

    def forked(self) -> list[tuple[int, int, int]]:
        """Return (local rank, rank, process id) of each worker that was forked."""
        return [*zip(range(len(self.pids)), self.assignment.ranks, self.pids, strict=False)]


class GpuMonitor:
    """Asks NVML in a thread, since a sick GPU may hold it up. Where workers have no GPU, there is no thread."""

    def __init__(self, workers: Sequence[WorkerSpec]) -> None:
        #: What NVML said last.
        self.latest: tuple[GpuUse, ...] = ()
        self._names = [
            (spec.rank, name) for spec in workers for name in devices.cuda_names(spec.gpus, spec.node_devices)
        ]
        self._ended = threading.Event()
        self._asking = threading.Thread()
        self._since = time.monotonic() - _GPU_LOG_SECONDS
        if self._names:
            threading.Thread(target=self._run, name="raylaunch-gpus", daemon=True).start()

    def _run(self) -> None:
        while (found := nvml.use({name for _, name in self._names})) and not self._ended.is_set():
            self.latest = tuple(_rounded(rank, name, found[name]) for rank, name in self._names if name in found)
            self._ended.wait(_GPU_POLL_SECONDS)

    def evidence(self, rank: int) -> str:
        """Return what the driver says is wrong with a rank's GPUs; "": nothing, or it has none of NVIDIA's.

        While the driver owes an answer it is not asked again, and nobody waits.
        """
        names = [name for each, name in self._names if each == rank]
        if not names:
            return ""
        found: list[tuple[str, ...]] = [("the GPUs' driver does not answer",)]
        if not self._asking.is_alive():
            self._asking = threading.Thread(
                target=lambda: found.append(nvml.evidence(names, self._since)),
                name="raylaunch-gpu-evidence",
                daemon=True,
            )
            self._asking.start()
            self._asking.join(_MOST_GPU_SECONDS)
        return "; ".join(found[-1])

    def close(self) -> None:
        """Ask no more."""
        self._ended.set()


def _rounded(rank: int, name: str, use: nvml.Use) -> GpuUse:
    step = max(1, use.total // _GPU_MEMORY_STEPS)
    busy = None if use.busy is None else round(use.busy, -1)
    return GpuUse(rank=rank, gpu=name, used=min(use.total, -(-use.used // step) * step), total=use.total, busy=busy)
