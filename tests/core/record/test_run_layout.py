"""The names in a run folder, which are public."""

from __future__ import annotations

from raylaunch.core.job.job import LOG_LAYOUTS, Job
from raylaunch.core.record import run_layout
from raylaunch.core.record.run_layout import LAYOUTS


def test_folders_of_the_default_layout():
    """By attempt, then by global rank."""
    layout = LAYOUTS["raylaunch"]
    assert str(layout.run_dir(title="night", run_id="1", random="abc")) == "night/1"
    assert str(layout.attempt_dir("/job/runs/night/1", 2)) == "/job/runs/night/1/attempt-2"
    assert str(layout.rank_dir("/job/runs/night/1", 2, 13)) == "/job/runs/night/1/attempt-2/rank-13"


def test_folders_of_the_torchrun_layout():
    """`<run id>_<random>/attempt_<from 0>/<rank>`."""
    layout = LAYOUTS["torchrun"]
    assert str(layout.run_dir(title="night", run_id="id {x}", random="abc")) == "id {x}_abc"
    assert str(layout.attempt_dir("/logs/1_abc", 1)) == "/logs/1_abc/attempt_0"
    assert str(layout.rank_dir("/logs/1_abc", 3, 13)) == "/logs/1_abc/attempt_2/13"


def test_layouts_are_those_of_the_job_schema():
    """The default is raylaunch's own."""
    assert tuple(LAYOUTS) == LOG_LAYOUTS
    assert Job().log_layout == "raylaunch"


def test_file_names_of_a_run_folder():
    """Scripts of users contain these names, so they do not change."""
    names = (run_layout.JOB, run_layout.PLAN, run_layout.EVENTS, run_layout.RESULT)
    assert names == ("job.yaml", "plan.json", "events.jsonl", "result.json")
    assert (run_layout.STDOUT, run_layout.STDERR, run_layout.ERROR) == ("stdout.log", "stderr.log", "error.json")
    assert tuple(run_layout.FILTERED.values()) == ("filtered_stdout.log", "filtered_stderr.log")
    assert run_layout.LOGS == {"stdout": "stdout.log", "stderr": "stderr.log"}
