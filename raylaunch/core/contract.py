"""Names that several rooms share: the files of a run folder.

::

    <log_dir>/<name>/<run id>/
        job.yaml        the job as it ran, defaults filled in
        plan.json       who was to run where
        events.jsonl    what the driver saw and did (see `raylaunch.core.journal`)
        result.json     what came of it (see `raylaunch.core.result`)
        attempt-N/rank-R/{stdout.log, stderr.log, error.json}
        attempt-N/stacks.txt    what its workers were doing, where they hung
        attempt-N/{filtered_stdout.log, filtered_stderr.log}    where filters were asked for
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

JOB = "job.yaml"
PLAN = "plan.json"
EVENTS = "events.jsonl"
RESULT = "result.json"
STDOUT = "stdout.log"
STDERR = "stderr.log"
ERROR = "error.json"
STACKS = "stacks.txt"

LOGS = {"stdout": STDOUT, "stderr": STDERR}
FILTERED = {"stdout": "filtered_stdout.log", "stderr": "filtered_stderr.log"}

NOWHERE = "/dev/null"
"""The `log_dir` that means: nothing is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How folders are named. No two attempts have the same, so no log of an earlier one is ever overwritten."""

    run: str
    attempt: str
    rank: str

    def run_dir(self, *, title: str, run_id: str, random: str) -> PurePath:
        """The run's folder, below `log_dir`."""
        return PurePath(self.run.format(title=title, run_id=run_id, random=random))

    def attempt_dir(self, run_dir: str, attempt: int) -> PurePath:
        """What all ranks of an attempt share."""
        return PurePath(run_dir) / self.attempt.format(attempt=attempt, index=attempt - 1)

    def rank_dir(self, run_dir: str, attempt: int, rank: int) -> PurePath:
        """Where one worker's files are."""
        return self.attempt_dir(run_dir, attempt) / self.rank.format(rank=rank)


LAYOUTS = {
    "raylaunch": Layout(run="{title}/{run_id}", attempt="attempt-{attempt}", rank="rank-{rank}"),
    "torchrun": Layout(run="{run_id}_{random}", attempt="attempt_{index}", rank="{rank}"),
}
"""By the `log_layout` of a job.

torchrun names a worker's folder by its local rank. Here it is the global rank, the same on one node: several nodes
may write to one folder, where local ranks would collide.
"""
