"""Signs of life: what the workers of a node have marked on its page."""

from __future__ import annotations

import time

from raylaunch.core.pulse import Mark, Pulse
from raylaunch.node.present import Present
from raylaunch.worker import page as fields
from raylaunch.worker.page import Page


def pulse(page: Page, present: Present | None) -> Pulse | None:
    """All workers that are alive, at this moment, and once more those that have ended; None: none are started."""
    if present is None or not present.pids:
        return None
    now = time.monotonic_ns()
    marks = [
        _mark(page, local_rank, rank, now)
        for local_rank, rank, _ in present.started()
        if local_rank < fields.MOST_WORKERS and rank not in present.shown
    ]
    present.shown |= present.ends.keys()
    return Pulse(attempt=present.attempt, marks=tuple(marks))


def _mark(page: Page, local_rank: int, rank: int, now: int) -> Mark:
    numbers, slot = page.numbers, fields.slot(local_rank)
    marked_at, first_at = numbers[slot + fields.MARKED_AT], numbers[slot + fields.FIRST_AT]
    return Mark(
        rank=rank,
        marks=numbers[slot + fields.MARKS],
        age=max(0.0, (now - marked_at) / 1e9) if marked_at else 0.0,
        step=_step(numbers[slot + fields.STEP]),
        asked=_step(numbers[slot + fields.ASKED]),
        saved=_step(numbers[slot + fields.SAVED]),
        busy=numbers[slot + fields.BUSY] > 0,
        first_age=max(0.0, (now - first_at) / 1e9) if first_at else None,
        first_step=_step(numbers[slot + fields.FIRST_STEP]),
    )


def _step(number: int) -> int | None:
    """Steps are kept plus one."""
    return number - 1 if number else None
