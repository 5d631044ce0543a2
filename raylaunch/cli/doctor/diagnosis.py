"""What `raylaunch doctor` says of one thing that it looked at, and the facts that it looks at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raylaunch.cli.doctor.node_report import NodeReport
from raylaunch.core.job.job import Job
from raylaunch.core.newtypes import StrEnum
from raylaunch.core.placement.plan import Plan


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
    cluster: str = ""
    """The address of the cluster; "": this machine alone."""
    cluster_problem: str = ""
    cluster_fix: str = ""
    here: str = ""
    """The address of this machine among the reports."""
    reports: Mapping[str, NodeReport] = field(default_factory=dict)
    """By the address of the node."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Why there is no report of a node, by its address."""
    clocks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """By address: seconds by which the clock of a node is ahead of this one's, and how far this may be wrong."""
    has_token: bool = True
    """Whether the cluster is asked with a token."""
    draining: tuple[str, ...] = ()
    """Addresses of nodes that are being drained."""
    plan: Plan | None = None
    plan_problem: str = ""


def ok(check: str, text: str) -> Diagnosis:
    """Return that nothing is wrong."""
    return Diagnosis(severity=Severity.OK, check=check, text=text)


def warning(check: str, text: str, fix: str) -> Diagnosis:
    """Return something that a person should know."""
    return Diagnosis(severity=Severity.WARNING, check=check, text=text, fix=fix)


def error(check: str, text: str, fix: str) -> Diagnosis:
    """Return something that must be changed."""
    return Diagnosis(severity=Severity.ERROR, check=check, text=text, fix=fix)
