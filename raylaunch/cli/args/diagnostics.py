"""Error messages that quote the source (job file, command line or environment) and mark the mistake with carets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raylaunch.core.job import secrets
from raylaunch.core.text import capped, count, printable

if TYPE_CHECKING:
    import yaml


COMMAND_LINE = "command line"
MAX_FINDINGS = 25
"""How many mistakes are shown."""
_MAX_LINE = 160
"""Characters of a source's line that are shown."""
_MAX_MESSAGE = 400
"""Characters of a message, which may quote a value."""
_KEY = re.compile(r"""(\s*)["']?[^\s"'#:\[\]{}-][^"'#:]*(?:["']\s*)?:(?:\s|$)""")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpan:
    """A range of columns in one line of a source. A span without text stands for the whole source."""

    source: str
    line: int = 0
    """Line number from 1; 0 for sources of one line: the command line and environment variables."""
    text: str = ""
    """The whole line; a secret in it is replaced by `***`."""
    column: int = 0
    width: int = 1
    secret: bool = False
    """Whether the span lies in a part of the line that is hidden."""

    @property
    def order(self) -> tuple[float, bool, int]:
        """Sort key: lines of the file, then the file as a whole, the environment, and the command line."""
        return self.line or math.inf, self.source == COMMAND_LINE, self.column

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column + 1}" if self.line else self.source


Locator = Callable[["yaml.Node"], SourceSpan]
"""Returns the span of a YAML node."""


def file_locator(name: str, text: str) -> Locator:
    """Return the locator for nodes of the file `name` with this text."""
    lines = text.rstrip().splitlines() or [""]
    ends = list(_visible_ends(lines))

    def locate(node: yaml.Node) -> SourceSpan:
        line, column = node.start_mark.line, node.start_mark.column
        if line >= len(lines):  # something is missing at the end of the file: point behind its last character
            line, column = len(lines) - 1, len(lines[-1])
        end = node.end_mark.column if node.end_mark.line == line else len(lines[line])
        span = SourceSpan(source=name, line=line + 1, text=lines[line], column=column, width=max(1, end - column))
        return _hide_secret(span, ends[line])

    return locate


def _visible_ends(lines: Sequence[str]) -> Iterator[int | None]:
    """Yield for each line the column at which its secret begins, None for a line without a secret.

    A secret continues until the next key that is not nested below its own key, however its lines are indented.
    """
    secret_indent = None
    for line in lines:
        key = _KEY.match(line)
        if secret_indent is not None and (key is None or key.end(1) > secret_indent):
            yield len(line) - len(line.lstrip())
            continue
        end = secrets.secret_at(line)
        secret_indent = key.end(1) if key and end is not None else None
        yield end if end is not None and line[end:] else None


def _hide_secret(span: SourceSpan, end: int | None) -> SourceSpan:
    """Return the span with the text of its line hidden from column `end` on."""
    if end is None:
        return span
    text = span.text[:end] + secrets.HIDDEN
    column = min(span.column, end)
    return replace(
        span,
        text=text,
        column=column,
        width=max(1, min(span.width, len(text) - column)),
        secret=span.column >= end,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One mistake in a source: what is wrong, where, and what to do about it."""

    message: str
    span: SourceSpan
    hint: str = ""
    related: SourceSpan | None = None
    """A second span that contributes to the mistake."""
    paths: tuple[tuple[str, ...], ...] = ()
    """Paths of the settings that the mistake concerns; `()` is the path of the whole job.

    Problems that follow from a wrong value of these settings are not reported again.
    """

    def __str__(self) -> str:
        shown = [(self.span, "-->", "^")] + ([(self.related, ":::", "-")] if self.related else [])
        margin = " " * max(len(str(span.line)) for span, _, _ in shown)
        lines = [f"error: {_shown(self.message)}"]
        for span, arrow, caret in shown:
            lines.append(f"{margin}{arrow} {_shown(str(span))}")
            if span.text:
                text, column, width = _window(span)
                lines += [f"{margin} |", f"{str(span.line or '').rjust(len(margin))} | {text}"]
                lines += [f"{margin} | {' ' * column}{caret * width}"]
        return "\n".join([*lines, f"{margin} = {_shown(self.hint)}"] if self.hint else lines)


def _shown(text: str) -> str:
    return printable(capped(text, _MAX_MESSAGE))


def _window(span: SourceSpan) -> tuple[str, int, int]:
    """Return the part of a long line around the mistake, and the column and width of the mistake in it.

    As in `capped`, no word is cut, since a part of a secret could not be recognised.
    """
    start, end = 0, len(span.text)
    if end > _MAX_LINE:
        start = max(0, span.column - _MAX_LINE // 2)
        end = min(end, start + _MAX_LINE)
        while 0 < start < span.column and _is_word(span.text[start - 1 : start + 1]):
            start += 1
        while start < end < len(span.text) and _is_word(span.text[end - 1 : end + 1]):
            end -= 1
    # Tabs and control characters would move the cursor away from the carets.
    text = "".join(char if char.isprintable() else " " for char in span.text[start:end])
    before, after = "... " * (start > 0), " ..." * (end < len(span.text))
    column = min(span.column, end) - start
    width = max(1, min(span.width, end - start - column))
    return before + text + after, len(before) + column, width


def _is_word(text: str) -> bool:
    return all(char.isalnum() or char in "_-+/=.~" for char in text)


def render(findings: Sequence[Finding]) -> str:
    """Return the text of all findings in the order in which their sources are read, without duplicates."""
    texts = list(dict.fromkeys(map(str, sorted(findings, key=lambda finding: finding.span.order))))
    more = len(texts) - MAX_FINDINGS
    return "\n\n".join(
        [*texts[:MAX_FINDINGS], f"error: there are {count(more, 'more mistake')}"] if more > 0 else texts
    )
