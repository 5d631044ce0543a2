"""The zygote: a fork of the fork server that imports what the script imports, and forks the workers from then on.

The name is Chromium's and Android's for a process that is forked to start others. Its forks become children of the fork
server, which treats them as its own. If the zygote dies, the fork server forks the workers itself again.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

from raylaunch.node.linux import command_line, processes
from raylaunch.node.linux.processes import fork
from raylaunch.node.preload.importer import ImportRefusedError, import_all
from raylaunch.node.protocol import wire
from raylaunch.node.protocol.import_manifest import ImportManifest
from raylaunch.worker.runtime import boot
from raylaunch.worker.runtime.server_file import ServerFile
from raylaunch.worker.runtime.spec import WorkerSpec

_MIN_SECONDS = 0.1
"""CPU seconds that the imports must take to be worth a zygote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportModules:
    """Order: import these modules. Answered by ImportsDone, ImportRefused or NothingImported."""

    manifest: ImportManifest
    in_a_hurry: bool = False
    """Make no pauses: the workers wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkWorkers:
    """Order: fork these workers. Answered by ProcessesForked and ForksHandedOver, or by ForkFailed.

    Each worker waits for a byte from the pipe whose end is sent with this order before it begins.
    """

    workers: tuple[WorkerSpec, ...]
    files: tuple[tuple[int, ...], ...]
    """For each worker, the fork server's file descriptors of its report, stack dumps, and import records (or -1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportStarted:
    """Report: the import of this module begins. If the zygote dies before its next message, this import killed it."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRefused:
    """Report: this module cannot be imported ahead. The zygote exits."""

    name: str
    why: str
    """A predicate, such as `starts a process`; `""`: the module just cannot be imported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportsDone:
    """Report: all modules are imported, without side effects."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NothingImported:
    """Report: the imports take so little time that no zygote is needed. The zygote exits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessesForked:
    """Report: the process ids of the workers in their order."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkFailed:
    """Report: not all processes could be forked. Those that were exit by themselves."""

    errno: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForksHandedOver:
    """Report: the forked processes are children of the fork server now."""


class Zygote:
    """The zygote's process: it obeys orders that come through a socket."""

    def __init__(self, orders: socket.socket, server: int) -> None:
        """`server` is the process id of the fork server."""
        self._orders = orders
        self._server = server
        self._is_worth_it = False

    def serve(self) -> NoReturn:
        """Obey orders until the fork server is gone, then exit. Raises `BecomeChild` in each worker."""
        command_line.set_helper_title("zygote")
        _discard_output()
        try:
            while True:
                order, gate = wire.receive(self._orders)
                if isinstance(order, ImportModules):
                    self._import_modules(order)
                else:
                    self._fork_workers(order, gate)
        except (EOFError, OSError):
            os._exit(0)  # exit handlers of the imported modules must not run

    def _send(self, report: object) -> None:
        wire.send(self._orders, report)

    def _import_modules(self, order: ImportModules) -> None:
        try:
            seconds = import_all(
                order.manifest, lambda name: self._send(ImportStarted(name=name)), in_a_hurry=order.in_a_hurry
            )
        except ImportRefusedError as error:
            for pid in processes.children():
                processes.kill_with_group(pid)
            self._send(ImportRefused(name=error.name, why=error.why))
            os._exit(0)
        self._is_worth_it |= seconds >= _MIN_SECONDS
        if not self._is_worth_it:
            self._send(NothingImported())
            os._exit(0)
        processes.prepare_to_fork()
        self._send(ImportsDone())

    def _fork_workers(self, order: ForkWorkers, gate: int | None) -> None:
        """Fork the workers through a child that exits at once.

        So they are orphans, and become children of the fork server, which is a subreaper.
        """
        assert gate is not None
        try:
            intermediate = os.fork()
        except OSError as error:
            os.close(gate)
            self._send(ForkFailed(errno=error.errno or 0))
            return
        if intermediate == 0:
            try:
                workers = zip(order.workers, order.files, strict=True)
                pids = tuple([fork(partial(self._run_worker, spec, files, gate)) for spec, files in workers])
                self._send(ProcessesForked(pids=pids))
            except OSError as error:
                os._exit(error.errno or errno.EAGAIN)
            os._exit(0)
        os.close(gate)
        code = os.waitstatus_to_exitcode(os.waitpid(intermediate, 0)[1])
        self._send(ForkFailed(errno=code) if code > 0 else ForksHandedOver())

    def _run_worker(self, spec: WorkerSpec, fds: tuple[int, ...], gate: int) -> int:
        command_line.set_worker_title(spec.title)
        self._orders.detach()
        if not os.read(gate, 1):
            os._exit(1)
        report, stacks, *imports = (ServerFile.opened(f"/proc/{self._server}/fd/{fd}") for fd in fds if fd >= 0)
        return boot.set_up_and_run(spec, boot.WorkerFiles(report, stacks, *imports), self._server, boot.run)


def _discard_output() -> None:
    """Discard what imports print: the worker that imported the same modules first has it in its log."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    os.close(null)
