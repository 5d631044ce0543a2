"""Why a planned change may have lost steps: who had not saved when the time for it was over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raylaunch.core.words import spans

Told = Mapping[int, tuple[int | None, int | None]]
"""By rank: the last step that it asked `should_checkpoint` about, and the last that it said is saved."""


def unsaved(step: int, told: Told) -> str:
    """In words for a person; `""` where nobody ever asks, or all have saved."""
    asked = {rank: last for rank, (last, _) in told.items() if last is not None}
    before = [rank for rank, last in asked.items() if last < step]
    writing = [rank for rank in asked if rank not in before and (told[rank][1] or -1) < step]
    if not asked:
        return ""
    if len(asked) < len(told):
        silent = _ranks([rank for rank in told if rank not in asked])
        why = f"{silent} never asked `should_checkpoint`, which is for every rank, after each step"
    elif before:
        last = min(asked[rank] for rank in before)
        why = f"{_ranks([rank for rank in before if asked[rank] == last])} asked last after step {last}"
    elif writing:
        why = f"{_ranks(writing)} had not said `checkpointed`"
    else:
        return ""
    return f"not all workers saved at step {step}: {why}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"
