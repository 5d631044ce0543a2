"""What can be asked of a run while it lasts, and what is answered.

Over HTTP, a request is a JSON object that is sent to its `PATH`, and so is the answer. A request is added here, with
the type of its answer, and carried out in `RunControl.answer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from raylaunch.core.decoding import prepare
from raylaunch.core.failures.stacks import Stack, StackGroup
from raylaunch.core.history.run_status import RunStatus
from raylaunch.core.machine.state import Phase
from raylaunch.node.logs.log_files import LogBlock, LogQuery, LogSpan

# What is answered.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where the run is: the answer to `GetState`."""

    status: RunStatus
    """Without secrets."""
    log_layout: str
    keeps_logs: bool
    """Whether there are log files to read."""
    ended: bool = False
    """Whether all is over: nothing of the run is left, and `exit_code` and `why` are known."""
    exit_code: int | None = None
    why: str = ""
    can_save: bool = True
    """As in `Accepted`, where that was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What was asked is being done."""

    attempt: int = 0
    """The present or last attempt when it was asked."""
    phase: Phase = Phase.RUNNING
    """The phase that follows from it."""
    status: str = ""
    """What the run does and why, for a person."""
    can_save: bool = True
    """Whether the workers can save at a step that is agreed, as far as is known; else what they did is done again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksCollected:
    """What all workers of an attempt were doing at one moment."""

    attempt: int
    groups: tuple[StackGroup, ...]
    stacks: tuple[Stack, ...]
    """Of the ranks that were asked for, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsListed:
    """The log files that there are, by rank."""

    spans: tuple[LogSpan, ...]
    missing: tuple[str, ...] = ()
    """The nodes that did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsRead:
    """What is in the first of the spans that were asked for."""

    blocks: tuple[LogBlock, ...]
    """In their order."""
    rest: tuple[LogSpan, ...]
    """The spans that are left to ask for."""


class RefusedError(Exception):
    """The driver does not do what was asked; why, and what would help, for a person."""

    def __init__(self, why: str, hint: str = "") -> None:
        super().__init__(why)
        self.hint = hint


# What is asked.


@dataclass(frozen=True, slots=True, kw_only=True)
class GetState:
    """Ask where the run is. Leads to `RunState`."""

    PATH: ClassVar[str] = "/v1/status"
    ANSWER: ClassVar[type[RunState]] = RunState
    wait: float = 0.0
    """Seconds after which the driver answers, or earlier when the workers end. If they have ended already: when nothing
    of the run is left."""
    before_change: bool = False
    """Whether it also asks if the workers can save, since the run is to be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRun:
    """End the run. Leads to `Accepted`."""

    PATH: ClassVar[str] = "/v1/stop"
    ANSWER: ClassVar[type[Accepted]] = Accepted
    by: str = ""
    """The person that requests it, such as `ada@login-1`."""
    save_seconds: float = 0.0
    """For so long at most the workers may save before they get SIGTERM; 0: they get it at once."""
    at_once: bool = False
    """Do not wait for the workers: SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRun:
    """Begin another attempt. Leads to `Accepted`."""

    PATH: ClassVar[str] = "/v1/restart"
    ANSWER: ClassVar[type[Accepted]] = Accepted
    by: str = ""
    save_seconds: float = 0.0
    """For so long at most the workers may save first; 0: they are killed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResizeRun:
    """Change the bounds of the number of nodes from now on. Leads to `Accepted`."""

    PATH: ClassVar[str] = "/v1/resize"
    ANSWER: ClassVar[type[Accepted]] = Accepted
    by: str = ""
    min_nodes: int
    max_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainNode:
    """Leave the host of a node for good. Leads to `Accepted`."""

    PATH: ClassVar[str] = "/v1/drain"
    ANSWER: ClassVar[type[Accepted]] = Accepted
    by: str = ""
    node: str
    """Its name, or the address of its host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetStacks:
    """Ask what all workers are doing now. Leads to `StacksCollected`."""

    PATH: ClassVar[str] = "/v1/stacks"
    ANSWER: ClassVar[type[StacksCollected]] = StacksCollected
    ranks: tuple[int, ...] = ()
    """The ranks of which the whole stacks are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLogs:
    """Ask all nodes which log files there are. Leads to `LogsListed`."""

    PATH: ClassVar[str] = "/v1/logs"
    ANSWER: ClassVar[type[LogsListed]] = LogsListed
    query: LogQuery
    node: str = ""
    """Only files of this node; `""`: of all nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLogs:
    """Ask for parts of log files that were listed before. Leads to `LogsRead`."""

    PATH: ClassVar[str] = "/v1/logs/read"
    ANSWER: ClassVar[type[LogsRead]] = LogsRead
    attempt: int
    spans: tuple[LogSpan, ...]
    times: bool = False
    """Whether it also asks when they were written."""


RunChange = StopRun | RestartRun | ResizeRun | DrainNode
ControlRequest = GetState | RunChange | GetStacks | ListLogs | ReadLogs

prepare(*get_args(ControlRequest), *(kind.ANSWER for kind in get_args(ControlRequest)))
