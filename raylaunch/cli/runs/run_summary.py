"""What a person is told of a run: made of its journal, its result, and whether its driver is alive."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone

from raylaunch.cli.runs.run_reader import RunReader
from raylaunch.core.history.run_status import NodeSummary, RunStatus, StatusBuilder
from raylaunch.core.job.job import Job
from raylaunch.core.machine.measured import CommitRate
from raylaunch.core.machine.state import Phase
from raylaunch.core.record.attempt import Attempt
from raylaunch.errors import end_state

LOST = "lost"
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run, as `ps --json` and `status --json` show it. Times are in seconds."""

    id: str
    name: str
    state: str
    """A phase while it goes on, then `succeeded`, `failed` or, by a signal, `stopped`. `lost`: its driver is gone
    without a result; `unknown`: there is no journal to read."""
    exit_code: int | None
    """None: it has not ended, or is lost."""
    why: str
    waits_for: str
    attempt: int
    restarts: int
    nodes: int
    workers: int
    """Nodes and workers of the present or last attempt."""
    step: int | None
    """The number of the latest step of the rank that is furthest ahead; None: there is none, or it has no number."""
    steps: int
    """The steps of that rank in the attempt that made the latest ones, also those without numbers."""
    steps_per_second: float | None
    saved_step: int | None
    committed_step: int | None
    """The number of the last step in the newest commit of `State` that all ranks have made; None: there is none."""
    copied_step: int | None
    """The same of the newest commit that is copied to other hosts."""
    commit_rate: CommitRate | None
    """How often `State` commits with `every="auto"`, and why; None: that is not known."""
    slowest_rank: int | None
    """None unless it is more than a step behind."""
    slowest_step: int | None
    lost_steps: int
    takeovers: int
    """How often another driver took over."""
    training_seconds: float
    seconds: float
    goodput: float | None
    """The part of the time in which it trained, from 0 to 1; None if that is not known."""
    began: str
    host: str
    """Of the driver; "" if it is not known."""
    user: str
    """Whose run it is; "" if that is not known."""
    pid: int | None
    cluster: str
    folder: str
    problem: str
    """Why the journal cannot be read, or not to its end, or why a detached run has no driver now; "": neither."""
    node_states: tuple[NodeSummary, ...]
    attempts: tuple[Attempt, ...]

    @property
    def outcome(self) -> str:
        """The state in words: `failed with exit code 1`."""
        return f"{self.state} with exit code {self.exit_code}" if self.exit_code else self.state

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, or was lost."""
        return self.exit_code is not None or self.state == LOST


def summary(run: RunReader, now: datetime | None = None) -> RunSummary:
    """Read what is new of a run, and return its summary as of now. `now`: another time of day."""
    alive = run.entry.is_alive  # first: its last words come before its end
    run.refresh()
    found = run.status()
    if run.is_gone:  # a process that does not listen any more is about to write how the run ended
        alive = bool(alive)
    state, exit_code, why = _outcome(run, found, alive=alive)
    status = found or StatusBuilder(Job()).status()
    is_current = found is not None and state == found.phase
    progress = status.progress
    slowest = progress if status.behind else None
    began = run.entry.began or status.result.began
    last, trained = status.result.seconds, status.result.training_seconds
    seconds = max(last, seconds_since(began, now or datetime.now(timezone.utc))) if is_current else last
    if is_current and state in (Phase.RUNNING, Phase.SAVING):
        trained += seconds - last
    return RunSummary(
        id=run.entry.id,
        name=run.entry.name,
        state=state,
        exit_code=exit_code,
        why=why,
        waits_for=status.waits_for if is_current else "",
        attempt=status.attempt,
        restarts=status.result.restarts,
        nodes=len(status.roster),
        workers=status.world_size,
        step=progress.high if progress is not None else None,
        steps=progress.marks if progress is not None else 0,
        steps_per_second=status.steps_per_second if is_current else None,
        saved_step=progress.saved if progress is not None else None,
        committed_step=_last_of(progress.committed) if progress is not None else None,
        copied_step=_last_of(progress.copied) if progress is not None else None,
        commit_rate=progress.commit_rate if progress is not None else None,
        slowest_rank=slowest.slowest if slowest is not None else None,
        slowest_step=slowest.low if slowest is not None else None,
        lost_steps=status.result.lost_steps,
        takeovers=status.result.takeovers,
        training_seconds=trained,
        seconds=seconds,
        goodput=_goodput(status, state, seconds),
        began=began,
        host=run.entry.driver.host if run.entry.driver is not None else "",
        user=run.entry.user,
        pid=run.entry.driver.pid if run.entry.driver is not None else None,
        cluster=run.entry.cluster,
        folder=run.entry.folder,
        problem=run.no_driver or (run.problem if run.entry.folder or run.has_driver else ""),
        node_states=status.nodes,
        attempts=status.result.attempts,
    )


def _goodput(status: RunStatus, state: str, seconds: float) -> float | None:
    """Return the goodput after these seconds, which may be more than the status knows of."""
    goodput, last = status.goodput, status.result.seconds
    if goodput is None or seconds <= last:
        return goodput
    trains = state == Phase.RUNNING and status.steps_per_second != 0
    return (goodput * last + (seconds - last if trains else 0.0)) / seconds


def _last_of(completed: int | None) -> int | None:
    """Return the number of the last completed step; steps count from 0."""
    return completed - 1 if completed is not None else None


def _outcome(run: RunReader, status: RunStatus | None, *, alive: bool | None) -> tuple[str, int | None, str]:
    """Return state, exit code and reason. `alive`: whether the driver is; None: not known."""
    if result := run.result():
        return end_state(result["exit_code"]), result["exit_code"], str(result.get("why", ""))
    if status is not None and status.phase is Phase.DONE:
        return end_state(status.result.exit_code), status.result.exit_code, status.why
    if run.entry.exit_code is not None:
        return end_state(run.entry.exit_code), run.entry.exit_code, "it ended before it had a result"
    if alive is False:
        return LOST, None, "its driver is gone, and has written no result"
    return (UNKNOWN, None, "") if status is None else (status.phase, None, status.why)


def seconds_since(began: str, now: datetime) -> float:
    """Return the seconds since a time of day in ISO 8601; 0 if it is none."""
    try:
        return max(0.0, (now - datetime.fromisoformat(began)).total_seconds())
    except (ValueError, TypeError):  # TypeError: without a time zone
        return 0.0
