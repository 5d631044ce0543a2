"""The first lines of a report: what happened, why, and what to do next."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from raylaunch.core.history.run_status import RunStatus
from raylaunch.core.newtypes import StrEnum
from raylaunch.core.record.result import RunResult
from raylaunch.core.text import capped, count
from raylaunch.errors import ExitCode, signal_exit_code

_MOST_TITLE = 300
_NO_RESULT = "the driver of the run is gone, and has written no result: it was killed, or its machine went down"
_NO_END = "the journal has no end: the run goes on elsewhere, or its driver was killed"
_RESUME = "Start it again to go on from the last checkpoint, if the script loads it."


class OutcomeKind(StrEnum):
    """What became of a run."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    """By a signal, as `raylaunch stop` sends it, or since its time was over."""
    UNAVAILABLE = "unavailable"
    """The cluster did not provide what it needs."""
    GOES_ON = "goes on"
    UNFINISHED = "unfinished"
    """It has written no result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run stands, apart from what its journal says."""

    state: str
    """As `raylaunch ps` shows it."""
    exit_code: int | None
    """None: it has not ended."""
    why: str
    is_alive: bool | None
    """Whether its driver lives; None: that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOutcome:
    """The first lines of a report."""

    kind: OutcomeKind
    title: str
    why: str
    next: tuple[str, ...]
    """What a person may do now."""


def outcome(run_id: str, end: RunEnd, status: RunStatus, result: RunResult) -> ReportOutcome:
    """Return the first lines. `result` has the exit code and the reason of the run's end, if it has ended."""
    if end.exit_code is None:
        return _unfinished(end, status)
    if result.ok:
        return _told(OutcomeKind.SUCCEEDED, "The run succeeded", result.why)
    if result.cause is not None:
        what = capped(f"rank {result.cause.rank} {result.cause.what}", _MOST_TITLE)
        reason = result.why.partition(f"{result.cause.what}; ")[2]
        why = f"It was not restarted: {reason}" if reason else "" if result.cause.what in result.why else result.why
        logs = f"`raylaunch logs {run_id} --failed` prints what this rank has written."
        return _told(OutcomeKind.FAILED, f"The run failed: {what}", why, *map(_sentence, result.hints), logs)
    if result.exit_code == ExitCode.UNAVAILABLE:
        return _told(OutcomeKind.UNAVAILABLE, "The run could not go on: the cluster lacks what it needs", result.why)
    if name := _signal(result.exit_code):
        return _told(OutcomeKind.STOPPED, f"The run was stopped by {name}", result.why, _RESUME)
    if result.exit_code == ExitCode.RESUMABLE:
        return _told(OutcomeKind.STOPPED, "The run was stopped in time", result.why, _RESUME)
    return _told(OutcomeKind.FAILED, "The run failed", result.why)


def _unfinished(end: RunEnd, status: RunStatus) -> ReportOutcome:
    size = f", attempt {status.attempt}" if status.attempt else ""
    size += f" of {count(status.world_size, 'worker')} on {count(len(status.roster), 'node')}" if status.roster else ""
    if end.is_alive:
        why = f"It waits for {status.waits_for}" if status.waits_for else end.why
        return _told(OutcomeKind.GOES_ON, f"The run goes on: {status.phase}{size}", why)
    why = _NO_END if end.is_alive is None else _NO_RESULT
    return _told(OutcomeKind.UNFINISHED, f"The run has no result: it was {status.phase}{size}", why, _RESUME)


def _told(kind: OutcomeKind, title: str, why: str, *next_steps: str) -> ReportOutcome:
    return ReportOutcome(kind=kind, title=title, why=_sentence(why), next=next_steps)


def _sentence(text: str) -> str:
    """Return a message, which begins with a small letter and has no full stop, as a sentence."""
    return text[:1].upper() + text[1:] + ("" if not text or text.endswith((".", "?", "!")) else ".")


def _signal(exit_code: int) -> str:
    """Return the signal that stopped a run with this exit code; "" if none did."""
    return next((each.name for each in signal.Signals if signal_exit_code(each) == exit_code), "")
