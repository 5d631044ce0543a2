"""The fork server's side of the socket to its zygote."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable, Collection

from raylaunch.node.linux import processes
from raylaunch.node.preload import zygote
from raylaunch.node.protocol import wire
from raylaunch.node.protocol.import_manifest import ImportManifest
from raylaunch.worker.runtime.spec import WorkerSpec

_FORK_TIMEOUT = 5.0
"""Seconds that a fork of all workers may take."""

ImportReport = zygote.ImportRefused | zygote.NothingImported | zygote.ImportsDone


class ForkedWorkers:
    """Workers that the zygote has forked, and that wait for `start`."""

    def __init__(self, pids: tuple[int, ...], gate: int) -> None:
        self.pids = pids
        self._gate = gate

    def start(self) -> None:
        """Let the workers, which wait after the fork, run their script."""
        os.write(self._gate, b"." * len(self.pids))
        os.close(self._gate)


class ZygoteClient:
    """At most one zygote: none, one that imports, or one that can fork. Not thread-safe."""

    def __init__(self) -> None:
        self.pid = 0
        self.is_importing = False
        self._socket: socket.socket | None = None
        self._readable = select.epoll()
        self._has_imported = False
        self._current_import = ""

    def fileno(self) -> int:
        """Return a descriptor that is readable when `receive` has a report. It stays the same for all zygotes."""
        return self._readable.fileno()

    @property
    def exists(self) -> bool:
        """Whether there is a zygote."""
        return self._socket is not None

    @property
    def can_fork(self) -> bool:
        """Whether there is a zygote that has imported everything it was told to."""
        return self._socket is not None and not self.is_importing and self._has_imported

    def start(self, fork: Callable[[socket.socket], int]) -> None:
        """Start a zygote. `fork` gets the zygote's end of a pair of sockets, and returns the zygote's process id.

        Raises OSError if `fork` does.
        """
        self._socket, theirs = wire.pair()
        try:
            self.pid = fork(theirs)
        except OSError:
            theirs.close()
            self.kill()
            raise
        theirs.close()
        self._readable.register(self._socket, select.EPOLLIN)

    def import_modules(self, manifest: ImportManifest, *, in_a_hurry: bool) -> None:
        """Let the zygote import these modules; `receive` returns the result later."""
        assert self._socket is not None
        self.is_importing = True
        with contextlib.suppress(OSError):  # the zygote is gone, which `receive` reports
            wire.send(self._socket, zygote.ImportModules(manifest=manifest, in_a_hurry=in_a_hurry))

    def receive(self) -> ImportReport | None:
        """Return the zygote's next report; None: there is none.

        If the zygote died, its current import is refused.
        """
        while self._socket is not None and wire.is_readable(self._socket):
            try:
                report, _ = wire.receive(self._socket)
            except (EOFError, OSError):
                culprit = self._current_import if self.is_importing else ""
                self.kill()
                return zygote.ImportRefused(name=culprit, why="ends the process")
            if isinstance(report, zygote.ImportStarted):
                self._current_import = report.name
                continue
            if isinstance(report, zygote.ImportsDone):
                self.is_importing, self._has_imported = False, True
            else:
                self.kill()
            assert isinstance(report, ImportReport)
            return report
        return None

    def reaped(self, pids: Collection[int]) -> None:
        """Handle the end of these processes. `receive` reports it if the zygote is among them."""
        if self.pid in pids:
            self.pid = 0

    def kill(self) -> None:
        """Kill the zygote, if there is one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self.pid:
            processes.kill_with_group(self.pid)
        self.pid = 0
        self.is_importing = self._has_imported = False
        self._current_import = ""

    def close_in_child(self) -> None:
        """Close the descriptors in a forked child. The zygote and the fork server keep theirs."""
        if self._socket is not None:
            self._socket.close()
        self._readable.close()

    def fork_workers(self, workers: tuple[WorkerSpec, ...], files: list[tuple[int, ...]]) -> ForkedWorkers | None:
        """Let the zygote fork the workers. None: there is no zygote that can, or it failed and is killed.

        Raises OSError where it could not fork all of them.
        """
        if not self.can_fork:
            return None
        gate, start = os.pipe()
        pids = None
        try:
            pids = self._fork(zygote.ForkWorkers(workers=workers, files=tuple(files)), gate)
        finally:
            os.close(gate)
            if pids is None:
                os.close(start)  # workers that were forked before the error see this, and exit
        return ForkedWorkers(pids, start) if pids is not None else None

    def _fork(self, order: zygote.ForkWorkers, gate: int) -> tuple[int, ...] | None:
        """Send the order, and return the workers' process ids. None: the zygote was killed.

        Raises OSError where the zygote answers that it could not fork.
        """
        assert self._socket is not None
        try:
            self._socket.settimeout(_FORK_TIMEOUT)
            wire.send(self._socket, order, fd=gate)
            answer, _ = wire.receive(self._socket)
            last = wire.receive(self._socket)[0] if isinstance(answer, zygote.ProcessesForked) else answer
            self._socket.settimeout(None)
        except (EOFError, OSError):
            last = None
        if isinstance(last, zygote.ForksHandedOver):
            assert isinstance(answer, zygote.ProcessesForked)
            return answer.pids
        if isinstance(last, zygote.ForkFailed):
            raise OSError(last.errno, os.strerror(last.errno))
        self.kill()
        return None
