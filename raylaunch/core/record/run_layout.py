"""The files of a run folder.

::

    <log_dir>/.gitignore        keeps runs out of Git, and of what Ray copies; only if raylaunch made <log_dir>
    <log_dir>/<name>/latest     a link to the folder of the run that was started last
    <log_dir>/<name>/<run id>/
        job.yaml        the job as it ran, defaults filled in
        plan.json       which nodes were to run which ranks
        events.jsonl    the journal (see `raylaunch.core.record.journal`)
        result.json     the result (see `raylaunch.core.record.result`)
        report.html     the report for a browser (see `raylaunch.cli.html_report`)
        driver.log      what raylaunch said of a detached run, which has no terminal
        driver-N.log    why driver N of a detached run has ended by itself, if another one had taken over
        attempt-N/rank-R/{stdout.log, stderr.log, error.json}
        attempt-N/rank-R/{stdout.times, stderr.times}    when their lines were written, for `raylaunch logs -t`
        attempt-N/stacks.txt    what its workers were doing when they hung
        attempt-N/flight_recorder_rank_R    dumps of torch's Flight Recorder, with NCCL
        attempt-N/{filtered_stdout.log, filtered_stderr.log}    if filters are set
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePath

LATEST = "latest"
JOB = "job.yaml"
PLAN = "plan.json"
EVENTS = "events.jsonl"
RESULT = "result.json"
REPORT = "report.html"
DRIVER_LOG = "driver.log"
STDOUT = "stdout.log"
STDERR = "stderr.log"
ERROR = "error.json"
STACKS = "stacks.txt"

LOGS = {"stdout": STDOUT, "stderr": STDERR}
TIMES = {"stdout": "stdout.times", "stderr": "stderr.times"}
"""When lines of the logs were written; see `raylaunch.node.logs.log_times`."""
FILTERED = {"stdout": "filtered_stdout.log", "stderr": "filtered_stderr.log"}

NOWHERE = "/dev/null"
"""The `log_dir` that keeps no files."""

_RAY_SESSION = re.compile(r"/session_(latest|\d{4}(-\d\d){2}_\d\d(-\d\d){2}_\d+_\d+)(/|$)")
"""In the path of what Ray puts below its `temp-dir`; see `Node._init_temp` in Ray's `_private/node.py`."""


def future_losses(run_dir: str, cwd: str, args: Iterable[object], *, unpacked: bool) -> Iterator[str]:
    """Yield warnings, for a person, of files that Ray will delete: those in the folders of its session.

    `cwd` is the command's folder, and `args` are the script's arguments. `unpacked`: Ray unpacks a `working_dir` for
    the workers into such a folder.
    """
    if _RAY_SESSION.search(run_dir):
        yield f"Ray will delete the run folder {run_dir}: set `log_dir` to an absolute path elsewhere"
    if unpacked or _RAY_SESSION.search(cwd):
        yield "Ray will delete the folder in which the workers run: give the script absolute paths for its checkpoints"
    if any(_RAY_SESSION.search(str(argument)) for argument in args):
        yield "an argument of the script names a folder that Ray will delete: let checkpoints go elsewhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLayout:
    """The names of folders. Each attempt has its own, so logs of earlier attempts are not overwritten."""

    run: str
    attempt: str
    rank: str
    has_latest: bool
    """Whether there is a link `LATEST` beside the folder of a run."""

    def run_dir(self, *, title: str, run_id: str, random: str) -> PurePath:
        """Return the folder of the run, relative to `log_dir`."""
        return PurePath(self.run.format(title=title, run_id=run_id, random=random))

    def attempt_dir(self, run_dir: str, attempt: int) -> PurePath:
        """Return the folder of an attempt."""
        return PurePath(run_dir) / self.attempt.format(attempt=attempt, index=attempt - 1)

    def rank_dir(self, run_dir: str, attempt: int, rank: int) -> PurePath:
        """Return the folder of one worker."""
        return self.attempt_dir(run_dir, attempt) / self.rank.format(rank=rank)


LAYOUTS = {
    "raylaunch": RunLayout(run="{title}/{run_id}", attempt="attempt-{attempt}", rank="rank-{rank}", has_latest=True),
    "torchrun": RunLayout(run="{run_id}_{random}", attempt="attempt_{index}", rank="{rank}", has_latest=False),
}
"""By the `log_layout` of a job.

torchrun names the folder of a worker by its local rank. raylaunch uses the rank, which is the same on one node: several
nodes may write to one folder, where local ranks would collide.
"""
