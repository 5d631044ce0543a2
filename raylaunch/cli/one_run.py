"""One run in this process, and what its end is to a shell: the exit code, and words on stderr where it was not ours."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

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
        _complain(error)
        return error.exit_code
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        print(f"\nerror: this is a mistake of raylaunch {version()}, please report it", file=sys.stderr)
        return ExitCode.INTERNAL


def version() -> str:
    """Of raylaunch, as it is installed."""
    from importlib import metadata  # noqa: PLC0415

    return metadata.version("raylaunch")


def say(text: str) -> None:
    """One line of ours, where there is no console."""
    print(f"raylaunch: {text}", file=sys.stderr)


def _complain(error: RaylaunchError) -> None:
    text = error.message if error.message.startswith("error:") else f"error: {error.message}"
    print(text, file=sys.stderr)
    if error.hint:
        print("\n".join(["", *(f"hint: {line}" for line in error.hint.splitlines())]), file=sys.stderr)
