"""What `make gpu` saw: gpu.json, written after each step, and a table of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, SKIPPED, HUNG, NOT_RUN = "passed", "failed", "skipped", "hung", "not run"


@dataclass(kw_only=True)
class TestResult:
    """One test. `figures`: what it measured, by name. `why`: the error with the end of its traceback, or why it was skipped."""

    __test__ = False  # pytest takes a class of this name for tests

    test: str
    shows: str = ""
    outcome: str = HUNG
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    why: str = ""


@dataclass(kw_only=True)
class StepResult:
    """One test file. `outcome`: of the worst of its tests. `output`: the end of what it printed, unless it passed."""

    name: str
    outcome: str
    seconds: float = 0.0
    tests: list[TestResult] = field(default_factory=list)
    output: str = ""


def read(path: Path) -> list[TestResult]:
    """Return what `conftest` wrote of each test, the last line of each; a test that has no other one was begun only."""
    found: dict[str, TestResult] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        one = TestResult(**json.loads(line))
        known = found.get(one.test)
        if known is None or known.outcome != FAILED:  # a test may fail, and its clean-up then pass
            found[one.test] = one
    return list(found.values())


def write(path: Path, head: dict[str, Any], steps: list[StepResult]) -> None:
    """Write gpu.json. Whoever reads it sees all of it or what was there before."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps({**head, "steps": [asdict(step) for step in steps]}, indent=2) + "\n")
    aside.replace(path)


def table(record: dict[str, Any]) -> str:
    """Return a record of gpu.json as a Markdown table, with the machine and the time below it."""
    rows = [("what", "outcome", "s", "measured"), ("---", "---", "---:", "---"), *_rows(record)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    machine = ", ".join(f"{name} {value}" for name, value in record["machine"].items() if value)
    note = " GPUs were simulated: this says nothing of GPUs." if record["simulated"] else ""
    return "\n".join([*lines, "", f"{machine}. {record['at']}.{note}"])


def _rows(record: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    for step in record["steps"]:
        for test in step["tests"]:
            figures = ", ".join(f"{name} {_figure(value)}" for name, value in test["figures"].items())
            why = test["why"].strip().splitlines()
            text = figures if test["outcome"] == PASSED else "; ".join(filter(None, [*why[:1], figures]))
            case = test["test"].partition("[")[1:]
            yield (
                _cell((test["shows"] or test["test"].partition("[")[0]) + (f" ({case[1][:-1]})" if case[0] else "")),
                test["outcome"],
                f"{test['seconds']:.1f}",
                _cell(text),
            )
        if not step["tests"]:
            yield step["name"], step["outcome"], f"{step['seconds']:.1f}", ""


def _figure(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:300]
