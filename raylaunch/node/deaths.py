"""What is known of a dead worker: its report, the error file it may have left, the end of its stderr."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from raylaunch.core.contract import ERROR, STDERR, STDOUT
from raylaunch.core.failure import Failure, WorkerError
from raylaunch.worker.spec import Report

_TAIL_BYTES = 8192
_TAIL_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Who died, and when (CLOCK_MONOTONIC of the machine)."""

    attempt: int
    rank: int
    local_rank: int
    pid: int
    at: float


def failure(death: Death, *, exit_code: int, stopped: bool, report: Report, node: str, folder: PurePath) -> Failure:
    """All that can be found out, as the core wants it. Leaves an error file where the worker left none."""
    error_file = Path(folder / ERROR)
    error = _from_report(report) or _from_file(error_file)
    if report.error_type:
        _write(error_file, report)
    return Failure(
        attempt=death.attempt,
        node=node,
        rank=death.rank,
        local_rank=death.local_rank,
        pid=death.pid,
        at=death.at,
        exit_code=exit_code,
        error=error,
        stopped=stopped,
        stdout=str(folder / STDOUT),
        stderr=str(folder / STDERR),
        tail=tail(Path(folder / STDERR)),
    )


def _from_report(report: Report) -> WorkerError | None:
    if not report.error_type:
        return None
    return WorkerError(
        type=report.error_type, message=report.message, traceback=report.traceback, hopeless=report.hopeless
    )


def _from_file(path: Path) -> WorkerError | None:
    """What `@record` wrote (torch 2.13, `elastic/multiprocessing/errors`).

    Its `message` is a text, or an object with `message` and `extraInfo.py_callstack`.
    """
    try:
        data: Any = json.loads(path.read_text())
        message = data["message"]
        if isinstance(message, str):
            return WorkerError(type="error", message=message, traceback="")
        text, trace = str(message["message"]), str(message["extraInfo"]["py_callstack"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        return WorkerError(type="error", message=f"left an error file that cannot be read ({error!r})", traceback="")
    kind, _, rest = text.partition(": ")
    return WorkerError(type=kind, message=rest, traceback=trace)


def _write(path: Path, report: Report) -> None:
    """In `@record`'s form, so that tools which read those files can read this one. Its absence harms nobody."""
    if path.exists():
        return
    message = {
        "message": f"{report.error_type}: {report.message}",
        "extraInfo": {"py_callstack": report.traceback, "timestamp": str(int(time.time()))},
    }
    with contextlib.suppress(OSError):
        path.write_text(json.dumps({"message": message}))


def tail(path: Path) -> str:
    """The last lines of a log file; empty where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-_TAIL_LINES:])
