"""`preload: auto` in the fork server: reads what the workers import, and lets a zygote import it meanwhile."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from raylaunch.node.preload import zygote
from raylaunch.node.preload.zygote_client import ForkedWorkers, ImportReport, ZygoteClient
from raylaunch.node.protocol import import_manifest, node_status, wire
from raylaunch.node.protocol.forkserver_messages import ForkServerEvent, Initialize
from raylaunch.node.protocol.import_manifest import ImportManifest
from raylaunch.worker.runtime import import_recorder
from raylaunch.worker.runtime.import_recorder import ImportRecord
from raylaunch.worker.runtime.spec import WorkerSpec

_FIRST_POLL_SECONDS = 2.0
"""After so long without an import, the script's imports are taken to be finished."""
_MAX_POLL_SECONDS = 600.0
"""The interval between polls is doubled by each poll that finds nothing new, up to this."""
_MAX_ZYGOTES = 10
"""For one script. Each zygote but the last refuses a module, which the next one leaves out."""
_HURRY_SECONDS = 60.0
"""How long an attempt waits for a zygote that imports what a fork server before this one had imported."""


@dataclass(slots=True)
class _RecordsFile:
    """The memory file into which the workers of one attempt write import records."""

    fd: int
    nproc: int
    size_at_poll: int = 0
    bytes_read: int = 0


class RecordsPoller:
    """Reads what the workers of the present attempt have recorded, whenever they have stopped importing."""

    def __init__(self) -> None:
        #: The file of the present attempt, and of the attempt before unless all of it is read.
        self._files: list[_RecordsFile] = []
        #: The time.monotonic() of the next poll; None: there is none.
        self.poll_at: float | None = None
        self._interval = _FIRST_POLL_SECONDS

    def open(self, nproc: int) -> int:
        """Begin to poll for the records of a new attempt. Return the file descriptor that its workers write to."""
        self._files.append(_RecordsFile(wire.memory_file("raylaunch-imports"), nproc))
        self._interval = _FIRST_POLL_SECONDS
        self.poll_at = time.monotonic() + _FIRST_POLL_SECONDS
        return self._files[-1].fd

    def stop(self) -> None:
        """Stop polling. Records that have not been read yet are read in the next attempt."""
        self.poll_at = None
        self._close(self._files[:-1] + [last for last in self._files[-1:] if last.bytes_read == _size(last)])

    def discard(self) -> None:
        """Close all files, and forget what has not been read."""
        self._close(list(self._files))

    def _close(self, files: list[_RecordsFile]) -> None:
        for file in files:
            os.close(file.fd)
            self._files.remove(file)

    def poll(self) -> list[tuple[list[ImportRecord], int]]:
        """If it is time, return all records of each attempt that has new ones, and how many workers it had."""
        if self.poll_at is None or time.monotonic() < self.poll_at:
            return []
        grows = False
        for file in self._files:
            size = _size(file)
            grows |= size != file.size_at_poll
            file.size_at_poll = size
        attempts = []
        if not grows:
            attempts = [(_read(file), file.nproc) for file in self._files if file.bytes_read != file.size_at_poll]
            self._close(self._files[:-1])
        self._interval = _FIRST_POLL_SECONDS if grows else min(2 * self._interval, _MAX_POLL_SECONDS)
        self.poll_at = time.monotonic() + self._interval
        return attempts


def _size(file: _RecordsFile) -> int:
    return os.fstat(file.fd).st_size


def _read(file: _RecordsFile) -> list[ImportRecord]:
    file.bytes_read = file.size_at_poll
    return list(import_recorder.read_records(os.pread(file.fd, file.size_at_poll, 0)))


class PreloadController:
    """What is known of the present script's imports, and the zygote that imports them.

    `send` sends a message to the supervisor.
    """

    def __init__(self, begin: Initialize, send: Callable[[ForkServerEvent], None]) -> None:
        self.zygote = ZygoteClient()
        self._is_wanted = begin.preload_auto
        self._send = send
        self._manifest = self._requested = begin.manifest or ImportManifest(entry=())
        #: What a zygote has imported without side effects.
        self._proven = begin.manifest
        #: Modules whose import has side effects; their submodules are left out too.
        self._refused: set[str] = set()
        #: Whether there is something to import that no zygote was told to.
        self._has_news = begin.manifest is not None
        self._zygotes = 0
        self._records = RecordsPoller()
        self._hurry_until = time.monotonic() + _HURRY_SECONDS if self._has_news else 0.0

    @property
    def delays_start(self) -> bool:
        """Whether the next attempt should wait for the zygote."""
        return time.monotonic() < self._hurry_until

    def seconds_until_poll(self) -> float | None:
        """Return in how many seconds `poll` must be called though nothing is readable; None: it need not."""
        times = [at for at in (self._records.poll_at, self._hurry_until) if at]
        return min(times) - time.monotonic() if times else None

    def begin_attempt(self, workers: Sequence[WorkerSpec]) -> int:
        """Return the file descriptor for the import records of a new attempt, or -1 where none are wanted."""
        self._hurry_until = 0.0
        self._records.stop()
        if not self._is_wanted or not workers or workers[0].kind == "command":
            return -1
        entry = import_manifest.entry(workers[0])
        if self._manifest.entry != entry:  # another script, for which other modules may have been right
            self.zygote.kill()
            self._records.discard()
            self._manifest, self._proven, self._refused, self._zygotes = ImportManifest(entry=entry), None, set(), 0
        self._manifest = replace(self._manifest, apart=self._manifest.apart | import_manifest.apart(workers))
        return self._records.open(len(workers))

    def poll(self) -> None:
        """Handle the zygote's reports, and read import records if that is due."""
        while (report := self.zygote.receive()) is not None:
            self._handle(report)
        if not self.delays_start:
            self._hurry_until = 0.0
        for records, nproc in self._records.poll():
            before, self._manifest = self._manifest, import_manifest.grown(self._manifest, records, nproc)
            self._has_news |= before.parts != self._manifest.parts

    def request_imports(self, fork: Callable[[socket.socket], int]) -> None:
        """Let the zygote import what no zygote was told to import yet. Does nothing where there is no such module.

        If there is no zygote, `fork` forks one with its end of the socket, and returns its process id. If that raises
        OSError, so does this method, which can be called again then.
        """
        if not self._has_news or self.zygote.is_importing:
            return
        requested = self._manifest.without(self._refused)
        needs_zygote = bool(requested.parts) and not self.zygote.exists
        if needs_zygote and self._zygotes < _MAX_ZYGOTES:
            self.zygote.start(fork)
            self._zygotes += 1
        self._has_news, self._requested = False, requested
        if requested.parts and self.zygote.exists:
            self.zygote.import_modules(requested, in_a_hurry=self.delays_start)

    def _handle(self, report: ImportReport) -> None:
        match report:
            case zygote.ImportsDone():
                self._hurry_until = 0.0
                self._proven = self._requested
                self._report("")
            case zygote.NothingImported():
                self._hurry_until = 0.0  # and no other zygote, until there is more to import
            case zygote.ImportRefused():
                self._has_news = True
                if report.name:
                    self._refused.add(report.name)
                    text = f"`{report.name}` is not preloaded: importing it {report.why}" if report.why else ""
                    self._report(text)

    def _report(self, why: str) -> None:
        proven = self._proven and self._proven.without(self._refused)
        self._send(node_status.ManifestChanged(manifest=proven, why=why))

    def fork_workers(self, workers: tuple[WorkerSpec, ...], files: list[tuple[int, ...]]) -> ForkedWorkers | None:
        """Let the zygote fork the workers, if there is one that can. `files`: see `zygote.ForkWorkers`."""
        existed = self.zygote.exists
        forked = self.zygote.fork_workers(workers, files)
        self._has_news |= existed and not self.zygote.exists  # it was lost meanwhile: `poll` asks for another one
        return forked
