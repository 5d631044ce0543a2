"""What `raylaunch doctor` says of one thing that it looked at, and the facts that it looks at."""

from __future__ import annotations

from dataclasses import dataclass, field

from raylaunch.cli.doctor.node_report import NodeReport
from raylaunch.cluster.inspection import Inspection
from raylaunch.core.job.job import Job
from raylaunch.core.newtypes import StrEnum


class Severity(StrEnum):
    """Whether a finding must be mended (`error`), may matter (`warning`), or says that all is well (`ok`)."""

    OK = "ok"
    WARNING = "warning"
    """A run may work, or only some runs do."""
    ERROR = "error"
    """A run would fail, or not do what is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found of one thing. `fix` says what to do; "" if it is ok."""

    severity: Severity
    check: str
    text: str
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """All facts. What could not be found out is empty."""

    job: Job | None = None
    """None: no job file was given, or it is wrong."""
    job_problem: str = ""
    """Why the job cannot be read, with marks under the mistakes."""
    job_warnings: tuple[str, ...] = ()
    cluster_problem: str = ""
    cluster_fix: str = ""
    seen: Inspection[NodeReport] = field(default_factory=Inspection)
    """The cluster and its nodes; without a cluster, this machine alone."""


def ok(check: str, text: str) -> Diagnosis:
    """Return that nothing is wrong."""
    return Diagnosis(severity=Severity.OK, check=check, text=text)


def warning(check: str, text: str, fix: str) -> Diagnosis:
    """Return something that a person should know."""
    return Diagnosis(severity=Severity.WARNING, check=check, text=text, fix=fix)


def error(check: str, text: str, fix: str) -> Diagnosis:
    """Return something that must be changed."""
    return Diagnosis(severity=Severity.ERROR, check=check, text=text, fix=fix)
