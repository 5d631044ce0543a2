"""What a report says: collected from the journal of a run, for the page and for JSON alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from raylaunch.cli.html_report.outcome_text import ReportOutcome, RunEnd
from raylaunch.core.failures.failure import alike, consequences
from raylaunch.core.history.attempt_times import AttemptTimes, mean_rate
from raylaunch.core.history.run_history import RestartCost, RestartPart, RunHistory
from raylaunch.core.history.run_status import RunStatus
from raylaunch.core.history.step_rates import StepRate
from raylaunch.core.history.time_per_state import TimeState
from raylaunch.core.job.job import Job
from raylaunch.core.machine.events_and_actions import WorkersHung
from raylaunch.core.record.result import RunResult

_SCHEMA = 1
MOST_FIRST, MOST_LAST = 12, 38
"""How many of the first and of the last attempts and restarts are listed."""
MOST_NODES = 40
MOST_SLOW = 12
_MOST_RATES = 1_000
_IMPLIED = {"exclude_after": 0, "show": "raw"}
"""What raylaunch sets itself: where all nodes are on one host, and for a script."""

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFacts:
    """What a report says. Times are in seconds; events count them from the beginning of the run."""

    id: str
    name: str
    folder: str
    began: str
    end: RunEnd
    outcome: ReportOutcome
    result: RunResult
    history: RunHistory
    status: RunStatus
    job: Job
    versions: dict[str, str]
    unreadable: int
    output: str = ""
    """The last lines that rank 0 of the last attempt wrote to stdout, if they are on this machine."""

    @property
    def lost_steps(self) -> int:
        """The steps that are known to have been done twice."""
        return sum(attempt.lost_steps or 0 for attempt in self.history.attempts)

    @property
    def steps_per_second(self) -> float | None:
        """The mean rate over the time in which steps were made; None: none were seen."""
        return mean_rate(self.history.attempts)


def ends_of(items: Sequence[_Item], first: int = MOST_FIRST, last: int = MOST_LAST) -> tuple[list[_Item], list[_Item]]:
    """Return the first and the last items; the last are empty if the first are all of them."""
    return ([*items], []) if len(items) <= first + last else ([*items[:first]], [*items[-last:]])


def parts(restarts: Sequence[RestartCost]) -> dict[RestartPart, dict[str, float]]:
    """Return what each part of all restarts cost: `total`, `median` and `most`, in seconds."""
    found = {}
    for part in RestartPart if restarts else ():
        seconds = sorted(restart.parts[part] for restart in restarts)
        found[part] = {"total": sum(seconds), "median": seconds[len(seconds) // 2], "most": seconds[-1]}
    return found


def coarse(rates: Sequence[StepRate], most: int = _MOST_RATES) -> list[StepRate]:
    """Return about `most` rates or fewer: merge neighbours of one attempt while there are too many."""
    found = list(rates)
    while len(found) > most:
        merged: list[StepRate] = []
        for pair in zip(found[::2], [*found[1::2], None], strict=False):
            merged += _merged(*pair)
        if len(merged) == len(found):
            return found[:: len(found) // most + 1]
        found = merged
    return found


def _merged(one: StepRate, other: StepRate | None) -> list[StepRate]:
    if other is None:
        return [one]
    if one.attempt != other.attempt:
        return [one, other]
    seconds = one.end - one.begin + other.end - other.begin
    steps = one.per_second * (one.end - one.begin) + other.per_second * (other.end - other.begin)
    return [StepRate(attempt=one.attempt, begin=one.begin, end=other.end, per_second=steps / seconds)]


def settings(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings that differ from their defaults and from what raylaunch sets itself, and the others."""
    given, defaults = _flat(asdict(job)), _flat(asdict(Job()))
    defaults |= {name: value for name, value in _IMPLIED.items() if given[name] == value}
    return (
        {name: value for name, value in given.items() if value != defaults.get(name)},
        {name: value for name, value in given.items() if value == defaults.get(name)},
    )


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    sections = ("entrypoint", "ray")
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name in sections:
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            flat[name] = value
    return flat


def failure_facts(found: ReportFacts) -> dict[str, Any] | None:
    """Return the root cause of the end of the run, and what followed from it; None if no failure ended the run."""
    cause = found.result.cause
    if cause is None:
        return None
    failures = found.result.attempts[-1].failures
    return asdict(cause) | {
        "what": cause.what,
        "signal": cause.signal,
        "address": found.result.addresses.get(cause.node, ""),
        "alike": list(alike(failures, cause)),
        "consequences": [{"what": what, "ranks": list(ranks)} for what, ranks in consequences(failures, cause)],
    }


def as_json(found: ReportFacts) -> dict[str, Any]:
    """Return the JSON object of `raylaunch report --json`. Its keys are documented in docs/reference.md."""
    history = found.history
    attempts, last_attempts = ends_of(history.attempts)
    restarts, last_restarts = ends_of(history.restarts)
    given, defaults = settings(found.job)
    return {
        "schema": _SCHEMA,
        "id": found.id,
        "name": found.name,
        "folder": found.folder,
        "began": found.began,
        "state": found.end.state,
        "exit_code": found.end.exit_code,
        "outcome": asdict(found.outcome),
        "seconds": history.seconds,
        "seconds_per_state": {str(state): history.per_state[state] for state in TimeState},
        "goodput": history.goodput,
        "states": [asdict(span) for span in history.spans[-_MOST_RATES:]],
        "steps": sum(attempt.steps for attempt in history.attempts),
        "last_step": max((each.last_step for each in history.attempts if each.last_step is not None), default=None),
        "lost_steps": found.lost_steps,
        "steps_per_second": found.steps_per_second,
        "rates": [asdict(rate) for rate in coarse(history.rates)],
        "attempt_count": len(history.attempts),
        "attempts": [_attempt(each) for each in (*attempts, *last_attempts)],
        "restart_count": len(history.restarts),
        "interruptions": dict(Counter(str(restart.interruption) for restart in history.restarts)),
        "restart_parts": {str(part): cost for part, cost in parts(history.restarts).items()},
        "restarts": [asdict(each) | {"seconds": each.seconds} for each in (*restarts, *last_restarts)],
        "node_count": len(history.nodes),
        "nodes": [asdict(node) for node in sorted(history.nodes, key=lambda each: not each.is_eventful)[:MOST_NODES]],
        "root_cause": failure_facts(found),
        "hangs": [_hang(hang) for hang in history.hangs],
        "takeover_count": found.result.takeovers,
        "takeovers": [asdict(each) | {"seconds": each.seconds} for each in history.takeovers],
        "gpus": [asdict(use) for use in found.status.gpus[:MOST_NODES]],
        "slow_ranks": [asdict(slow) for slow in history.slow_ranks[:MOST_SLOW]],
        "progress_reports": history.reports,
        "job": given,
        "job_defaults": defaults,
        "versions": found.versions,
        "unreadable_lines": found.unreadable,
    }


def _attempt(attempt: AttemptTimes) -> dict[str, Any]:
    return asdict(attempt) | {"roster": list(attempt.roster[:MOST_NODES]), "nodes": len(attempt.roster)}


def _hang(hang: WorkersHung) -> dict[str, Any]:
    return {
        "at": hang.at,
        "attempt": hang.attempt,
        "ranks": [failure.rank for failure in hang.failures],
        "groups": [asdict(group) | {"text": str(group)} for group in hang.groups],
    }
