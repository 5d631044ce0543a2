"""The exceptions of raylaunch, each with a message for the user, a hint and an exit code."""

from __future__ import annotations

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of the `raylaunch` command. A run that a signal stopped ends with `signal_exit_code`."""

    OK = 0
    JOB_FAILED = 1
    USAGE = 2
    UNAVAILABLE = 3
    INTERNAL = 4
    RESUMABLE = 75
    """The run was stopped in time, and a new run goes on: EX_TEMPFAIL of sysexits.h."""
    POINTLESS = 93
    """The job failed, and a new run would fail in the same way: NVIDIA's resiliency extension uses this code, too."""
    INTERRUPTED = 130


JOB_FAILURES = (ExitCode.JOB_FAILED, ExitCode.POINTLESS)
"""The exit codes of runs whose workers failed."""


def signal_exit_code(number: int) -> int:
    """Return the exit code of a run that a signal stopped, as shells report it: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + number


def end_state(exit_code: int) -> str:
    """Return what became of a run with this exit code: `succeeded`, `failed`, or `stopped` by a signal or in time."""
    if exit_code == ExitCode.OK:
        return "succeeded"
    stopped = (ExitCode.RESUMABLE, *map(signal_exit_code, signal.Signals))
    return "stopped" if exit_code in stopped else "failed"


def resume(exit_code: int) -> str:
    """Return whether to start a run with this exit code again: `yes`, `no`, since it is done, or `pointless`."""
    if exit_code == ExitCode.OK:
        return "no"
    return "pointless" if exit_code in (ExitCode.USAGE, ExitCode.INTERNAL, ExitCode.POINTLESS) else "yes"


class RaylaunchError(Exception):
    """Base of all errors that raylaunch raises on purpose.

    `message` says what is wrong and where; `hint` (or "") says what to do. Neither ends with a full stop.
    """

    __module__ = "raylaunch"  # by which tracebacks name it, and programs catch it

    exit_code: int = ExitCode.INTERNAL

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are pickled to reach other processes; the default way calls `__init__` without keyword arguments.
        return _without_init, (type(self), self.message), vars(self)


def _without_init(kind: type[RaylaunchError], message: str) -> RaylaunchError:
    return kind.__new__(kind, message)


class ConfigError(RaylaunchError):
    """The command line or the job file is wrong; nothing was started."""

    __module__ = "raylaunch"

    exit_code = ExitCode.USAGE


class ClusterError(RaylaunchError):
    """The cluster cannot be reached, or did not provide the requested nodes in time."""

    __module__ = "raylaunch"

    exit_code = ExitCode.UNAVAILABLE


class RunStoppedError(RaylaunchError):
    """`Handle.stop` or a deadline ended the run before it had finished."""

    __module__ = "raylaunch"

    def __init__(self, message: str, *, hint: str = "", exit_code: int = signal_exit_code(15)) -> None:
        super().__init__(message, hint=hint)
        #: 75 if its time was over, else as for a run that a signal stopped.
        self.exit_code = exit_code


class InterruptedByUserError(KeyboardInterrupt):
    """A signal stopped the run before it finished.

    It is a KeyboardInterrupt and no RaylaunchError, so that no `except Exception` of a program swallows Ctrl-C.
    """

    exit_code: int = ExitCode.INTERRUPTED

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
