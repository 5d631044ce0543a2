"""What can be asked of a run while it lasts, and what is answered.

A request is added here, with the answers it leads to, and carried out in `RunControl.answers`.
"""

from __future__ import annotations

from dataclasses import dataclass

from raylaunch.core.record.run_status import RunStatus
from raylaunch.node.logs.log_files import LogBlock, LogQuery, LogSpan

# What is asked.


@dataclass(frozen=True, slots=True, kw_only=True)
class GetState:
    """Ask where the run is. Leads to `RunState`."""

    wait: float = 0.0
    """The answer is given when the workers have ended, or after so many seconds. If they have ended already: when
    nothing of the run is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRun:
    """End the run, as SIGTERM to the driver does. Leads to `Accepted`."""

    at_once: bool = False
    """Do not wait for the workers: SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLogs:
    """Ask all nodes which log files there are. Leads to `LogsListed`."""

    query: LogQuery
    node: str = ""
    """Only those of this node; `""`: of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLogs:
    """Ask for parts of log files that were listed before. Leads to any number of `LogBlock`, in the order of spans."""

    attempt: int
    spans: tuple[LogSpan, ...]


ControlRequest = GetState | StopRun | ListLogs | ReadLogs

# What is answered.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where the run is."""

    status: RunStatus
    """Without secrets."""
    log_layout: str
    keeps_logs: bool
    """Whether there are log files to read."""
    ended: bool = False
    """Whether all is over: nothing of the run is left, and `exit_code` and `why` are known."""
    exit_code: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What was asked is being done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """What was asked is not done; why, and what would help, for a person."""

    why: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsListed:
    """The log files that there are, by rank."""

    spans: tuple[LogSpan, ...]
    missing: tuple[str, ...] = ()
    """The nodes that did not answer."""


ControlAnswer = RunState | Accepted | Refused | LogsListed | LogBlock
