"""The command: read what was asked, run it, answer with the exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raylaunch.cli import command_line, help  # noqa: A004
from raylaunch.cli.command_line import CommandLine, Form
from raylaunch.cli.marks import Finding
from raylaunch.core import secrets
from raylaunch.errors import ConfigError, ExitCode, InterruptedByUserError, RaylaunchError

if TYPE_CHECKING:
    from raylaunch.core.job import Job

# Imports stay where they are needed: `--help` is there at once, and what is wrong is said before Ray is loaded.


def main(argv: Sequence[str] | None = None) -> int:
    """The program. `argv`: without the program's own name; default: the process's. Returns the exit code."""
    try:
        return _command(command_line.parse(sys.argv[1:] if argv is None else argv, os.environ))
    except KeyboardInterrupt:
        _say("stopped before anything was started")
        return ExitCode.INTERRUPTED
    except InterruptedByUserError as error:
        _say(error.message)
        return error.exit_code
    except RaylaunchError as error:
        _complain(error)
        return error.exit_code
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        print(f"\nerror: this is a mistake of raylaunch {_version()}, please report it", file=sys.stderr)
        return ExitCode.INTERNAL


def _command(line: CommandLine) -> int:
    if line.typed("help"):
        print(help.full(), end="")
        return ExitCode.OK
    if line.typed("version"):
        print(f"raylaunch {_version()}")
        return ExitCode.OK
    if line.form is Form.NOTHING:
        return _nothing(line)
    from raylaunch.cli import config, dialect, torchrun  # noqa: PLC0415
    from raylaunch.core.problems import warnings  # noqa: PLC0415
    from raylaunch.core.redaction import shown  # noqa: PLC0415

    job = config.load(line, os.environ)
    for text in (torchrun.without_effect(line), *warnings(job)):
        if text:
            _say(text)
    if line.typed("plan"):
        return _plan(job)
    return _run(job, dialect.dump(shown(job, os.environ)), is_check=line.form is Form.CHECK)


def _nothing(line: CommandLine) -> int:
    if line.given:
        message = "nothing to run: neither a script nor a job file is given"
        last = line.given[-1]
        given = secrets.cut(last.text)
        took = f"`{given}` is the value of `{last.flag.spelled}`; " if last.flag and last.flag.takes else ""
        raise ConfigError(str(Finding(message=message, place=last.place, hint=f"{took}name what runs after the flags")))
    print(f"{help.USAGE}\n`raylaunch --help` says more", file=sys.stderr)
    return ExitCode.USAGE


def _plan(job: Job) -> int:
    from raylaunch.cli.report import plan_table  # noqa: PLC0415
    from raylaunch.cluster.run import plan_job  # noqa: PLC0415
    from raylaunch.core.redaction import shown  # noqa: PLC0415

    seen = shown(job, os.environ)
    print(plan_table(plan_job(job), f"{seen.title}: {seen.entrypoint}"), end="")
    return ExitCode.OK


def _run(job: Job, job_text: str, *, is_check: bool) -> int:
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


def _version() -> str:
    from importlib.metadata import version  # noqa: PLC0415

    return version("raylaunch")


def _say(text: str) -> None:
    print(f"raylaunch: {text}", file=sys.stderr)


def _complain(error: RaylaunchError) -> None:
    text = error.message if error.message.startswith("error:") else f"error: {error.message}"
    print(text, file=sys.stderr)
    if error.hint:
        print("\n".join(["", *(f"hint: {line}" for line in error.hint.splitlines())]), file=sys.stderr)
