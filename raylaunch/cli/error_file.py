"""The root cause's error, for whoever started this command and asked for it, as torchrun leaves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from raylaunch.core import error_file
from raylaunch.core.result import RunResult

VARIABLE = "TORCHELASTIC_ERROR_FILE"


def leave_copy(result: RunResult, environ: Mapping[str, str], warn: Callable[[str], None]) -> None:
    """Write the root cause's error file where the command's own TORCHELASTIC_ERROR_FILE says, with its exit code in it.

    A root cause without an error file (a signal, `sys.exit`) leaves none. What is there from before is overwritten.
    """
    path, cause = environ.get(VARIABLE), result.cause
    if not path or cause is None or cause.error is None:
        return
    try:
        Path(path).write_text(error_file.compose(cause.error, exit_code=cause.exit_code), encoding="utf-8")
    except OSError as error:
        warn(f"cannot write {path} (TORCHELASTIC_ERROR_FILE): {error.strerror}")
