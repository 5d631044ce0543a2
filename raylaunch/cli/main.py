"""The command: read what was asked, run it, answer with the exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

import click

from raylaunch.errors import ConfigError, ExitCode, InterruptedByUserError, RaylaunchError

if TYPE_CHECKING:
    from raylaunch.core.job import Job

_HELP = """Run a PyTorch script on all nodes of a Ray cluster, as `torchrun` would on one.

JOB is a YAML file; KEY=VALUE override what it says, as in

\b
    raylaunch conf/job.yaml nproc_per_node=8 entrypoint.args='[--lr,3e-4]'

\b
Exit codes:
    0         all workers finished
    1         the job failed
    2         the command line or the job file is wrong
    3         the cluster cannot be reached, or did not give what was asked
    4         raylaunch is at fault
    130, 143  stopped by SIGINT, SIGTERM
"""


@click.command(help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job_file", metavar="JOB")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--plan", "only_plan", is_flag=True, help="Say who would run where, and why not elsewhere; start nothing."
)
@click.version_option(message="raylaunch %(version)s", package_name="raylaunch")
def _command(job_file: str, overrides: tuple[str, ...], *, only_plan: bool) -> int:
    from raylaunch.cli import config, dialect  # noqa: PLC0415

    if not job_file.endswith((".yaml", ".yml")):
        msg = f"`{job_file}` is not a job file: a name that ends in .yaml is expected"
        raise ConfigError(msg, hint="name the script in one, as `entrypoint: {script: train.py}`")
    job = config.load(job_file, overrides)
    return _plan(job) if only_plan else _run(job, dialect.dump(job))


def _plan(job: Job) -> int:
    from raylaunch.cli.report import plan_table  # noqa: PLC0415
    from raylaunch.cluster.run import plan_job  # noqa: PLC0415

    click.echo(plan_table(plan_job(job), f"{job.title}: {job.entrypoint}"), nl=False)
    return ExitCode.OK


def _run(job: Job, job_text: str) -> int:
    from raylaunch.cli.console import Console  # noqa: PLC0415
    from raylaunch.cli.report import report  # noqa: PLC0415
    from raylaunch.cluster.run import run_job  # noqa: PLC0415

    console = Console()
    try:
        result = run_job(job, job_text, console).result
        console.last_words(report(result), ok=result.ok)
    finally:
        console.close()
    return result.exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """The program. `argv`: without the program's own name; default: the process's. Returns the exit code."""
    try:
        return int(_command.main(args=argv, prog_name="raylaunch", standalone_mode=False) or 0)
    except click.exceptions.Abort:
        return ExitCode.INTERRUPTED
    except click.ClickException as error:
        error.show()
        return ExitCode.USAGE
    except KeyboardInterrupt:
        print("raylaunch: stopped before anything was started", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except InterruptedByUserError as error:
        print(f"raylaunch: {error.message}", file=sys.stderr)
        return error.exit_code
    except RaylaunchError as error:
        _complain(error)
        return error.exit_code
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        print(f"\nerror: this is a mistake of raylaunch {version('raylaunch')}, please report it", file=sys.stderr)
        return ExitCode.INTERNAL


def _complain(error: RaylaunchError) -> None:
    text = error.message if error.message.startswith("error:") else f"error: {error.message}"
    print(text, file=sys.stderr)
    if error.hint:
        print("\n".join(["", *(f"hint: {line}" for line in error.hint.splitlines())]), file=sys.stderr)
