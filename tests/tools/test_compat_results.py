"""What the table says of results: it must not call well what failed or was left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.compat import checks, results
from tools.compat.checks import COLUMNS, Found

REPORT = """
<testsuites><testsuite>
<testcase classname="tools.compat.on_ray" name="test_restart[spawn]"/>
<testcase classname="tools.compat.on_ray" name="test_restart[forkserver]"><failure message="no">no</failure></testcase>
<testcase classname="tools.compat.on_ray" name="test_spawn"><skipped message="no such flag"/></testcase>
<testcase classname="tools.compat.on_ray" name="test_elastic"><error message="left">left</error></testcase>
</testsuite></testsuites>
"""


def row(py: str, ray: str, **found: Found) -> results.Row:
    every = {name: found.get(name, Found(passed=1)).record() for name in COLUMNS}
    asked: dict[str, Any] = {"asked": f"{py} {ray}", "date": "2026-11-22", "py": py, "ray": ray}
    return asked | {"torch": "2.13.0+cpu", "omegaconf": "2.4.0", "found": every}


def test_a_report_of_pytest(tmp_path: Path) -> None:
    """Tests belong to the columns that their names begin with; an error after a test is a failure."""
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    found = {name: Found() for name in ("restart", "elastic", "spawn")}
    checks.read(report, found)
    assert found["restart"] == Found(passed=1, failed=["on_ray::test_restart[forkserver]"])
    assert found["elastic"].failed == ["on_ray::test_elastic"]
    assert (found["spawn"].passed, dict(found["spawn"].skipped)) == (0, {"no such flag": 1})


def test_the_table() -> None:
    failed = Found(passed=3, failed=["on_ray::test_restart"])
    no_torch = Found()
    no_torch.skipped["no such flag"] = 1
    rows = [row("3.10.13", "2.44.1", restart=failed), row("3.13.0", "2.60.0", spawn=no_torch), row("3.9", "2.9")]
    head, *lines = results.table(rows)
    cells = [dict(zip(head, line, strict=True)) for line in lines]
    assert [(each["restart"], each["spawn"]) for each in cells] == [
        ("1 of 4 failed", "ok"),
        ("ok", "not tried"),
        ("ok",) * 2,
    ]
    assert list(results.notes(rows)) == [
        "Python 3.10.13, Ray 2.44.1, torch 2.13.0+cpu, restart: `on_ray::test_restart` failed"
    ]


def test_what_all_versions_leave_out_is_no_note() -> None:
    here, there = Found(passed=1), Found(passed=1)
    here.skipped.update(["no such flag", "tested elsewhere"])
    there.skipped["tested elsewhere"] = 1
    assert list(results.notes([row("3.10.13", "2.44.1", contract=here), row("3.13.0", "2.60.0", contract=there)])) == [
        "Python 3.10.13, Ray 2.44.1, torch 2.13.0+cpu, contract: 1 left out: no such flag"
    ]


def test_a_combination_has_one_row_and_older_versions_come_first(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    for each in (row("3.10.13", "2.60.0"), row("3.10.13", "2.9.0"), row("3.9.1", "2.9.0"), row("3.10.13", "2.60.0")):
        results.add(each, file)
    assert [(each["py"], each["ray"]) for each in results.read(file)] == [
        ("3.9.1", "2.9.0"),
        ("3.10.13", "2.9.0"),
        ("3.10.13", "2.60.0"),
    ]
