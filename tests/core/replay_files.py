"""The journals in replays/, for which every version of the machine must give the same actions.

Add one from a run folder (its absolute paths become /job/...):

    python tests/core/replay_files.py add NAME runs/NAME/ID/events.jsonl

After a change of decisions or of their texts, write all of them again and read the diff:

    python tests/core/replay_files.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from raylaunch.core.job.job import Job
from raylaunch.core.machine.events_and_actions import Event
from raylaunch.core.record import journal

FOLDER = Path(__file__).parent / "replays"
_ABSOLUTE = re.compile(r"(?<![\w./:])/(?:[^/\s\"',\\]+/)*?(attempt-\d+/rank-\d+/)?([^/\s\"',\\]+)(?=[\s\"',\\:\]]|$)")


def files() -> list[Path]:
    return sorted(FOLDER.glob("*.jsonl"))


def without_paths(text: str) -> str:
    """Replace the folders of absolute paths: /x/runs/y/attempt-1/rank-0/stderr.log -> /job/attempt-1/rank-0/stderr.log."""
    return _ABSOLUTE.sub(lambda found: f"/job/{found[1] or ''}{found[2]}", text)


def write(path: Path, job: Job, events: Iterable[Event]) -> None:
    """Write a journal of these events with the actions of the present machine."""
    lines = [journal.header(job, "2026-01-01T00:00:00+00:00"), *map(journal.line, journal.replay(job, events))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def rewrite(source: Path, target: Path) -> None:
    """Replay the events of a journal with the present machine, and write the new journal without local paths."""
    job, entries = journal.read(without_paths(source.read_text(encoding="utf-8")).splitlines())
    write(target, job, [entry.event for entry in entries if entry.event is not None])


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            for file in files():
                rewrite(file, file)
        case ["add", name, events]:
            rewrite(Path(events), FOLDER / f"{name}.jsonl")
        case _:
            sys.exit(__doc__)
