"""Numbers as a person reads them: with their nouns, and many of them in few words."""

from __future__ import annotations

from collections.abc import Iterable

_MOST_SPANS = 12


def count(number: float, noun: str) -> str:
    """`1 worker`, `2 workers`, `no workers`."""
    return f"{f'{number:g}' if number else 'no'} {noun}{'' if number == 1 else 's'}"


def spans(numbers: Iterable[int]) -> str:
    """`0-3, 6`; a long list is cut."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join(texts if len(texts) <= _MOST_SPANS else [*texts[:_MOST_SPANS], "..."])
