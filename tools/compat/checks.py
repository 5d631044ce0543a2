"""What is tried in each environment, and what came of it: the columns of the table."""

from __future__ import annotations

import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.compat.combinations import CUDA, TODAY
from tools.compat.environments import Environment

ON_RAY = "tools/compat/on_ray.py"
_SECONDS = 1500.0
_MOST_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Column:
    """The tests of a file or folder, or of some, whose names begin like this."""

    path: str
    begin: str = "test_"


COLUMNS = {
    "contract": Column("tests/contract"),
    "restart": Column(ON_RAY, "test_restart"),
    "elastic": Column(ON_RAY, "test_elastic"),
    "launch": Column(ON_RAY, "test_launch"),
    "spawn": Column(ON_RAY, "test_spawn"),
    "check": Column(ON_RAY, "test_check"),
}
TODAY_COLUMNS = {
    "core": Column("tests/core"),
    "cli": Column("tests/cli"),
    "worker": Column("tests/worker"),
    "launch": Column(f"{ON_RAY}::test_launch"),
}
"""With what pip installs today: the tests of the code that uses other packages most, without properties."""
SUITES = {"": COLUMNS, TODAY: TODAY_COLUMNS, CUDA: {"cuda": Column("tests/cluster/test_cuda_stubs.py")}}
"""What is tried, by `Combination.suite`."""
SMOKE = {
    "contract": Column("tests/contract/test_environment.py::test_values_of_a_single_node"),
    "restart": Column(f"{ON_RAY}::test_restart[forkserver]"),
    "launch": Column(f"{ON_RAY}::test_launch[forkserver]"),
}
"""A test of each way in which a run is started, by which one sees that the checks run."""


@dataclass(slots=True)
class Found:
    """What came of the tests of a column. `skipped`: how many, by the reason."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {"passed": self.passed, "failed": sorted(self.failed), "skipped": dict(sorted(self.skipped.items()))}


def run(environment: Environment, columns: Mapping[str, Column], *, log: Path) -> dict[str, Found]:
    """Run the tests of these columns, one path after another. What they print goes to `log`."""
    found = {name: Found() for name in columns}
    for path in dict.fromkeys(column.path for column in columns.values()):
        names = [name for name, column in columns.items() if column.path == path]
        with tempfile.TemporaryDirectory(prefix="raylaunch-compat-") as folder:
            report = Path(folder, "report.xml")
            options = (
                "-q",
                "-m",
                "not hypothesis",
                f"--junit-xml={report}",
                f"--basetemp={folder}/tmp",
            )
            code = environment.run(("-m", "pytest", path, *options), _SECONDS, log)
            if report.exists():
                read(report, {name: found[name] for name in names}, columns)
        for name in names:
            if code is None or not (found[name].passed or found[name].failed or found[name].skipped):
                found[name].failed.append(
                    f"{path}: pytest " + ("took too long" if code is None else f"ended with {code}")
                )
    return found


def read(report: Path, found: dict[str, Found], columns: Mapping[str, Column] = COLUMNS) -> None:
    """Add the results in a report of pytest to the columns that they belong to."""
    for case in ET.parse(report).iter("testcase"):  # pytest has written it for us
        test = case.get("name", "")
        names = [name for name in found if test.startswith(columns[name].begin)]
        for column in (found[name] for name in names or found):  # a module that cannot be imported has no tests
            if case.find("failure") is not None or case.find("error") is not None:
                column.failed.append(f"{case.get('classname', '').rpartition('.')[2]}::{test}")
            elif (skip := case.find("skipped")) is not None:
                column.skipped[skip.get("message", "")[:_MOST_CHARACTERS]] += 1
            else:
                column.passed += 1
