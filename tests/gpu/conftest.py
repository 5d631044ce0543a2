"""Skips what needs a GPU on machines without one, and tells `make gpu` of each test."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import gpu_runs
from tests.gpu.gpu_runs import Run
from tests.private_cluster import MARK, Cluster, end_marked, private_cluster
from tools.gpu import steps
from tools.gpu.results import TestResult

_MOST_TEXT = 4000
_shows: dict[str, str] = {}
"""The first sentence of each test's docstring, by its id."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests with the mark `gpu` on a machine without a GPU."""
    found = [item for item in items if item.get_closest_marker("gpu")]
    for item in items:
        doc = str(getattr(getattr(item, "obj", None), "__doc__", None) or "").strip()
        _shows[item.nodeid] = doc.split("\n")[0].split(". ")[0].rstrip(".")
    if found and (why := gpu_runs.why_not()):
        for item in found:
            item.add_marker(pytest.mark.skip(reason=why))


def pytest_runtest_logstart(nodeid: str) -> None:
    """So that a test which hangs is named."""
    _tell(TestResult(test=_name(nodeid), shows=_shows.get(nodeid, "")))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a line for the outcome; a clean-up that fails makes one more."""
    if report.when == "call" or not report.passed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else report.longreprtext[-_MOST_TEXT:]
        why = f"{crash.message.strip()[:_MOST_TEXT]}\n\n{why}" if crash is not None else why
        figures: dict[str, Any] = dict(report.user_properties)  # type: ignore[arg-type]
        found = TestResult(test=_name(report.nodeid), shows=_shows.get(report.nodeid, ""), outcome=report.outcome)
        found.seconds, found.figures, found.why = report.duration, figures, why
        _tell(found)


def _name(nodeid: str) -> str:
    return nodeid.rpartition("/")[2]


def _tell(found: TestResult) -> None:
    if path := os.environ.get(steps.RESULTS):
        with Path(path).open("a") as file:
            file.write(json.dumps(asdict(found)) + "\n")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Ray cluster as `ray start` makes it, which finds the GPUs by itself."""
    with private_cluster(cpus=8, gpus=1 if gpu_runs.simulated() else None) as found:
        yield found


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start `raylaunch` with a script of `scripts`, on this machine without Ray; see `gpu_runs.start`.

    Whatever a test leaves running is killed, and nothing may be left of a run that has ended.
    """
    marks: list[str] = []

    def start(script: str, *args: str, cluster: Cluster | None = None, **job: Any) -> Run:
        marks.append(secrets.token_hex(8))
        env = cluster.env() if cluster is not None else gpu_runs.environment()
        folder = tmp_path / str(len(marks))
        folder.mkdir()
        return gpu_runs.start(folder, env | {MARK: marks[-1]}, script, args, job, on_cluster=cluster is not None)

    try:
        yield start
    finally:
        for mark in marks:
            end_marked(mark)
    gpu_runs.wait_until(lambda: still_holding(marks) == [], 10, "the GPU to be free")


def still_holding(marks: list[str]) -> list[int]:
    """Return the processes of these runs that still hold a GPU."""
    return [pid for mark in marks for pid in gpu_runs.holders(mark)]
