"""What the driver of a detached run is given, and what it tells the command that started it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from raylaunch.core.environ import snapshot
from raylaunch.core.job.job import Job

_RAYS = "RAY_"
"""The variables with this prefix describe one process of Ray, and hold for no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachedRun:
    """All that a process needs to be the driver of a run that another one has requested."""

    job: Job
    job_text: str
    """The job as YAML, without secrets, for the run folder."""
    payload: bytes = b""
    """See `run_job`."""
    environ: dict[str, str] = field(repr=False)
    """The environment of the process that requested the run. It may have secrets."""
    cwd: str
    umask: int
    niceness: int

    @classmethod
    def of_this_process(cls, job: Job, job_text: str, payload: bytes) -> DetachedRun:
        """Return the run as this process requests it."""
        umask = os.umask(0)
        os.umask(umask)
        return cls(
            job=job,
            job_text=job_text,
            payload=payload,
            environ=snapshot(os.environ),
            cwd=os.getcwd(),
            umask=umask,
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
        )

    def enter(self, *, needs_folder: bool = True) -> None:
        """Make this process one as that which requested the run; variables of Ray stay. Raises OSError.

        `needs_folder` False: where the working folder is not there, this process keeps its own.
        """
        try:
            os.chdir(self.cwd)
        except OSError:
            if needs_folder:
                raise
        os.umask(self.umask)
        wanted = {name: value for name, value in self.environ.items() if not name.startswith(_RAYS)}
        for name in [name for name in os.environ if name not in wanted and not name.startswith(_RAYS)]:
            del os.environ[name]
        os.environ.update(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverNews:
    """What a driver tells the command that started it. Each has one of these."""

    begins: bool = False
    """Nothing was started yet, but now the run begins."""
    text: str = ""
    """Lines that the driver has for a person, each with its newline."""
    run_id: str = ""
    """The run is planned, and has this id and name."""
    name: str = ""
    run_dir: str = ""
    runs: bool = False
    """All workers were started."""
    exit_code: int | None = None
    """The run has ended."""


Tell = Callable[[DriverNews], None]
"""Takes news, in any thread, and never blocks."""
