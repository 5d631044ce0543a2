"""Run folders and registries that tests make, of the journals in tests/core/replays."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from raylaunch.cluster.driver import run_registry
from raylaunch.cluster.driver.run_registry import DriverProcess, RegisteredRun
from raylaunch.core.record import journal, run_layout

REPLAYS = Path(__file__).parents[2] / "core" / "replays"
BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)
NOBODY = DriverProcess(host="host-1", pid=1234, started=-1, boot_id="none", namespace="none")
"""A process on another machine."""


def dead() -> DriverProcess:
    """A process of this machine that is gone."""
    known = asdict(DriverProcess.this())
    return DriverProcess(**known | {"pid": 1, "started": -1})


def make_folder(
    path: Path, replay: str = "two-kills-then-finished", *, lines: int | None = None, result: bool = False
) -> Path:
    """Make a run folder with the first lines of a recorded journal, all by default."""
    text = (REPLAYS / f"{replay}.jsonl").read_text(encoding="utf-8")
    path.mkdir(parents=True)
    rows = text.splitlines(keepends=True)
    (path / run_layout.EVENTS).write_text("".join(rows[:lines]), encoding="utf-8")
    if result:
        _, entries = journal.read(rows)
        code = next(action.exit_code for entry in entries for action in entry.actions if hasattr(action, "exit_code"))
        (path / run_layout.RESULT).write_text(json.dumps({"exit_code": code, "why": "as its result says"}))
    return path


class Registry:
    """A registry in a folder of a test."""

    def __init__(self, folder: Path) -> None:
        self.environ = {"XDG_STATE_HOME": str(folder), "TMPDIR": str(folder)}
        self.folder = run_registry.folder(self.environ)
        self.made = 0

    def add(self, folder: Path | str, **facts: Any) -> RegisteredRun:
        """Enter a run that began a minute after the run that was entered before it."""
        self.made += 1
        folder = str(folder)
        run = RegisteredRun(
            **{
                "id": Path(folder).name or f"run-{self.made}",
                "name": Path(folder).parent.name or "nothing-kept",
                "folder": folder,
                "driver": DriverProcess.this(),
                "began": (BEGAN + timedelta(minutes=self.made)).isoformat(),
                "cluster": "",
                **facts,
            }
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{self.made:05}.json").write_text(json.dumps(asdict(run)))
        return run
