"""Names that several rooms share: the files of a run folder.

::

    runs/<name>/<run id>/
        job.yaml        the job as it ran, defaults filled in
        plan.json       who was to run where
        events.jsonl    what the driver saw and did (see `raylaunch.core.journal`)
        result.json     what came of it (see `raylaunch.core.result`)
        attempt-N/rank-R/{stdout.log, stderr.log, error.json}
"""

from __future__ import annotations

from pathlib import PurePath

JOB = "job.yaml"
PLAN = "plan.json"
EVENTS = "events.jsonl"
RESULT = "result.json"
STDOUT = "stdout.log"
STDERR = "stderr.log"
ERROR = "error.json"


def rank_dir(run_dir: str, attempt: int, rank: int) -> PurePath:
    """Where one worker's files are."""
    return PurePath(run_dir) / f"attempt-{attempt}" / f"rank-{rank}"
