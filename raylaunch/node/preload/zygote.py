"""The zygote: a fork of the fork server that imports what the script imports, and forks the workers from then on.

The name is Chromium's and Android's for a process that is forked to start others. Its forks become children of the fork
server, which treats them as its own. If the zygote dies, the fork server forks the workers itself again.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import NoReturn

from raylaunch.node.linux import command_line, processes
from raylaunch.node.linux.processes import fork
from raylaunch.node.preload.fork_safety import ProcessSnapshot, asks_nvml
from raylaunch.node.protocol import wire
from raylaunch.node.protocol.import_manifest import ImportedModule, ImportManifest
from raylaunch.worker import cpython_internals
from raylaunch.worker.runtime import boot
from raylaunch.worker.runtime.server_file import ServerFile
from raylaunch.worker.runtime.spec import WorkerSpec

_MIN_SECONDS = 0.1
"""CPU seconds that the imports must take to be worth a zygote."""
_PAUSE_RATIO = 2.0
"""Seconds of sleep for each second of CPU, so that the CPUs are left to the workers."""


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
            seconds = _import_all(
                order.manifest, lambda name: self._send(ImportStarted(name=name)), in_a_hurry=order.in_a_hurry
            )
        except _ImportRefusedError as error:
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


class _ImportRefusedError(Exception):
    """The import of a module has changed this process in a way that its workers must not inherit."""

    def __init__(self, name: str, why: str) -> None:
        """`why` is a predicate (`starts a process`), or empty where the module just cannot be imported."""
        super().__init__(name, why)
        self.name = name
        self.why = why


def _import_all(manifest: ImportManifest, on_import: Callable[[str], None], *, in_a_hurry: bool) -> float:
    """Import all modules of the manifest ahead of the script, and return the CPU seconds that it took.

    `on_import` is called with a module's name before it is imported. `in_a_hurry` makes no pauses. Raises
    _ImportRefusedError at the first module with a side effect.
    """
    snapshot, began = ProcessSnapshot.take(), time.process_time()
    watcher = _SideEffectWatcher(manifest, pause_ratio=0.0 if in_a_hurry else _PAUSE_RATIO)
    with asks_nvml(), watcher.installed():
        for module in manifest.parts:
            if module.name in sys.modules:
                continue
            on_import(module.name)
            with _environment_of(module, manifest.apart):
                failed = _import(module.name)
            why = watcher.side_effect or snapshot.side_effect() or _found_elsewhere(manifest.places)
            if why or (failed and _left_submodules(module.name)):
                raise _ImportRefusedError(module.name, why)
            watcher.pause()
    return time.process_time() - began


def _import(name: str) -> bool:
    """Import a module; return whether that failed."""
    try:
        importlib.import_module(name)
    except BaseException:  # noqa: BLE001
        return True
    return False


def _left_submodules(name: str) -> bool:
    """Return whether a module that could not be imported left submodules: its next import would differ from a first."""
    return any(other.startswith(name + ".") for other in sys.modules)


def _found_elsewhere(places: Mapping[str, tuple[str, ...]]) -> str:
    """Return a predicate if a module was found in another place than by the script, else `""`."""
    for name, where in places.items():
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is None:
            continue
        found = (spec.origin,) if spec.origin else tuple(spec.submodule_search_locations or ())
        if found != where:
            return f"imports another `{name}` than the script"
    return ""


@contextlib.contextmanager
def _environment_of(module: ImportedModule, apart: frozenset[str]) -> Iterator[None]:
    """Set the variables that the script had set when it imported the module, except those in `apart`.

    Afterwards they are restored; changes that the import made itself stay.
    """
    before = dict(os.environ)
    for name, value in module.env.items():
        if name not in apart:
            _set_variable(name, value)
    given = dict(os.environ)
    try:
        yield
    finally:
        now = dict(os.environ)
        for name in given.keys() | now.keys():
            if given.get(name) == now.get(name):
                _set_variable(name, before.get(name))


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    elif os.environ.get(name) != value:
        os.environ[name] = value


class _SideEffectWatcher:
    """Notices imports of the script's own modules, and reads of variables that differ between workers.

    For the imports it is a finder on `sys.meta_path` that never finds anything.
    """

    def __init__(self, manifest: ImportManifest, pause_ratio: float) -> None:
        self.side_effect = ""
        self._own = manifest.own
        self._apart = manifest.apart
        self._pause_ratio = pause_ratio
        self._last_pause = time.process_time()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Record side effects of imports within the `with` block."""
        sys.meta_path.insert(0, self)
        try:
            with cpython_internals.environment_reads(self._on_read):
                yield
        finally:
            sys.meta_path.remove(self)

    def _on_read(self, name: str) -> None:
        if name in self._apart and not self.side_effect:
            self.side_effect = f"reads {name}, of which each worker has its own"

    def find_spec(self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> None:
        """Note that a module is looked for (importlib's protocol)."""
        if fullname in self._own and not self.side_effect:
            self.side_effect = f"imports `{fullname}`, which is the script's own"
        self.pause()

    def pause(self) -> None:
        """Sleep in proportion to the CPU time since the last pause."""
        if self._pause_ratio:
            time.sleep((time.process_time() - self._last_pause) * self._pause_ratio)
            self._last_pause = time.process_time()
