"""The tables: one row for each figure, for a terminal or as Markdown, made of what bench.json records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.bench.contenders import RAY_TRAIN, RAYLAUNCH, TORCHRUN, TORCHRUN_DEFAULTS
from tools.bench.figures import Outcome

Record = dict[str, Any]
Row = list[str]

_CONTENDERS = (RAYLAUNCH, TORCHRUN, TORCHRUN_DEFAULTS, RAY_TRAIN)
_RATIOS = (TORCHRUN, RAY_TRAIN)
LEGEND = "median/worst (samples); how many times better than torchrun and Ray Train, by the medians; goals"


def text(outcomes: Sequence[Outcome]) -> str:
    """For a terminal: the one table, what its figures are, and the details and notes of each bench."""
    records = [figure.record() for outcome in outcomes for figure in outcome.figures]
    rows = [row for record in records for row in _with_goals_below(record)]
    lines = [LEGEND, "", *aligned([_head(records), *(_known(row, records) for row in rows)])]
    lines += ["", *(f"{record['name'].strip(' +')}: {record['what']}" for record in records)]
    for outcome in outcomes:
        for detail in outcome.details:
            lines += ["", detail.title, *aligned([list(detail.columns), *map(list, detail.rows)])]
        lines += ["", *outcome.notes] if outcome.notes else []
    return "\n".join(lines)


def markdown(records: Sequence[Record]) -> str:
    """The one table, as Markdown has it."""
    head = _head(records)
    rows = [
        _known([*_cells(record), *map("<br>".join, zip(*_goals(record), strict=True))], records) for record in records
    ]
    rule = ["---", *("--:" for _ in head[1:])]
    return "\n".join([LEGEND, "", *(f"| {' | '.join(row)} |" for row in (head, rule, *rows))])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns, the first to the left and the others to the right, with a rule below the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in rows)
    ]
    return [f"  {line.rstrip()}" for line in (lines[0], "-" * len(lines[0]), *lines[1:])]


def number(value: float) -> str:
    """With as many digits as one reads."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


def _head(records: Sequence[Record]) -> Row:
    return _known(["", *_CONTENDERS, *(f"/{peer}" for peer in _RATIOS), "goal", ""], records)


def _known(row: Row, records: Sequence[Record]) -> Row:
    """Without the columns of contenders that no figure has."""
    absent = {name for name in _CONTENDERS if not any(name in record["contenders"] for record in records)}
    columns = ("", *_CONTENDERS, *_RATIOS, "", "")
    return [cell for cell, name in zip(row, columns, strict=True) if name not in absent]


def _with_goals_below(record: Record) -> list[Row]:
    """A figure's row has its first goal; each further goal has a row to itself."""
    first, *further = _goals(record)
    cells = _cells(record)
    return [[*cells, *first], *([*("" for _ in cells), *goal] for goal in further)]


def _cells(record: Record) -> Row:
    contenders = (_contender(record["contenders"].get(name, "-")) for name in _CONTENDERS)
    ratios = (_ratio(record["times_better"].get(name)) for name in _RATIOS)
    return [f"{record['name']}, {record['unit']}", *contenders, *ratios]


def _contender(found: Record | str) -> str:
    if isinstance(found, str):
        return found
    return f"{number(found['median'])}/{number(found['worst'])} ({len(found['samples'])})"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{number(value)} x"


def _goals(record: Record) -> list[tuple[str, str]]:
    return [(goal["goal"], _verdict(goal["value"], goal["met"])) for goal in record["goals"]] or [("", "")]


def _verdict(value: float | None, met: bool | None) -> str:
    if met is None or value is None:
        return "not measured"
    return f"{'met' if met else 'MISSED'}: {number(value)}"
