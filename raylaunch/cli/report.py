"""The last words of a run: that it finished, or one root cause, what followed from it, and where to look."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import PurePath

from raylaunch.core.contract import EVENTS, STACKS
from raylaunch.core.failure import Failure, alike, consequences
from raylaunch.core.plan import NOT_NEEDED, Plan
from raylaunch.core.result import Attempt, RunResult
from raylaunch.core.stacks import StackGroup
from raylaunch.core.words import count, spans
from raylaunch.errors import ExitCode

_MOST_ATTEMPTS = 12
_MOST_GROUPS = 8
_MOST_FRAMES = 12
_NOT_AVAILABLE = "<N/A>"


def found_something_wrong(result: RunResult) -> bool:
    """Whether it was a self-check that came to its end and says by its exit code that not all is well."""
    cause = result.cause
    return cause is not None and cause.exit_code == 1 and cause.error is None


def report(result: RunResult) -> str:
    """The report as plain text, ending in a newline."""
    if result.ok:
        return "\n".join(_success(result)) + "\n"
    if result.cause is not None:
        return "\n".join(_failure(result, result.cause)) + "\n"
    first, *rest = result.why.splitlines()
    head = first if result.exit_code in (ExitCode.OK, *range(129, 193)) else f"error: {first}"
    return "\n".join([head, *(f"  {line}" for line in rest)]) + "\n"


def _success(result: RunResult) -> Iterator[str]:
    yield f"{result.why} in {result.seconds:.1f} s, {count(result.restarts, 'restart')}"
    if result.restarts:
        yield from _timeline(result)


def _failure(result: RunResult, cause: Failure) -> Iterator[str]:
    last = result.attempts[-1]
    yield f"error: rank {cause.rank} {cause.what} (attempt {last.number})"
    yield ""
    yield "  Root Cause (first observed failure):"
    yield from _root_cause(result, cause)
    if cause.hung and last.stacks:
        yield ""
        yield from _stacks(last.stacks, kept=result.run_dir != "")
    same = alike(last.failures, cause)
    if same:
        yield ""
        yield f"  the same on {count(len(same), 'other rank')}: {spans(same)}"
    groups = consequences(last.failures, cause)
    if groups:
        yield ""
        yield "  then, as a consequence:"
        for what, ranks in groups:
            yield f"    {count(len(ranks), 'rank')}: {what}  ({spans(ranks)})"
    if result.restarts:
        yield ""
        yield from _timeline(result)
    if result.run_dir:
        yield ""
        if cause.stderr:
            yield f"  logs: {PurePath(cause.stderr).parent} on {cause.node}"
        yield f"  all:  {result.run_dir}"
    reason = result.why.partition(f"{cause.what}; ")[2]
    hints = [*([f"not restarted: {reason}"] if reason else []), *result.hints]
    if hints:
        yield ""
    yield from (f"hint: {hint}" for hint in hints)


def _root_cause(result: RunResult, cause: Failure) -> Iterator[str]:
    """Under the names that torchrun gives them, for those who search logs for these."""
    last = result.attempts[-1]
    started = last.running_at if last.running_at is not None else last.launched_at
    after = f"{max(0.0, cause.at - started):.3f} s after its start"
    signal = f" ({cause.signal})" if cause.signal else ""
    spoilt = f" (cannot be read: {cause.spoilt})" if cause.spoilt else ""
    yield f"  time      : {_clock(result.began, cause.at)} ({after})"
    yield f"  host      : {cause.host or cause.node} ({cause.node}, {result.addresses.get(cause.node, '?')})"
    yield f"  rank      : {cause.rank} (local_rank: {cause.local_rank})"
    yield f"  exitcode  : {cause.exit_code} (pid: {cause.pid}){signal}"
    yield f"  error_file: {cause.error_file or _NOT_AVAILABLE}{spoilt}"
    first, *rest = _traceback(cause)
    yield f"  traceback : {first}"
    yield from (f"    {line}".rstrip() for line in rest)


def _clock(began: str, at: float) -> str:
    """The time of day where the report is read, as torchrun writes it."""
    if not began:
        return f"{at:.3f} s of the run"
    then = datetime.fromisoformat(began) + timedelta(seconds=at)
    return then.astimezone().replace(tzinfo=None).isoformat(sep="_", timespec="seconds")


def _traceback(cause: Failure) -> list[str]:
    """Its traceback, else its message, else the signal; where it has no exception, then the end of its stderr."""
    said = cause.error
    lines = (said.traceback.rstrip() or said.text.rstrip()).splitlines() if said else []
    if cause.exception is not None and lines:
        return lines
    if cause.hung:
        lines = [_NOT_AVAILABLE if not cause.hung_at else f"{cause.hung_at}, where it hung"]
    elif cause.signal:
        lines = [f"Signal {-cause.exit_code} ({cause.signal}) received by PID {cause.pid}", *lines]
    tail = cause.tail.rstrip().splitlines()
    return [*(lines or [_NOT_AVAILABLE]), *(["", "the end of its stderr:", *tail] if tail else [])]


def _stacks(groups: tuple[StackGroup, ...], *, kept: bool) -> Iterator[str]:
    """What all ranks did, the odd ones first."""
    yield "  what the ranks did, the innermost call first:"
    for group in groups[:_MOST_GROUPS]:
        yield f"    {group}"
        yield from (f"      {frame}" for frame in group.frames[:_MOST_FRAMES])
        if len(group.frames) > _MOST_FRAMES:
            yield f"      ... {count(len(group.frames) - _MOST_FRAMES, 'call')} more"
    if len(groups) > _MOST_GROUPS:
        yield f"    ... {count(len(groups) - _MOST_GROUPS, 'group')} more{f': {STACKS} has them all' if kept else ''}"


def _timeline(result: RunResult) -> Iterator[str]:
    shown = result.attempts
    if len(shown) > _MOST_ATTEMPTS:
        shown = shown[: _MOST_ATTEMPTS // 2] + shown[-_MOST_ATTEMPTS // 2 :]
    left_out = len(result.attempts) - len(shown)
    for place, attempt in enumerate(shown):
        if left_out and place == _MOST_ATTEMPTS // 2:
            yield f"  ... {count(left_out, 'attempt')} more{f': {EVENTS} has them all' if result.run_dir else ''}"
        yield f"  attempt {attempt.number}: {_ran(attempt)}{attempt.why_ended or 'finished'}"
    between = result.seconds - result.training_seconds
    lost = f", {count(result.lost_steps, 'step')} lost" if any(a.lost_steps is not None for a in shown) else ""
    yield f"  {result.training_seconds:.1f} s with all workers up, {between:.1f} s without{lost}"


def _ran(attempt: Attempt) -> str:
    ran = attempt.running_at is not None
    parts = [f"{attempt.ended_at - (attempt.running_at or 0.0):.1f} s" if ran else "never ran"]
    parts += [count(attempt.world_size, "worker")] if attempt.world_size else []
    parts += [count(attempt.steps, "step")] if attempt.steps else []
    parts += [] if attempt.lost_steps is None else [f"{count(attempt.lost_steps, 'step')} lost before it"]
    return ", ".join(parts) + "; "


def plan_table(plan: Plan, title: str) -> str:
    """`--plan`: who would run where, what was assumed, and why other nodes would not do."""
    rows = [("NODE", "ADDRESS", "RANKS", "")]
    for seat in plan.seats:
        notes = ["master"] * (seat.node_rank == 0) + [f"`{key}`" for key in seat.rules]
        rows.append((str(seat.node_rank), seat.address, spans(seat.ranks), ", ".join(notes)))
    rows += [("-", node.address, "-", "spare") for node in plan.spares]
    rows += [("-", node.address, "-", f"skipped: {node.why}") for node in plan.skipped if node.why != NOT_NEEDED]
    rows += [("-", node.address, "-", node.why) for node in plan.skipped if node.why == NOT_NEEDED]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"job      {title}", f"asks     {plan.asked}"]
    lines += [f"assumed  {text}" for text in plan.assumed]
    lines += [f"warning  {text}" for text in plan.warnings]
    lines.append("")
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[3]]).rstrip())
    lines.append("")
    if plan.feasible:
        lines.append(f"would start {count(plan.workers, 'worker')} on {count(len(plan.seats), 'node')}")
    else:
        lines.append(f"would wait: {len(plan.seats)} of {plan.min_nodes} nodes fit now")
    return "\n".join(lines) + "\n"
