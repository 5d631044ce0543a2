"""Texts for numbers: with nouns, and as short lists."""

from __future__ import annotations

from collections.abc import Iterable

_MAX_SPANS = 12


def count(number: float, noun: str) -> str:
    """Return `1 worker`, `2 workers` or `no workers`."""
    return f"{f'{number:g}' if number else 'no'} {noun}{'' if number == 1 else 's'}"


def spans(numbers: Iterable[int]) -> str:
    """Return numbers as `0-3, 6`; a long list ends with `...`."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join(texts if len(texts) <= _MAX_SPANS else [*texts[:_MAX_SPANS], "..."])
