"""The texts of `raylaunch ps`, `raylaunch status` and `raylaunch stacks`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from raylaunch.cli.output.progress_line import rate_text
from raylaunch.cli.runs.run_summary import LOST, RunSummary, seconds_since
from raylaunch.cluster.control.control_messages import StacksCollected
from raylaunch.core.history.run_status import NodeSummary, RunStatus
from raylaunch.core.machine.measured import NodeMemory
from raylaunch.core.placement.devices import GpuUse
from raylaunch.core.record.attempt import Attempt
from raylaunch.core.record.run_layout import EVENTS
from raylaunch.core.text import capped, count, duration, printable, spans

_MOST_ATTEMPTS = 12
_MOST_NODES = _MOST_GPUS = 64
_MOST_WHY = 400
_NOTHING = "-"
_COLUMNS = ("NAME", "ID", "STATE", "NODES", "WORKERS", "STEP", "STEPS/S", "RESTARTS", "GOODPUT", "AGE", "WHERE")


def table(runs: Sequence[RunSummary], now: datetime, host: str, user: str = "") -> str:
    """Return the table of `ps`. `host`, `user`: this machine and its user; of runs of others, theirs are shown too."""
    return _aligned([_COLUMNS, *(_row(run, now, host, user) for run in runs)])


def _row(run: RunSummary, now: datetime, host: str, user: str) -> tuple[str, ...]:
    state = f"{run.state} ({run.exit_code})" if run.exit_code else run.state
    where = run.folder or (f"process {run.pid}" if run.pid is not None else _NOTHING)
    whose = "" if run.user in ("", user) else f"{run.user}@"
    return (
        run.name,
        run.id,
        state,
        str(run.nodes or _NOTHING),
        str(run.workers or _NOTHING),
        str(run.steps or _NOTHING) if run.step is None else str(run.step),
        _NOTHING
        if run.steps_per_second is None
        else f"{run.steps_per_second:.{1 if run.steps_per_second >= 1 else 3}f}",
        str(run.restarts),
        _NOTHING if run.goodput is None else f"{run.goodput:.0%}",
        _age(seconds_since(run.began, now)) if run.began else _NOTHING,
        whose + (where if run.host in ("", host) else f"{run.host}:{where}"),
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
    return "".join(f"{line}\n" for line in lines)


def _age(seconds: float) -> str:
    """Return a time as `kubectl` shows it, with one unit: 90s, 12m, 30h, 4d."""
    for unit, size, limit in (("s", 1, 120), ("m", 60, 7_200), ("h", 3600, 172_800)):
        if seconds < limit:
            return f"{int(seconds / size)}{unit}"
    return f"{int(seconds / 86_400)}d"


def page(run: RunSummary, status: RunStatus | None) -> str:
    """Return the text of `status`: what the run does and why, its nodes and its attempts."""
    size = f", {count(run.workers, 'worker')} on {count(run.nodes, 'node')}" if run.attempt else ""
    lines = [printable(f"{run.name} {run.id}: {run.outcome}{size}")]
    for name, value in _facts(run):
        first, *rest = capped(value, _MOST_WHY).splitlines() or [""]
        lines += [f"  {name:10} {printable(first)}", *(f"  {'':10} {printable(line)}" for line in rest)]
    text = "".join(f"{line}\n" for line in lines)
    if status is not None and status.nodes and not run.is_over:
        text += f"\n{_nodes(status.nodes)}"
        if gpus := status.gpus:
            text += f"\n{gpu_table(gpus)}"
    if status is not None and status.result.attempts:
        text += f"\n{_attempts(run, status)}"
    return text


def _facts(run: RunSummary) -> Iterator[tuple[str, str]]:
    if run.why:
        yield "why", run.why
    if run.waits_for:
        yield "waits for", run.waits_for
    if run.steps:
        yield "step", "".join(_step(run))
    if run.committed_step is not None:
        yield "state", "".join(_commits(run))
    lost = f", {count(run.lost_steps, 'step')} lost" if run.lost_steps else ""
    trained = f"{duration(run.training_seconds)} with all workers running, {count(run.restarts, 'restart')}{lost}"
    goodput = "" if run.goodput is None else f", goodput {run.goodput:.0%}"
    yield "time", f"{duration(run.seconds)}, {trained}{goodput}"
    if run.pid is not None:
        taken = f", after {count(run.takeovers, 'takeover')}" if run.takeovers else ""
        yield "driver", f"process {run.pid} on {run.host}{taken}{', which is gone' if run.state == LOST else ''}"
    if run.cluster:
        yield "cluster", run.cluster
    yield "folder", run.folder or "none: the run keeps no files"
    if run.problem:
        yield "problem", run.problem


def _step(run: RunSummary) -> Iterator[str]:
    yield f"{count(run.steps, 'step')} in its last attempt" if run.step is None else str(run.step)
    if run.steps_per_second is not None:
        yield f", {rate_text(run.steps_per_second)}"
    if run.slowest_rank is not None:
        yield f", slowest rank {run.slowest_rank} at step {run.slowest_step}"
    if run.saved_step is not None:
        yield f", saved step {run.saved_step}"


def _commits(run: RunSummary) -> Iterator[str]:
    yield f"committed after step {run.committed_step}"
    if run.copied_step is not None:
        yield f", copied to other hosts after step {run.copied_step}"
    if (rate := run.commit_rate) is not None:
        often = "each step" if rate.every == 1 else f"every {rate.every} steps"
        yield f"; {often}, since a commit takes {1000 * rate.commit_seconds:.1f} ms"
        yield f" and a step {1000 * rate.step_seconds:.1f} ms"


def _sizes(memory: NodeMemory | None) -> tuple[int, ...]:
    return (0, 0, 0) if memory is None else (memory.own, memory.files, memory.copies)


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size else _NOTHING


def _nodes(nodes: Sequence[NodeSummary]) -> str:
    has_memory = any(any(_sizes(node.memory)) for node in nodes)
    rows: list[tuple[str, ...]] = [("NODE", "ADDRESS", "STATE", "RANKS", "PIDS")]
    rows[0] += ("COMMITS", "FILES", "COPIES") if has_memory else ()
    for node in nodes[:_MOST_NODES]:
        ranks = range(node.first_rank, node.first_rank + node.workers) if node.first_rank is not None else ()
        pids = " ".join(map(str, node.pids[:_MOST_ATTEMPTS])) + (" ..." if len(node.pids) > _MOST_ATTEMPTS else "")
        state = f"{node.state}, draining" if node.draining else str(node.state)
        memory = tuple(map(_mib, _sizes(node.memory))) if has_memory else ()
        rows.append((node.name, node.address, state, spans(ranks) or _NOTHING, pids or _NOTHING, *memory))
    more = len(nodes) - _MOST_NODES
    return _aligned(rows) + (f"... {count(more, 'more node')}\n" if more > 0 else "")


def gpu_table(gpus: Sequence[GpuUse]) -> str:
    """Return the table of the GPUs of ranks: as `status` shows it."""
    rows = [("RANK", "GPU", "MEMORY", "BUSY"), *map(_gpu, gpus[:_MOST_GPUS])]
    more = len(gpus) - _MOST_GPUS
    return _aligned(rows) + (f"... {count(more, 'more GPU')}\n" if more > 0 else "")


def _gpu(use: GpuUse) -> tuple[str, ...]:
    memory = f"{use.used / 2**30:.1f} of {use.total / 2**30:.1f} GiB"
    return str(use.rank), use.gpu, memory, _NOTHING if use.busy is None else f"{use.busy} %"


def _attempts(run: RunSummary, status: RunStatus) -> str:
    attempts = status.result.attempts[-_MOST_ATTEMPTS:]
    head = ("ATTEMPT", "NODES", "WORKERS", "TIME", "STEPS", "ENDED")
    rows = [head, *(_attempt(run, status, attempt) for attempt in attempts)]
    earlier = attempts[0].number - 1
    return _aligned(rows) + (f"{count(earlier, 'earlier attempt')}: see {EVENTS}\n" if earlier else "")


def _attempt(run: RunSummary, status: RunStatus, attempt: Attempt) -> tuple[str, ...]:
    is_present = attempt.number == status.attempt and not attempt.why_ended
    ended = attempt.why_ended or ("not yet" if is_present and not run.is_over else run.why)
    time = (
        run.seconds - attempt.launched_at if is_present and not run.is_over else attempt.ended_at - attempt.launched_at
    )
    lost = f" ({attempt.lost_steps} again)" if attempt.lost_steps else ""
    sizes = (str(attempt.number), str(len(attempt.roster)), str(attempt.world_size))
    return (*sizes, duration(max(0.0, time)), f"{attempt.steps or _NOTHING}{lost}", capped(ended, _MOST_WHY))


def stack_lines(found: StacksCollected) -> Iterator[str]:
    """Yield the lines of `stacks`: the stacks of some ranks, or what all workers do, in groups."""
    if found.stacks:
        for stack in found.stacks:
            yield f"rank {stack.rank}, process state {stack.state}:"
            yield from (stack.text.rstrip() or stack.why_empty).splitlines()
        return
    workers = sum(len(group.ranks) for group in found.groups)
    yield f"attempt {found.attempt}: what {count(workers, 'worker')} are doing now"
    for group in found.groups:
        yield str(group)
        yield from (f"    {frame}" for frame in group.frames)
