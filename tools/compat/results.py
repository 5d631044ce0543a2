"""What came of each combination, in a file, and the tables of the documentation that are made of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.compat.checks import Found
from tools.compat.combinations import PACKAGES

FILE = Path(__file__).with_name("results.json")
VERSIONS = ("py", *PACKAGES)
_MOST_NAMES = 5
Row = dict[str, Any]
"""The `date`, the installed versions, the combination as it was `asked` for, and `found`: of each column."""


def read(file: Path = FILE) -> list[Row]:
    """Return all rows, the oldest versions first."""
    return list(json.loads(file.read_text())) if file.exists() else []


def add(row: Row, file: Path = FILE) -> None:
    """Write a row in place of the one of the same combination."""
    rows = [each for each in read(file) if each["asked"] != row["asked"]]
    rows.append(row)
    rows.sort(key=lambda each: [parts(each[name]) for name in VERSIONS])
    file.write_text(json.dumps(rows, indent=1) + "\n")


def parts(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparing; none for `none`."""
    release = version.partition("+")[0]
    return tuple(int(part) for part in release.split(".") if part.isdecimal())


def failures(row: Row) -> list[str]:
    """Return the names of the tests that failed."""
    return [test for found in row["found"].values() for test in found["failed"]]


def table(rows: list[Row]) -> Iterator[list[str]]:
    """Yield the head and the rows of the table."""
    columns = dict.fromkeys(name for row in rows for name in row["found"])
    yield ["Python", "Ray", "torch", "omegaconf", *columns, "date"]
    for row in rows:
        cells = [_cell(row["found"].get(name, Found().record())) for name in columns]
        yield [*(row[name] for name in VERSIONS), *cells, row["date"]]


def _cell(found: Mapping[str, Any]) -> str:
    failed = len(found["failed"])
    if failed:
        return f"{failed} of {failed + int(found['passed'])} failed"
    return "ok" if found["passed"] else "not tried"


def notes(rows: list[Row]) -> Iterator[str]:
    """Yield what failed and what was left out, each with the versions with which it was so.

    What is left out with all versions is not due to one.
    """
    always = set.intersection(*(_left_out(row) for row in rows)) if len(rows) > 1 else set()
    for row in rows:
        where = f"Python {row['py']}, Ray {row['ray']}, torch {row['torch']}, {{}}: {{}}"
        for name, found in row["found"].items():
            if names := [f"`{test}`" for test in found["failed"]]:
                more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
                yield where.format(name, f"{', '.join(names[:_MOST_NAMES])}{more} failed")
            skipped = found["skipped"].items() if found["passed"] else ()
            left_out = [f"{count} left out: {reason}" for reason, count in skipped if (name, reason) not in always]
            if left_out:
                yield where.format(name, "; ".join(left_out))


def _left_out(row: Row) -> set[tuple[str, str]]:
    return {(name, reason) for name, found in row["found"].items() for reason in found["skipped"] if found["passed"]}
