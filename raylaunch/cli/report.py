"""The last words of a run: that it finished, or one root cause, what followed from it, and where to look."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from raylaunch.core.failure import Failure, consequences
from raylaunch.core.plan import Plan
from raylaunch.core.result import Attempt, RunResult
from raylaunch.errors import ExitCode

_MOST_RANKS = 12


def report(result: RunResult) -> str:
    """The report as plain text, ending in a newline."""
    if result.ok:
        return "\n".join(_success(result)) + "\n"
    if result.cause is not None:
        return "\n".join(_failure(result, result.cause)) + "\n"
    first, *rest = result.why.splitlines()
    head = f"error: {first}" if result.exit_code not in (ExitCode.INTERRUPTED, ExitCode.TERMINATED) else first
    return "\n".join([head, *(f"  {line}" for line in rest)]) + "\n"


def _success(result: RunResult) -> Iterator[str]:
    yield f"{result.why} in {result.seconds:.1f} s, {_times(result.restarts, 'restart')}"
    if result.restarts:
        yield from _timeline(result)


def _failure(result: RunResult, cause: Failure) -> Iterator[str]:
    last = result.attempts[-1]
    where = f"{cause.node} ({result.addresses.get(cause.node, '?')})"
    yield f"error: rank {cause.rank} {cause.what} (attempt {last.number})"
    yield ""
    started = last.running_at if last.running_at is not None else last.launched_at
    yield (
        f"  rank {cause.rank}, local rank {cause.local_rank} of {where}, pid {cause.pid}, "
        f"{max(0.0, cause.at - started):.3f} s after its start"
    )
    yield from _evidence(cause)
    groups = consequences(last.failures, cause)
    if groups:
        yield ""
        yield "  then, as a consequence:"
        for what, ranks in groups:
            yield f"    {_times(len(ranks), 'rank')}: {what}  ({_span(ranks)})"
    if result.restarts:
        yield ""
        yield from _timeline(result)
    yield ""
    yield f"  logs: {PurePath(cause.stderr).parent} on {cause.node}"
    yield f"  all:  {result.run_dir}"
    reason = result.why.partition(f"{cause.what}; ")[2]
    if reason:
        yield ""
        yield f"hint: not restarted: {reason}"


def _evidence(cause: Failure) -> Iterator[str]:
    """Its traceback, or the end of its stderr where it has none."""
    if cause.error is not None and cause.error.hopeless:
        return  # its message says it all
    text = cause.error.traceback if cause.error is not None and cause.error.traceback else cause.tail
    for line in text.rstrip().splitlines():
        yield f"    {line}"


def _timeline(result: RunResult) -> Iterator[str]:
    for attempt in result.attempts:
        yield f"  attempt {attempt.number}: {_ran(attempt)}{attempt.why_ended or 'finished'}"
    between = result.seconds - result.training_seconds
    yield f"  {result.training_seconds:.1f} s with all workers up, {between:.1f} s without"


def _ran(attempt: Attempt) -> str:
    if attempt.running_at is None:
        return "never ran; "
    return f"{attempt.ended_at - attempt.running_at:.1f} s; "


def _times(count: int, noun: str) -> str:
    return f"{count or 'no'} {noun}{'' if count == 1 else 's'}"


def _span(ranks: tuple[int, ...]) -> str:
    """`0-3, 6`; a long list is cut."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join(texts if len(texts) <= _MOST_RANKS else [*texts[:_MOST_RANKS], "..."])


def plan_table(plan: Plan, title: str) -> str:
    """`--plan`: who would run where, what was assumed, and why other nodes would not do."""
    rows = [("NODE", "ADDRESS", "RANKS", "")]
    for seat in plan.seats:
        note = "master" if seat.node_rank == 0 else ""
        rows.append((str(seat.node_rank), seat.address, _span(seat.ranks), note))
    rows += [("-", node.address, "-", f"skipped: {node.why}") for node in plan.skipped if node.why != "not needed"]
    rows += [("-", node.address, "-", "not needed") for node in plan.skipped if node.why == "not needed"]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"job      {title}", f"asks     {plan.asked}"]
    lines += [f"assumed  {text}" for text in plan.assumed]
    lines.append("")
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[3]]).rstrip())
    lines.append("")
    workers = len(plan.seats) * plan.nproc
    if plan.feasible:
        lines.append(f"would start {workers} workers on {_times(len(plan.seats), 'node')}")
    else:
        lines.append(f"would wait: {len(plan.seats)} of {plan.min_nodes} nodes fit now")
    return "\n".join(lines) + "\n"
