"""The names of a run folder are an API."""

from __future__ import annotations

from raylaunch.core import contract


def test_where_a_workers_files_are():
    """By attempt, then by global rank."""
    assert str(contract.rank_dir("/job/runs/night/1", 2, 13)) == "/job/runs/night/1/attempt-2/rank-13"


def test_the_files_of_a_run_folder():
    """These names are in people's scripts: they do not change."""
    names = (contract.JOB, contract.PLAN, contract.EVENTS, contract.RESULT)
    assert names == ("job.yaml", "plan.json", "events.jsonl", "result.json")
    assert (contract.STDOUT, contract.STDERR, contract.ERROR) == ("stdout.log", "stderr.log", "error.json")
