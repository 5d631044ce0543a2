"""What can go wrong, in words a person can act on, and the exit code that goes with it."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the `raylaunch` process answers to its shell; after a signal, 128 and its number (`stopped_by`)."""

    OK = 0
    JOB_FAILED = 1
    USAGE = 2
    UNAVAILABLE = 3
    INTERNAL = 4
    INTERRUPTED = 130


def stopped_by(signal: int) -> int:
    """The exit code of a run that a signal ended, as a shell has it: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + signal


class RaylaunchError(Exception):
    """An error with a message for the person, an optional hint, and an exit code.

    The message says what is wrong and where; the hint says what to do. Neither ends in a full stop.
    """

    exit_code: int = ExitCode.INTERNAL

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process borders, and keyword arguments are lost by the default way.
        return _rebuild, (type(self), self.message, self.hint)


def _rebuild(cls: type[RaylaunchError], message: str, hint: str) -> RaylaunchError:
    return cls(message, hint=hint)


class ConfigError(RaylaunchError):
    """The command line or the job file is wrong; nothing was started."""

    exit_code = ExitCode.USAGE


class ClusterError(RaylaunchError):
    """The cluster cannot be reached, or could not give what was asked in time."""

    exit_code = ExitCode.UNAVAILABLE


class JobFailedError(RaylaunchError):
    """Workers failed and the restart budget is spent, or a restart would not help."""

    exit_code = ExitCode.JOB_FAILED


class InterruptedByUserError(RaylaunchError):
    """The run was stopped by a signal before it finished."""

    exit_code: int = ExitCode.INTERRUPTED
