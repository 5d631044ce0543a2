"""The entry point of the `raylaunch` command."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from raylaunch.cli import run_once
from raylaunch.cli.args import parser, subcommands, usage
from raylaunch.cli.args.diagnostics import Finding, render
from raylaunch.cli.args.parser import CommandLine, GivenValue, Mode
from raylaunch.core.job import secrets
from raylaunch.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from raylaunch.core.job.job import Job
    from raylaunch.core.job.redaction import Redactor

# Imports are made where they are used, so that `--help` and error messages do not wait for Ray.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. `argv`: without the program's name; default: `sys.argv[1:]`."""
    arguments = sys.argv[1:] if argv is None else argv
    _open_missing_streams()
    _encode_anything()
    return run_once.leave(run_once.exit_code_of(lambda: _command(arguments)))


def _open_missing_streams() -> None:
    """Open /dev/null as stdin, stdout or stderr if it is closed (`2>&-`), so that no other file takes its number."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004
        os.set_inheritable(fd, True)
    os.close(fd)


def _encode_anything() -> None:
    r"""Make stdout write a character that its encoding lacks as `\xe9`, as stderr does, instead of raising an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError, ValueError):  # it is closed, or its file is another than at the start
            sys.stdout.reconfigure(errors="backslashreplace")


def _command(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in subcommands.BY_NAME:
        from raylaunch.cli.runs import commands  # noqa: PLC0415

        return commands.run(arguments, os.environ)
    return _run_command(parser.parse(arguments, os.environ))


def _run_command(line: CommandLine) -> int:
    if line.typed("help"):
        print(usage.full(), end="")
        return ExitCode.OK
    if line.typed("version"):
        return _version(line)
    if shell := line.typed("print-completion"):
        return _completion(shell)
    if line.mode is Mode.NOTHING:
        return _nothing_to_run(line)
    from raylaunch.cli.config import job_file, load  # noqa: PLC0415
    from raylaunch.core.job.redaction import Redactor  # noqa: PLC0415
    from raylaunch.core.job.validation import warnings  # noqa: PLC0415

    job = load.load(line, os.environ, run_once.say)
    redactor = Redactor.of(job, os.environ)
    _hide_secrets_of_the_command_line(redactor)
    notes = (load.ineffective_flags(line), load.settings_for_script(line))
    for text in (*notes, *warnings(job)):
        if text:
            run_once.say(text)
    if line.typed("plan"):
        return _plan(job, redactor)
    is_check = line.mode is Mode.CHECK
    text = job_file.dump(redactor.shown(job))
    if job.detach and not is_check:
        from raylaunch.cli.detached import detach  # noqa: PLC0415

        return detach.run(job, text, wait=not line.typed("no-wait"))
    if line.typed("no-wait"):
        raise ConfigError("`--no-wait` goes with `-d`", hint="without `-d` the command lasts as long as the run")
    return _run(job, text, is_check=is_check)


def _completion(shell: GivenValue) -> int:
    from raylaunch.cli import completion  # noqa: PLC0415

    if shell.text not in completion.SCRIPTS:
        message = f"there is no completion for `{secrets.cut(shell.text)}`"
        raise ConfigError(render([Finding(message=message, span=shell.span, hint=completion.HINT)]))
    print(completion.SCRIPTS[shell.text], end="")
    return ExitCode.OK


def _version(line: CommandLine) -> int:
    from raylaunch.cli.output import version_report  # noqa: PLC0415

    found = version_report.versions()
    print(version_report.as_json(found) if line.typed("json") else version_report.text(found), end="")
    return ExitCode.OK


def _hide_secrets_of_the_command_line(redactor: Redactor) -> None:
    """Hide them from `ps`, and from Ray's dashboard, which shows the command lines of all drivers."""
    from raylaunch.node.linux import command_line  # noqa: PLC0415

    command_line.overwrite(lambda words: [redactor.hide(str(word)) for word in secrets.shown_arguments(words)])


def _nothing_to_run(line: CommandLine) -> int:
    if line.given:
        message = "nothing to run: neither a script nor a job file is given"
        last = line.given[-1]
        given = secrets.cut(last.text)
        value = f"`{given}` is the value of `{last.flag.option}`; " if last.flag and last.flag.metavar else ""
        hint = f"{value}put the script or the job file after the flags"
        raise ConfigError(str(Finding(message=message, span=last.span, hint=hint)))
    print(f"{usage.USAGE}\n`raylaunch --help` lists all flags", file=sys.stderr)
    return ExitCode.USAGE


def _plan(job: Job, redactor: Redactor) -> int:
    from raylaunch.cli.output.report import plan_table  # noqa: PLC0415
    from raylaunch.cluster.run import plan_job  # noqa: PLC0415

    plan = plan_job(job)
    print(plan_table(plan, redactor.headline(job)), end="")
    return ExitCode.OK if plan.possible else ExitCode.UNAVAILABLE


def _run(job: Job, job_text: str, *, is_check: bool) -> int:
    if is_check or job.debug is not None or job.pty:  # what is started for these is of no use to other runs
        job = replace(job, keep_warm=0.0)
    return run_once.run(job, job_text, is_check=is_check)
