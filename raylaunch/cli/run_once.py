"""Run one job in this process, and turn its outcome or exception into an exit code and an error message."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from raylaunch.core.text import printable
from raylaunch.errors import ExitCode, InterruptedByUserError, RaylaunchError

if TYPE_CHECKING:
    from raylaunch.capabilities.terminal.driver import Keyboard
    from raylaunch.cluster.driver.observer import RunObserver
    from raylaunch.cluster.driver.succession import Succession
    from raylaunch.core.job.job import Job
    from raylaunch.core.record.result import RunResult

# Imports are made where they are used, so that `--help` and error messages do not wait for Ray.

_FULL_DISK = "a disk is full or has no free inodes: see `df -h` and `df -i`, also for /tmp and /dev/shm"
_OS_ERROR_HINTS = {
    errno.EMFILE: "allow more open files: `ulimit -n` shows the limit of a process",
    errno.ENFILE: "allow more open files: `sysctl fs.file-max` shows the limit of the machine",
    errno.EAGAIN: "allow more processes and threads: see `ulimit -u`, or `pids.max` of the container",
    errno.ENOMEM: "more memory is needed: see `free -h`, or `memory.max` of the container",
    errno.EFBIG: "allow larger files: `ulimit -f` shows the limit",
    errno.ENOSPC: _FULL_DISK,
    errno.EDQUOT: _FULL_DISK,
}


def run(
    job: Job,
    job_text: str,
    *,
    is_check: bool = False,
    payload: bytes = b"",
    observe: Callable[[RunObserver], RunObserver] = lambda observer: observer,
    succession: Succession | None = None,
) -> int:
    """Run the job, print what happens, and return the exit code. Raises as `run_job` does.

    `job_text`: the job as YAML, without secrets, for the run folder. `is_check`: it is the self-check. `payload` and
    `succession`: see `run_job`. `observe`: puts an observer before the console.
    """
    from raylaunch.cli.output.console import Console, run_observer  # noqa: PLC0415
    from raylaunch.cli.output.report import is_failed_check, report, write_error_file  # noqa: PLC0415
    from raylaunch.cluster.driver.observer import described  # noqa: PLC0415
    from raylaunch.cluster.local.file_writer import STALL_SECONDS  # noqa: PLC0415
    from raylaunch.cluster.run import run_job  # noqa: PLC0415

    job, keyboard = with_terminal(job)
    console = Console()
    told: list[str] = []

    def conclude(result: RunResult) -> None:
        if not is_check:
            from raylaunch.cli.html_report.run_report import write_at_the_end  # noqa: PLC0415

            write_at_the_end(job, result, os.environ, told.append, version())

    try:
        observer = observe(run_observer(job, console))
        outcome = run_job(
            job, job_text, observer, payload=payload, keyboard=keyboard, succession=succession, conclude=conclude
        )
        result = outcome.result
        try:
            writer = threading.Thread(
                target=write_error_file, args=(result, os.environ, console.on_message), daemon=True
            )
            writer.start()
            writer.join(STALL_SECONDS)  # the file system may not answer
            if not (is_check and is_failed_check(result)):
                console.report(report(result), ok=result.ok)
            for line in told:
                console.say(line)
        except Exception as error:  # noqa: BLE001
            console.on_message(f"the report cannot be made: {described(error)} (this is a bug in raylaunch)")
            console.on_message(result.why)
    finally:
        console.close()
    return result.exit_code


def with_terminal(job: Job) -> tuple[Job, Keyboard | None]:
    """Return the job as it is to be run, and the terminal that it gives to one rank. Raises ConfigError without one."""
    if job.debug is None and not job.pty:
        return job, None
    from raylaunch.cli.output.raw_terminal import RawTerminal  # noqa: PLC0415

    env = {"TERM": os.environ.get("TERM", "xterm")} | job.env
    if job.debug is None:
        return replace(job, env=env), RawTerminal(0, is_debugged=False)
    terminal = RawTerminal(job.debug, is_debugged=True)
    say(f"rank {job.debug} has this terminal; Ctrl-\\ stops the run; the others' output is in their log files")
    quiet = replace(job, env=env, show="none", tee=0, hang_timeout="off", progress="off")
    return quiet, terminal


def exit_code_of(work: Callable[[], int]) -> int:
    """Return the exit code of `work`. An exception is printed to stderr and turned into an exit code."""
    try:
        return work()
    except InterruptedByUserError as error:
        say(error.message)
        return error.exit_code
    except KeyboardInterrupt:
        say("stopped before anything was started")
        return ExitCode.INTERRUPTED
    except RaylaunchError as error:
        _print_error(error.message, error.hint or _os_error_hint(error.__cause__))
        return error.exit_code
    except Exception as error:  # noqa: BLE001
        if hint := _os_error_hint(error):
            _print_error(f"the operating system refused what raylaunch needs: {error}", hint)
            return ExitCode.UNAVAILABLE
        from raylaunch.core.job.job import Job  # noqa: PLC0415
        from raylaunch.core.job.redaction import Redactor  # noqa: PLC0415

        text = Redactor.of(Job(), os.environ).hide(traceback.format_exc())
        _print(
            f"{printable(text, several_lines=True)}\nerror: this is a bug in raylaunch {version()}; please report it"
        )
        return ExitCode.INTERNAL


def leave(code: int) -> int:
    """Return the exit code; or exit with it at once if a connection to Ray could not be closed.

    The interpreter's own exit would wait for that connection.
    """
    if _is_connection_abandoned():
        for file in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError):  # the stream is closed, or its reader is gone
                file.flush()
        os._exit(code)
    return code


def _is_connection_abandoned() -> bool:
    if "raylaunch.cluster.session.ray_session" not in sys.modules:  # without Ray: do not import it for this
        return False
    from raylaunch.cluster.session import ray_session  # noqa: PLC0415

    return ray_session.is_abandoned()


def version() -> str:
    """Return the version of the installed raylaunch."""
    from importlib import metadata  # noqa: PLC0415

    try:
        return metadata.version("raylaunch")
    except metadata.PackageNotFoundError:  # it is imported from a folder of source code
        return "unknown"


def say(text: str) -> None:
    """Print one line of raylaunch to stderr, without a console."""
    _print(f"raylaunch: {printable(text)}")


def _print_error(message: str, hint: str) -> None:
    text = message if message.startswith("error:") else f"error: {message}"
    lines = [*text.split("\n"), *([""] if hint else []), *(f"hint: {line}" for line in hint.splitlines())]
    _print("\n".join(map(printable, lines)))


def _print(text: str) -> None:
    """Print to stderr. A terminal that is gone, or a full disk, must not change the exit code."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr)


def _os_error_hint(error: BaseException | None) -> str:
    """Return what to do if a limit of the operating system caused the error, else ""."""
    if isinstance(error, MemoryError):
        return _OS_ERROR_HINTS[errno.ENOMEM]
    if isinstance(error, RuntimeError) and "start new thread" in str(error):  # Python gives it no errno
        return _OS_ERROR_HINTS[errno.EAGAIN]
    if not isinstance(error, OSError):
        return ""
    if isinstance(error, FileNotFoundError) and str(error.filename).startswith("/proc/self/"):
        return "/proc must be mounted, as on any Linux: raylaunch watches and ends processes through it"
    return _OS_ERROR_HINTS.get(error.errno or 0, "")
