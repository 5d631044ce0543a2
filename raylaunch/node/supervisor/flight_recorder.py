"""Asks torch's Flight Recorder in a worker which collectives it has called, where it uses NCCL.

A thread of torch looks at a named pipe each second, and writes a pickle to a file (ProcessGroupNCCL.cpp, `DumpPipe`).
Only the first process group of a process does; a survivor that has made another one does not answer.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections import defaultdict
from typing import IO, Any

from raylaunch.core.failures.collectives import GroupCalls

_MOST_BYTES = 2**26
_ENDED = "completed"


class FlightRecorder:
    """That of one worker."""

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
    if os.fstat(file.fileno()).st_size > _MOST_BYTES:
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
