"""The stacks of a node's workers, which they write on a signal, with what torch's Flight Recorder knows of collectives.

The recorder is asked where a worker uses NCCL. A thread of torch looks at a named pipe each second, and writes a pickle
to a file (ProcessGroupNCCL.cpp, `DumpPipe`). Only the first process group of a process does; a survivor that has made
another one does not answer.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from raylaunch.core.failures.stacks import GroupCalls, Stack
from raylaunch.core.newtypes import NodeId
from raylaunch.node.linux import procfs
from raylaunch.node.protocol.forkserver_messages import StackDumpStarted
from raylaunch.node.protocol.node_status import StacksDumped
from raylaunch.worker.runtime.stack_signal import ALL_STACKS_SIGNAL, STACK_SIGNAL

STACKS_POLL_SECONDS = 0.02
MOST_STACKS_SECONDS = 0.5
MOST_RECORDER_SECONDS = 1.3
"""How long to wait for the Flight Recorder, which looks each second whether it is asked."""
_MOST_BYTES = 64 * 1024
"""Of one worker: the last ones, since faulthandler writes the main thread last."""
_NCCL_THREAD = "pt_nccl_watchdg\n"
"""The name of a thread that each process group of NCCL has (ProcessGroupNCCL.cpp)."""
_STOPPED = ("T", "t", "Z", procfs.GONE)
"""Process states (proc(5)) in which no signal handler runs."""
_MOST_RECORDED_BYTES = 2**26
_ENDED = "completed"


@dataclass(slots=True)
class PendingDump:
    """One worker's dump. `fd` is its file, once the fork server has signalled it; -1 before."""

    rank: int
    pid: int
    recorder: FlightRecorder
    gpu_faults: str = ""
    fd: int = -1
    start: int = 0
    size: int = 0
    is_signalled: bool = True
    is_closed: bool = False
    done: bool = False

    def poll(self) -> None:
        """Find out whether the dump is complete: it has not grown since the last call, and the handler has returned.

        The Flight Recorder is not waited for here.
        """
        if not self.is_signalled or procfs.process_state(self.pid) in _STOPPED:
            self.done = True
        elif self.fd >= 0:
            before, self.size = self.size, os.fstat(self.fd).st_size
            is_in_handler = any(procfs.blocks(self.pid, number) for number in (STACK_SIGNAL, ALL_STACKS_SIGNAL))
            self.done = self.start < self.size == before and not is_in_handler

    def stack(self) -> Stack:
        return Stack(
            rank=self.rank,
            state=procfs.process_state(self.pid),
            text=self._text(),
            effort=procfs.resource_usage(self.pid),
            child_stopped=procfs.has_stopped_child(self.pid),
            file_closed=self.is_closed,
            has_nccl=_has_nccl(self.pid),
            calls=self.recorder.calls or (),
            gpu_faults=self.gpu_faults,
        )

    def _text(self) -> str:
        if self.fd < 0:
            return ""
        size = os.fstat(self.fd).st_size
        start = max(self.start, size - _MOST_BYTES)
        return os.pread(self.fd, size - start, start).decode(errors="replace")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class StackDumps:
    """At most one dump of all workers at a time."""

    def __init__(self, node: NodeId) -> None:
        self._node = node
        self._attempt: int | None = None
        self._dumps: dict[int, PendingDump] = {}
        self._until = self._recorded_until = 0.0
        self._poll_at = 0.0

    def start(
        self,
        attempt: int,
        live: Sequence[tuple[int, int, int]],
        recorders: Mapping[int, FlightRecorder],
        gpu_faults: Mapping[int, str],
    ) -> None:
        """Expect dumps of these workers: (local rank, rank, process id). `poll` returns them.

        `gpu_faults`: what is wrong with the GPUs of ranks, as far as the driver was asked.
        """
        self.close()
        self._attempt = attempt
        self._dumps = {rank: PendingDump(rank, pid, recorders[rank], gpu_faults.get(rank, "")) for _, rank, pid in live}
        self._poll_at = time.monotonic()
        self._until = self._poll_at + MOST_STACKS_SECONDS
        self._recorded_until = self._poll_at + MOST_RECORDER_SECONDS

    def add_file(self, event: StackDumpStarted, fd: int | None) -> None:
        """Take over the file into which a worker was told to write."""
        if fd is None:
            return
        dump = self._dumps.get(event.rank)
        if dump is None or event.attempt != self._attempt or dump.fd >= 0:
            os.close(fd)
            return
        dump.fd, dump.start = fd, event.start
        dump.is_signalled, dump.is_closed = event.is_signalled, event.is_closed

    @property
    def is_open(self) -> bool:
        """Whether there is something to poll for."""
        return self._attempt is not None

    def poll(self) -> StacksDumped | None:
        """Return all stacks once: when all dumps are complete, or after half a second; with NCCL, after 1.3 s."""
        attempt, now = self._attempt, time.monotonic()
        if attempt is None or now < self._poll_at:
            return None
        self._poll_at = now + STACKS_POLL_SECONDS
        for dump in self._dumps.values():
            dump.poll()
        if now < self._until and not all(dump.done for dump in self._dumps.values()):
            return None
        if now < self._recorded_until and not all(dump.recorder.poll() for dump in self._dumps.values()):
            return None
        stacks = tuple(dump.stack() for dump in self._dumps.values())
        self.close()
        return StacksDumped(node=self._node, attempt=attempt, stacks=stacks)

    def close(self) -> None:
        """Close all files, and expect nothing more."""
        for dump in self._dumps.values():
            dump.close()
        self._attempt, self._dumps = None, {}


def _has_nccl(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return any(Path(task.path, "comm").read_text() == _NCCL_THREAD for task in os.scandir(f"/proc/{pid}/task"))
    return False


class FlightRecorder:
    """Asks torch in one worker which collectives it has called."""

    def __init__(self, pipe: str, dump: str) -> None:
        """Ask it to write. `dump`: the path of the file that is written."""
        self._dump = dump
        self._before = self._written_at()
        #: What it has said; None: nothing yet. Without a reader of the pipe there is nobody to say something.
        self.calls: tuple[GroupCalls, ...] | None = ()
        with contextlib.suppress(OSError):
            fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            with open(fd, "wb", buffering=0) as file:
                file.write(b"1")
            self.calls = None

    def poll(self) -> bool:
        """Read the file, if it was written since. Return whether nothing more is expected."""
        if self.calls is None and self._written_at() != self._before:
            # It may be written just now, or be damaged in any way.
            with contextlib.suppress(Exception), open(self._dump, "rb") as file:
                self.calls = _read(file)
        return self.calls is not None

    def _written_at(self) -> int:
        with contextlib.suppress(OSError):
            return os.stat(self._dump).st_mtime_ns
        return 0


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts. A dump has no others, and the file is in the hands of the script."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a dump of the Flight Recorder")


def _read(file: IO[bytes]) -> tuple[GroupCalls, ...]:
    """Return what a dump says. Raises what a file of another form causes."""
    if os.fstat(file.fileno()).st_size > _MOST_RECORDED_BYTES:
        raise ValueError("the dump is too large")
    groups = defaultdict(list)
    for entry in _PlainUnpickler(file).load()["entries"]:
        if not entry["is_p2p"]:
            groups[entry["process_group"][1] or entry["process_group"][0]].append(entry)
    return tuple(_calls(str(name), entries) for name, entries in groups.items())


def _calls(group: str, entries: list[Any]) -> GroupCalls:
    called = max(int(entry["collective_seq_id"]) for entry in entries)
    open_ = [entry for entry in entries if entry["state"] != _ENDED and not entry["retired"]]
    first = min(open_, key=lambda entry: int(entry["collective_seq_id"]), default=None)
    if first is None:
        return GroupCalls(group=group, called=called, ended=called)
    name = str(first["profiling_name"]).rpartition(":")[2]
    return GroupCalls(group=group, called=called, ended=int(first["collective_seq_id"]) - 1, waits_in=name)
