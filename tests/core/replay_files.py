"""The logs in replays/: what a machine is told there, and what it decides.

Add one, from the run folder of a run that taught something (its absolute paths become /job/...):

    python tests/core/replay_files.py add NAME runs/NAME/ID/events.jsonl

After a decision or its wording was changed on purpose, have all of them decided anew, and read the diff:

    python tests/core/replay_files.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from raylaunch.core import journal
from raylaunch.core.events import Event
from raylaunch.core.job import Job

FOLDER = Path(__file__).parent / "replays"
_ABSOLUTE = re.compile(r"(?<![\w./:])/(?:[^/\s\"',\\]+/)*?(attempt-\d+/rank-\d+/)?([^/\s\"',\\]+)(?=[\s\"',\\:\]]|$)")


def files() -> list[Path]:
    return sorted(FOLDER.glob("*.jsonl"))


def without_paths(text: str) -> str:
    """Absolute paths lose their folders: /somewhere/runs/x/attempt-1/rank-0/stderr.log is under /job now."""
    return _ABSOLUTE.sub(lambda found: f"/job/{found[1] or ''}{found[2]}", text)


def write(path: Path, job: Job, events: Iterable[Event]) -> None:
    """The events, and what the present machine decides."""
    lines = [journal.header(job, "2026-01-01T00:00:00+00:00"), *map(journal.line, journal.replay(job, events))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def decide_anew(source: Path, target: Path) -> None:
    job, entries = journal.read(without_paths(source.read_text(encoding="utf-8")).splitlines())
    write(target, job, [entry.event for entry in entries if entry.event is not None])


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            for file in files():
                decide_anew(file, file)
        case ["add", name, events]:
            decide_anew(Path(events), FOLDER / f"{name}.jsonl")
        case _:
            sys.exit(__doc__)
