"""One run in this process, and what its end is to a shell: the exit code, and words on stderr where it was not ours."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from raylaunch.cli.shortage import advice
from raylaunch.errors import ExitCode, InterruptedByUserError, RaylaunchError

if TYPE_CHECKING:
    from raylaunch.core.job import Job

# Imports stay where they are needed: `--help` is there at once, and what is wrong is said before Ray is loaded.


def run(job: Job, job_text: str, *, is_check: bool = False) -> int:
    """Run it here, with the terminal as its audience. Raises as `run_job` does."""
    from raylaunch.cli.console import Console  # noqa: PLC0415
    from raylaunch.cli.error_file import leave_copy  # noqa: PLC0415
    from raylaunch.cli.event_log import watching  # noqa: PLC0415
    from raylaunch.cli.report import found_something_wrong, report  # noqa: PLC0415
    from raylaunch.cluster.run import run_job  # noqa: PLC0415

    console = Console()
    try:
        result = run_job(job, job_text, watching(job, console)).result
        leave_copy(result, os.environ, console.said)
        if not (is_check and found_something_wrong(result)):  # its table has said it
            console.last_words(report(result), ok=result.ok)
    finally:
        console.close()
    return result.exit_code


def answered(work: Callable[[], int]) -> int:
    """Its exit code; what it raises is said, and has an exit code too."""
    try:
        return work()
    except KeyboardInterrupt:
        say("stopped before anything was started")
        return ExitCode.INTERRUPTED
    except InterruptedByUserError as error:
        say(error.message)
        return error.exit_code
    except RaylaunchError as error:
        _complain(error.message, error.hint or advice(error.__cause__))
        return error.exit_code
    except Exception as error:  # noqa: BLE001
        if hint := advice(error):
            _complain(f"this machine does not give raylaunch what it needs: {error}", hint)
            return ExitCode.UNAVAILABLE
        from raylaunch.core.job import Job  # noqa: PLC0415
        from raylaunch.core.redaction import Secrets  # noqa: PLC0415

        print(Secrets.of(Job(), os.environ).hide(traceback.format_exc()), end="", file=sys.stderr)
        print(f"\nerror: this is a mistake of raylaunch {version()}, please report it", file=sys.stderr)
        return ExitCode.INTERNAL


def leave(code: int) -> int:
    """Return it; or end here and at once with it, where a connection to Ray could not be ended."""
    ray_session = sys.modules.get("raylaunch.cluster.ray_session")
    if ray_session is not None and ray_session.is_left_behind():
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError):  # it is closed, or nobody reads it any more
                file.flush()
        os._exit(code)
    return code


def version() -> str:
    """Of raylaunch, as it is installed."""
    from importlib import metadata  # noqa: PLC0415

    return metadata.version("raylaunch")


def say(text: str) -> None:
    """One line of ours, where there is no console."""
    print(f"raylaunch: {text}", file=sys.stderr)


def _complain(message: str, hint: str) -> None:
    print(message if message.startswith("error:") else f"error: {message}", file=sys.stderr)
    if hint:
        print("\n".join(["", *(f"hint: {line}" for line in hint.splitlines())]), file=sys.stderr)
