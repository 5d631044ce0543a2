"""The names of a run folder are an API."""

from __future__ import annotations

from raylaunch.core import contract
from raylaunch.core.contract import LAYOUTS
from raylaunch.core.job import LOG_LAYOUTS, Job


def test_where_a_workers_files_are():
    """By attempt, then by global rank."""
    layout = LAYOUTS["raylaunch"]
    assert str(layout.run_dir(title="night", run_id="1", random="abc")) == "night/1"
    assert str(layout.attempt_dir("/job/runs/night/1", 2)) == "/job/runs/night/1/attempt-2"
    assert str(layout.rank_dir("/job/runs/night/1", 2, 13)) == "/job/runs/night/1/attempt-2/rank-13"


def test_where_torchrun_would_put_them():
    """`<run id>_<random>/attempt_<from 0>/<rank>`."""
    layout = LAYOUTS["torchrun"]
    assert str(layout.run_dir(title="night", run_id="id {x}", random="abc")) == "id {x}_abc"
    assert str(layout.attempt_dir("/logs/1_abc", 1)) == "/logs/1_abc/attempt_0"
    assert str(layout.rank_dir("/logs/1_abc", 3, 13)) == "/logs/1_abc/attempt_2/13"


def test_every_layout_of_a_job_is_known():
    """And no other; the default is ours."""
    assert tuple(LAYOUTS) == LOG_LAYOUTS
    assert Job().log_layout == "raylaunch"


def test_the_files_of_a_run_folder():
    """These names are in people's scripts: they do not change."""
    names = (contract.JOB, contract.PLAN, contract.EVENTS, contract.RESULT)
    assert names == ("job.yaml", "plan.json", "events.jsonl", "result.json")
    assert (contract.STDOUT, contract.STDERR, contract.ERROR) == ("stdout.log", "stderr.log", "error.json")
    assert tuple(contract.FILTERED.values()) == ("filtered_stdout.log", "filtered_stderr.log")
    assert contract.LOGS == {"stdout": "stdout.log", "stderr": "stderr.log"}
