"""The report at the end of a run, the copy of the root cause's error file, and the table of `--plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path, PurePath

from raylaunch.core.failures import error_file
from raylaunch.core.failures.failure import Failure, alike, consequences
from raylaunch.core.failures.stacks import StackGroup
from raylaunch.core.machine.restart_policy import NO_RESTARTS
from raylaunch.core.placement.plan import NOT_NEEDED, Plan
from raylaunch.core.record.attempt import Attempt
from raylaunch.core.record.result import RunResult
from raylaunch.core.record.run_layout import EVENTS, STACKS
from raylaunch.core.text import count, duration, printable, spans
from raylaunch.errors import end_state

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_MAX_ATTEMPTS = 12
_MAX_GROUPS = 8
_MAX_FRAMES = 12
_NOT_AVAILABLE = "<N/A>"


def is_failed_check(result: RunResult) -> bool:
    """Return whether a self-check ran to its end and found something wrong, so that its own table says what."""
    cause = result.cause
    return cause is not None and cause.exit_code == 1 and cause.error is None


def report(result: RunResult) -> str:
    """Return the report as plain text that ends with a newline: the outcome, or the root cause and what to look at."""
    return "".join(f"{printable(line)}\n" for line in _report(result))


def _report(result: RunResult) -> Iterator[str]:
    if result.ok:
        yield from _success(result)
    elif result.cause is not None:
        yield from _failure(result, result.cause)
    else:
        first, *rest = result.why.splitlines() or [""]
        yield first if end_state(result.exit_code) == "stopped" else f"error: {first}"
        yield from (f"  {line}" for line in rest)


def write_error_file(result: RunResult, environ: Mapping[str, str], warn: Callable[[str], None]) -> None:
    """Copy the root cause's error file to the command's own TORCHELASTIC_ERROR_FILE, with the exit code added.

    torchrun does the same. Nothing is written for a root cause without an error file (a signal, `sys.exit(1)`). An
    existing file is overwritten.
    """
    path, cause = environ.get(ERROR_FILE_VARIABLE), result.cause
    if not path or cause is None or cause.error is None:
        return
    try:
        Path(path).write_text(error_file.compose(cause.error, exit_code=cause.exit_code), encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no path can be encoded so
        warn(f"cannot write {path} ({ERROR_FILE_VARIABLE}): {getattr(error, 'strerror', None) or error}")


def _success(result: RunResult) -> Iterator[str]:
    taken = f", {count(result.takeovers, 'takeover')}" if result.takeovers else ""
    yield f"{result.why} in {duration(result.seconds)}, {count(result.restarts, 'restart')}{taken}"
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
        yield f"  the same failure on {count(len(same), 'other rank')}: {spans(same)}"
    groups = consequences(last.failures, cause)
    if groups:
        yield ""
        yield "  then, as a consequence:"
        for what, ranks in groups:
            who = f"{count(len(ranks), 'rank')} ({spans(ranks)})" if len(ranks) > 1 else f"rank {ranks[0]}"
            yield f"    {who}: {what}"
    if result.restarts:
        yield ""
        yield from _timeline(result)
    if result.run_dir:
        yield ""
        if cause.stderr:
            yield f"  logs of rank {cause.rank}: {PurePath(cause.stderr).parent} on {cause.node}"
        yield f"  run folder: {result.run_dir}"
    reason = result.why.partition(f"{cause.what}; ")[2]
    if reason == NO_RESTARTS:
        reason = "`--max-restarts 3` allows three restarts"
    hints = [*result.hints, *([f"not restarted: {reason}"] if reason else [])]
    if hints:
        yield ""
    yield from (f"hint: {hint}" for hint in hints)


def _root_cause(result: RunResult, cause: Failure) -> Iterator[str]:
    """Yield the facts under the names that torchrun uses, since people search logs for them."""
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
    """Return the local time in torchrun's format. `began`: start of the run, ISO 8601 or ""; `at`: seconds after it."""
    if not began:
        return f"{at:.3f} s after the start of the run"
    then = datetime.fromisoformat(began) + timedelta(seconds=at)
    return then.astimezone().replace(tzinfo=None).isoformat(sep="_", timespec="seconds")


def _traceback(cause: Failure) -> list[str]:
    """Return the traceback, else the message, else the signal; without an exception also the last lines of stderr."""
    error = cause.error
    lines = (error.traceback.rstrip() or error.text.rstrip()).splitlines() if error else []
    if cause.exception is not None and lines:
        return lines
    if cause.hung:
        lines = [_NOT_AVAILABLE if not cause.hung_at else f"hung at {cause.hung_at}"]
    elif cause.signal:
        lines = [f"Signal {-cause.exit_code} ({cause.signal}) received by PID {cause.pid}", *lines]
    tail = cause.tail.rstrip().splitlines()
    return [*(lines or [_NOT_AVAILABLE]), *(["", "the last lines of its stderr:", *tail] if tail else [])]


def _stacks(groups: tuple[StackGroup, ...], *, kept: bool) -> Iterator[str]:
    """Yield the stacks of all ranks. `groups` are sorted, those that differ from the most first."""
    yield "  stacks of all ranks, innermost call first:"
    for group in groups[:_MAX_GROUPS]:
        yield f"    {group}"
        yield from (f"      {frame}" for frame in group.frames[:_MAX_FRAMES])
        if len(group.frames) > _MAX_FRAMES:
            yield f"      ... {count(len(group.frames) - _MAX_FRAMES, 'more call')}"
    if len(groups) > _MAX_GROUPS:
        yield f"    ... {count(len(groups) - _MAX_GROUPS, 'more group')}{f'; all are in {STACKS}' if kept else ''}"


def _timeline(result: RunResult) -> Iterator[str]:
    shown = result.attempts
    if len(shown) > _MAX_ATTEMPTS:
        shown = shown[: _MAX_ATTEMPTS // 2] + shown[-_MAX_ATTEMPTS // 2 :]
    omitted = len(result.attempts) - len(shown) + (result.omitted.count if result.omitted is not None else 0)
    for index, attempt in enumerate(shown):
        if omitted and index == _MAX_ATTEMPTS // 2:
            yield f"  ... {count(omitted, 'more attempt')}{f'; all are in {EVENTS}' if result.run_dir else ''}"
        ended = "failed, see above" if result.cause and attempt is result.attempts[-1] else attempt.why_ended
        yield f"  attempt {attempt.number}: {_ran(attempt)}{ended or 'finished'}"
    without = result.seconds - result.training_seconds
    lost = f", {count(result.lost_steps, 'step')} lost" if any(a.lost_steps is not None for a in shown) else ""
    yield f"  {duration(result.training_seconds)} with all workers running, {duration(without)} without{lost}"


def _ran(attempt: Attempt) -> str:
    ran = attempt.running_at is not None
    parts = [duration(attempt.ended_at - (attempt.running_at or 0.0)) if ran else "never ran"]
    parts += [count(attempt.world_size, "worker")] if attempt.world_size else []
    parts += [count(attempt.steps, "step")] if attempt.steps else []
    parts += [] if attempt.lost_steps is None else [f"{count(attempt.lost_steps, 'step')} lost before it"]
    return ", ".join(parts) + "; "


def plan_table(plan: Plan, title: str) -> str:
    """Return the table of `--plan`: which node would run which ranks, what was assumed, and why nodes are skipped."""
    rows = [("NODE", "ADDRESS", "RANKS", "")]
    for node in plan.seats:
        notes = ["master"] * (node.node_rank == 0) + [f"`{key}`" for key in node.rules]
        rows.append((str(node.node_rank), node.address, spans(node.ranks), ", ".join(notes)))
    rows += [("-", spare.address, "-", "spare") for spare in plan.spares]
    rows += [("-", skip.address, "-", f"skipped: {skip.why}") for skip in plan.skipped if skip.why != NOT_NEEDED]
    rows += [("-", skip.address, "-", skip.why) for skip in plan.skipped if skip.why == NOT_NEEDED]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"job      {title}", f"request  {plan.asked}"]
    lines += [f"cluster  {plan.cluster}"] if plan.cluster else []
    lines += [f"assumed  {text}" for text in plan.assumed]
    lines += [f"warning  {text}" for text in plan.warnings]
    lines.append("")
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[3]]).rstrip())
    lines.append("")
    if plan.feasible:
        lines.append(f"would start {count(plan.workers, 'worker')} on {count(len(plan.seats), 'node')}")
    elif plan.possible:
        lines.append(f"would wait: there is room for {len(plan.seats)} of {plan.min_nodes} nodes")
    else:
        nodes = count(plan.min_nodes, "node")
        lines.append(f"cannot start: there is no room for {nodes} like this, even if nothing else ran here")
    lines += [f"  {text}" for text in plan.advice]
    return "".join(f"{printable(line)}\n" for line in lines)
