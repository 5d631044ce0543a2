"""Numbers with their nouns, for whatever a person reads."""

from __future__ import annotations


def count(number: float, noun: str) -> str:
    """`1 worker`, `2 workers`, `no workers`."""
    return f"{f'{number:g}' if number else 'no'} {noun}{'' if number == 1 else 's'}"
