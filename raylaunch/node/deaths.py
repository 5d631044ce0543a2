"""What is known of a dead worker: its report, the error file it may have left, the end of its stderr, the evidence."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from raylaunch.core import error_file
from raylaunch.core.contract import ERROR, STDERR, STDOUT
from raylaunch.core.failure import Failure, WorkerError
from raylaunch.node import wire
from raylaunch.node.memory import KernelKills
from raylaunch.worker.spec import Report

_TAIL_BYTES = 8192
_TAIL_LINES = 20
_MOST_ERROR_BYTES = 256 * 1024
_SHARED_MEMORY = "/dev/shm"  # noqa: S108
_SHELL = 128
"""What a shell adds to the number of the signal that ended its command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Who died, and when (CLOCK_MONOTONIC of the machine)."""

    attempt: int
    rank: int
    local_rank: int
    pid: int
    at: float


def report(fd: int | None) -> Report:
    """The worker's last words, from their file; empty where it left none, or was killed while it wrote them."""
    data = b"" if fd is None else wire.read_all(fd)
    try:
        found = pickle.loads(data)  # noqa: S301
    except Exception:  # noqa: BLE001
        return Report()
    return found if isinstance(found, Report) else Report()


def failure(
    death: Death,
    *,
    exit_code: int,
    stopped: bool,
    report: Report,
    node: str,
    folder: PurePath,
    kills: KernelKills,
) -> Failure:
    """All that can be found out, as the core wants it. Leaves an error file where the worker left none."""
    path = Path(folder / ERROR)
    error, spoilt = _recorded(path)
    if report.error_type:
        error = _reported(report, error)
        if not os.path.lexists(path):
            _write(path, error)
    last_lines = tail(Path(folder / STDERR))
    return Failure(
        attempt=death.attempt,
        node=node,
        host=socket.gethostname(),
        rank=death.rank,
        local_rank=death.local_rank,
        pid=death.pid,
        at=death.at,
        exit_code=exit_code,
        error=error,
        error_file=str(path) if path.exists() else "",
        spoilt=spoilt,
        evidence="" if stopped else _evidence(exit_code, death.pid, last_lines, kills),
        stopped=stopped,
        stdout=str(folder / STDOUT),
        stderr=str(folder / STDERR),
        tail=last_lines,
    )


def _recorded(path: Path) -> tuple[WorkerError | None, str]:
    """What the error file says, or why it cannot be read."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            data = file.read(_MOST_ERROR_BYTES + 1) or b""
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as error:
        return None, str(error.strerror)
    if len(data) > _MOST_ERROR_BYTES:
        return None, f"it has more than {_MOST_ERROR_BYTES // 1024} KiB"
    try:
        return error_file.parse(data.decode()), ""
    except ValueError as error:
        return None, str(error)


def _without_waiting(path: str, flags: int) -> int:
    """A pipe of that name must not hold us up."""
    return os.open(path, flags | os.O_NONBLOCK)


def _reported(report: Report, recorded: WorkerError | None) -> WorkerError:
    """The worker's last words. Of its error file count only the time and the form, and these where it says the same."""
    error = WorkerError(
        type=report.error_type,
        message=report.message,
        traceback=report.traceback,
        hopeless=report.hopeless,
        timestamp=int(time.time()),
    )
    if recorded is None or (recorded.type, recorded.message) != (error.type, error.message):
        return error
    return replace(error, timestamp=recorded.timestamp, written=recorded.written)


def _write(path: Path, error: WorkerError) -> None:
    """In `@record`'s form, so that tools which read those files can read this one. Its absence harms nobody."""
    with contextlib.suppress(OSError), open(path, "w", opener=_private) as file:
        file.write(error_file.compose(error))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _evidence(exit_code: int, pid: int, last_lines: str, kills: KernelKills) -> str:
    """What else is known of a death by signal."""
    match exit_code:
        case _ if exit_code == -signal.SIGKILL:
            return kills.evidence(pid or None)
        case _ if exit_code == _SHELL + signal.SIGKILL:
            return kills.evidence(None)  # what was killed is a child of the worker's
        case _ if exit_code == -signal.SIGABRT and "std::bad_alloc" in last_lines:
            return "out of memory: std::bad_alloc"
        case _ if exit_code == -signal.SIGBUS:
            return _shared_memory()
        case _:
            return ""


def _shared_memory(path: str = _SHARED_MEMORY) -> str:
    """How full it is: the commonest reason for SIGBUS."""
    try:
        found = os.statvfs(path)
    except OSError:
        return ""
    size, free = (blocks * found.f_frsize / 2**20 for blocks in (found.f_blocks, found.f_bavail))
    return f"{path}: {size - free:.0f} of {size:.0f} MiB in use"


def tail(path: Path) -> str:
    """The last lines of a log file; empty where there is none."""
    try:
        with path.open("rb") as file:
            before = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(before)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    if before and len(lines) > 1:
        del lines[0]  # half a line: what is secret in it would not be known for that
    return "\n".join(lines[-_TAIL_LINES:])
