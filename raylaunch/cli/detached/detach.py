"""`raylaunch -d`: starts a run whose driver is a process of the cluster, or a background process of this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from raylaunch.cli.detached import background_process, background_run
from raylaunch.cli.run_once import say
from raylaunch.cluster.detached.detached_run import DetachedRun, DriverNews
from raylaunch.cluster.local import local_machine
from raylaunch.cluster.run import find_cluster
from raylaunch.core.job.job import Job
from raylaunch.errors import ConfigError, ExitCode


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachedStart:
    """A run that was started and goes on, or has ended already."""

    run_id: str
    """`""`: it ended before it had one."""
    name: str
    run_dir: str
    exit_code: int | None
    """None: it goes on."""


def run(job: Job, job_text: str, *, wait: bool) -> int:
    """Start the job and return 0 when its workers have started, or its exit code if it ends before.

    `wait`: whether to wait for the workers. Ctrl-C ends only the waiting, once there is a run.
    """
    started = start(job, job_text, wait=wait)
    if not started.run_id or started.exit_code:
        return ExitCode.OK if started.exit_code is None else started.exit_code
    print(f"{started.run_id}\n")
    for command in ("attach", "logs -f", "stop"):
        print(f"raylaunch {command} {started.name}/{started.run_id}")
    sys.stdout.flush()
    return ExitCode.OK


def start(job: Job, job_text: str, *, payload: bytes = b"", wait: bool = True) -> DetachedStart:
    """Start the job, and return when its workers have started, or it has ended. Prints what its driver says.

    `wait` False: return when it is planned. Raises ConfigError, ClusterError and RaylaunchError.
    """
    refuse_terminal(job)
    if job.run_id is None:
        job = replace(job, run_id=datetime.now().astimezone().strftime("%Y-%m-%dT%H-%M-%S"))
    found = DetachedStart(run_id="", name=job.title, run_dir="", exit_code=None)
    try:
        for news in _news(job, DetachedRun.of_this_process(job, job_text, payload)):
            if news.text:
                sys.stderr.write(news.text)
                sys.stderr.flush()
            if news.run_id:
                found = replace(found, run_id=news.run_id, name=news.name, run_dir=news.run_dir)
            if news.exit_code is not None:
                return replace(found, exit_code=news.exit_code)
            if news.runs or (news.run_id and not wait):
                return found
    except KeyboardInterrupt:
        if not found.run_id:
            raise
        say(f"{found.name} {found.run_id} goes on")
    return found


def _news(job: Job, request: DetachedRun) -> Iterator[DriverNews]:
    address = find_cluster(job.ray)
    if address in (local_machine.NONE, local_machine.LOCAL):
        return background_process.start(request)
    from raylaunch.cluster.detached import driver_actor  # noqa: PLC0415, it needs Ray

    return driver_actor.start(request, background_run.drive, address)


def refuse_terminal(job: Job) -> None:
    """Raise ConfigError for a job of which a rank has the terminal, which a detached run has none of."""
    if job.debug is not None or job.pty:
        name = "pty" if job.debug is None else "debug"
        msg = f"`detach` and `{name}` exclude each other: a run in the background has no terminal"
        raise ConfigError(msg, hint="remove one of them")
