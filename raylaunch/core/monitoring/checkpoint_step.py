"""The step at which all workers save before a resize, which ranks it waits for, and which did not save in time."""

from __future__ import annotations

import math
from collections.abc import Mapping

from raylaunch.core.monitoring.rank_progress import WorldProgress
from raylaunch.core.text import named_ranks

_ORDER_SECONDS = 0.1
_SPARE_STEPS = 2
"""How far ahead of the fastest worker the step is: the time that a message takes, and a reserve."""

_MARKS_WITHOUT_CALL = 10
"""More than a script makes before its first call: it may have several optimizers, and call `heartbeat` before."""

Checkpoints = Mapping[int, tuple[int | None, int | None]]
"""By rank: the last step for which the script called `should_checkpoint`, and the last that it said is saved."""


def may_ask(marks: int, *, expected: bool) -> bool:
    """Return whether a worker that has not called `should_checkpoint` in its attempt may still do so.

    `marks`: its steps and heartbeats in the attempt. `expected`: all workers of an earlier attempt have called it. A
    script calls it after each step, so a worker that has made many steps without it never will.
    """
    return expected and marks < _MARKS_WITHOUT_CALL


def propose_step(world: WorldProgress, now: float) -> int:
    """Return a step that no worker has come to when it hears of it, and that all soon will."""
    ahead = (
        worker.count + worker.max_counts_per_second() * (max(0.0, now - worker.seen_at) + _ORDER_SECONDS)
        for worker in world.alive()
    )
    return math.ceil(max(ahead, default=0.0)) + _SPARE_STEPS


def checkpoints(world: WorldProgress) -> Checkpoints:
    """Return what `unsaved` needs to know of the workers."""
    return {rank: (worker.latest.asked, worker.latest.saved) for rank, worker in world.workers.items()}


def unsaved(step: int, known: Checkpoints) -> str:
    """Say which ranks have not saved at this step, for a person; "" if all have, or none calls `should_checkpoint`."""
    asked = {rank: last for rank, (last, _) in known.items() if last is not None}
    before = [rank for rank, last in asked.items() if last < step]
    writing = [rank for rank in asked if rank not in before and (known[rank][1] or -1) < step]
    if not asked:
        return ""
    if len(asked) < len(known):
        silent = named_ranks([rank for rank in known if rank not in asked])
        why = f"{silent} never asked `should_checkpoint`, which is for every rank, after each step"
    elif before:
        last = min(asked[rank] for rank in before)
        why = f"{named_ranks([rank for rank in before if asked[rank] == last])} asked last after step {last}"
    elif writing:
        why = f"{named_ranks(writing)} had not said `checkpointed`"
    else:
        return ""
    return f"not all workers saved at step {step}: {why}"
