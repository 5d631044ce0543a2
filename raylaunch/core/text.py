"""Texts for people: numbers with nouns and as short lists, and foreign text made safe for our own lines."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable

_MAX_SPANS = 12
_MAX_HOSTS = 8
_FOLDED_FROM = 3
"""Two names are shorter to read, and to copy, as they are."""
_LAST_NUMBER = re.compile(r"(.*?)([0-9]+)([^0-9]*)")
_SIZES = {"d": 86_400, "h": 3_600, "min": 60, "s": 1}

_UNSAFE = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1
    r"\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # line separators, and marks that change the direction of text
    r"\ud800-\udfff"  # surrogates, which no encoding has
)
_UNSAFE_IN_LINE = re.compile(rf"[\n{_UNSAFE}]")
_UNSAFE_IN_LINES = re.compile(rf"[{_UNSAFE}]")
_OF_WORDS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-+/=.~")
"""Characters of keys and tokens, between which `capped` does not cut."""


def count(number: float, noun: str) -> str:
    """Return `1 worker`, `2 workers` or `no workers`."""
    shown = f"{number}" if isinstance(number, int) else f"{number:g}"
    return f"{shown if number else 'no'} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a time as a person reads it: `0.25 s`, `5.0 s`, `2 min 5 s`, `3 h 20 min`, `2 d 4 h`; of an int, `5 s`."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < _SIZES["min"]:
        return f"{seconds} s" if isinstance(seconds, int) else f"{seconds:.{2 if seconds < 1 else 1}f} s"
    rest = round(seconds)
    largest = next(index for index, size in enumerate(_SIZES.values()) if rest >= size)
    shown = []
    for unit, size in [*_SIZES.items()][largest : largest + 2]:
        number, rest = divmod(rest, size)
        shown += [f"{number} {unit}"] if number else []
    return " ".join(shown)


def spans(numbers: Iterable[int]) -> str:
    """Return numbers as `0-3, 6`; a long list ends with `...`."""
    return ", ".join(_folded(map(str, numbers)))


def named_ranks(ranks: Collection[int]) -> str:
    """Return `rank 3`, or `ranks 0-3, 6`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def host_list(names: Iterable[str]) -> str:
    """Return names of hosts or nodes as Slurm does: `node[01-64,70], login`; a long list ends with `and 9 more`.

    Names are folded from three on that differ in their last number alone.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        match = _LAST_NUMBER.fullmatch(name)
        before, number, after = match.groups() if match else (name, "", "")
        groups.setdefault((before, after), []).append(number)
    parts: list[tuple[str, int]] = []
    for (before, after), numbers in groups.items():
        if len(numbers) < _FOLDED_FROM:
            parts += [(before + number + after, 1) for number in numbers]
        else:
            parts.append((f"{before}[{','.join(_folded(numbers))}]{after}", len(numbers)))
    more = sum(size for _, size in parts[_MAX_HOSTS:])
    return ", ".join(text for text, _ in parts[:_MAX_HOSTS]) + (f" and {more} more" if more else "")


def _folded(numbers: Iterable[str]) -> list[str]:
    """Return numbers as spans, whose two ends are written with the same leading zeros; a long list ends with `...`."""
    runs: list[tuple[str, str]] = []
    for number in sorted(numbers, key=lambda text: (int(text), text)):
        if runs and number == str(int(runs[-1][1]) + 1).zfill(len(runs[-1][1])):
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    texts = [low if low == high else f"{low}-{high}" for low, high in runs]
    return texts if len(texts) <= _MAX_SPANS else [*texts[:_MAX_SPANS], "..."]


def printable(text: str, *, several_lines: bool = False) -> str:
    r"""Return a text in which nothing moves the cursor, rings, hides or reorders: such characters become `\x1b`.

    Surrogates, which Python decodes bytes to that are not UTF-8, become the bytes: `\xe9`. A newline is kept where the
    text may have several lines, else it becomes `\n`.
    """
    return (_UNSAFE_IN_LINES if several_lines else _UNSAFE_IN_LINE).sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    character = match[0]
    if "\udc80" <= character <= "\udcff":  # PEP 383
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def capped(text: str, most: int) -> str:
    """Shorten a text to about `most` characters: its beginning and its end, with a note of what is missing.

    It is never cut within a word, since a part of a secret could not be recognised.
    """
    if len(text) <= most:
        return text
    head, tail = most // 2, len(text) - most // 2
    while head and text[head - 1] in _OF_WORDS:
        head -= 1
    while tail < len(text) and text[tail] in _OF_WORDS:
        tail += 1
    return f"{text[:head]}[... {tail - head} characters ...]{text[tail:]}"


def text_of(value: object) -> str:
    """Return `str(value)`, whatever that does. A subclass of str becomes a str, which can be unpickled anywhere."""
    try:
        return str.__str__(str(value))
    except BaseException:  # noqa: BLE001
        return "(its text cannot be made)"
