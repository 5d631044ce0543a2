"""The command: read what was asked, run it, answer with the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from raylaunch.cli import command_line, help, one_run  # noqa: A004
from raylaunch.cli.command_line import CommandLine, Form
from raylaunch.cli.marks import Finding
from raylaunch.core import secrets
from raylaunch.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from raylaunch.core.job import Job

# Imports stay where they are needed: `--help` is there at once, and what is wrong is said before Ray is loaded.


def main(argv: Sequence[str] | None = None) -> int:
    """The program. `argv`: without the program's own name; default: the process's. Returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    _fill_gaps()
    return one_run.leave(one_run.answered(lambda: _command(command_line.parse(words, os.environ))))


def _fill_gaps() -> None:
    """Where stdin, stdout or stderr is closed (`2>&-`), the next file that is opened would be in its place."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004
        os.set_inheritable(fd, True)
    os.close(fd)


def _command(line: CommandLine) -> int:
    if line.typed("help"):
        print(help.full(), end="")
        return ExitCode.OK
    if line.typed("version"):
        print(f"raylaunch {one_run.version()}")
        return ExitCode.OK
    if line.form is Form.NOTHING:
        return _nothing(line)
    if line.form is Form.STATUS:
        return _status(line)
    from raylaunch.cli import config, dialect, torchrun  # noqa: PLC0415
    from raylaunch.core.problems import warnings  # noqa: PLC0415
    from raylaunch.core.redaction import shown  # noqa: PLC0415

    job = config.load(line, os.environ)
    for text in (torchrun.without_effect(line), *warnings(job)):
        if text:
            one_run.say(text)
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


def _status(line: CommandLine) -> int:
    from raylaunch.cli import status  # noqa: PLC0415

    print(status.text(os.environ, end=line.typed("end") is not None), end="")
    return ExitCode.OK


def _run(job: Job, job_text: str, *, is_check: bool) -> int:
    """Here, or with `keep_warm` where a run before it may have been."""
    if job.keep_warm and not is_check:
        from raylaunch.cli import warm_command  # noqa: PLC0415

        code = warm_command.run(job, job_text)
        if code is not None:
            return code
    return one_run.run(replace(job, keep_warm=0.0), job_text, is_check=is_check)
