"""What a report says, as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

from raylaunch.cli.html_report.report_facts import MOST_FIRST, MOST_LAST, as_json, coarse, ends_of, parts, settings
from raylaunch.core.history.step_rates import StepRate
from raylaunch.core.job.job import Entrypoint, Job
from tests.cli.html_report.reports import (
    done,
    facts,
    failed_run,
    many_nodes,
    replay_folder,
    restarted_often,
    write_journal,
)

REFERENCE = Path(__file__).parents[3] / "docs" / "reference.md"


def rate(attempt: int, begin: float, per_second: float = 2.0) -> StepRate:
    return StepRate(attempt=attempt, begin=begin, end=begin + 1, per_second=per_second)


def test_json_has_the_documented_keys(tmp_path):
    """Those of docs/reference.md, no more and no fewer, also for a run to which nothing has happened."""
    section = REFERENCE.read_text(encoding="utf-8").partition("## `raylaunch report`")[2].partition("\n## ")[0]
    documented = {
        key for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for key in re.findall(r"`(\w+)`", row)
    }
    assert as_json(facts(replay_folder(tmp_path / "a", "chaos-on-hosts"))).keys() == documented
    assert as_json(facts(write_journal(tmp_path / "b", []))).keys() == documented


def test_the_facts_of_a_failed_run(tmp_path):
    """The numbers of the page."""
    entries = failed_run(tail="last line", exit_code=1)
    found = json.loads(json.dumps(as_json(facts(write_journal(tmp_path, entries), done(1, "rank 1 failed")))))
    assert (found["state"], found["exit_code"], found["outcome"]["kind"]) == ("failed", 1, "failed")
    assert found["seconds_per_state"] == {
        "train": 5.0,
        "start": 4.0,
        **dict.fromkeys(("recover", "save", "wait", "lost"), 0.0),
    }
    assert (found["goodput"], found["steps"], found["last_step"]) == (5 / 9, 41, 40)
    assert (found["steps_per_second"], found["restart_count"], found["restart_parts"]) == (10.0, 0, {})
    assert (found["root_cause"]["rank"], found["root_cause"]["tail"]) == (1, "last line")
    assert found["job"] == {"entrypoint.script": "train.py"}
    assert found["job_defaults"]["ray.address"] == "auto"


def test_an_exit_code_that_no_failure_stands_for(tmp_path):
    """As where the cluster failed after a worker had: the failure is not the root cause."""
    found = facts(write_journal(tmp_path, failed_run()), done(3, "the head is gone"))
    assert as_json(found)["root_cause"] is None


def test_long_and_wide_runs(tmp_path):
    """Lists end somewhere; numbers are of all."""
    long = as_json(facts(write_journal(tmp_path / "long", restarted_often(300))))
    assert (long["attempt_count"], len(long["attempts"])) == (301, MOST_FIRST + MOST_LAST)
    assert long["interruptions"] == {"failure": 300}
    assert long["restart_parts"]["detect"]["median"] > 0.5
    wide = as_json(facts(write_journal(tmp_path / "wide", many_nodes(300))))
    assert (wide["node_count"], len(wide["nodes"]), wide["attempts"][0]["nodes"]) == (300, 40, 300)
    assert len(json.dumps(long)) + len(json.dumps(wide)) < 500_000


def test_a_run_without_a_result_in_its_journal(tmp_path):
    """The reason is that of the journal, if nothing else is known."""
    assert facts(replay_folder(tmp_path, "chaos-on-hosts")).result.why == "the run did not come to an end"


def test_the_ends_of_lists():
    """All of a short one."""
    assert ends_of([1, 2, 3], 2, 2) == ([1, 2, 3], [])
    assert ends_of([1, 2, 3, 4, 5], 2, 2) == ([1, 2], [4, 5])
    assert parts([]) == {}


def test_rates_are_made_coarse():
    """Neighbours of an attempt become one, with their mean."""
    assert coarse([rate(1, 0), rate(1, 1, 4.0), rate(1, 2), rate(2, 3)], 3) == [
        StepRate(attempt=1, begin=0, end=2, per_second=3.0),
        rate(1, 2),
        rate(2, 3),
    ]
    assert len(coarse([rate(1, at) for at in range(1001)], 100)) == 63
    assert len(coarse([rate(number, number) for number in range(1000)], 100)) == 91


def test_settings():
    """Those that were given, and the others."""
    given, defaults = settings(Job(entrypoint=Entrypoint(script="a.py"), nnodes=2))
    assert given == {"entrypoint.script": "a.py", "nnodes": 2}
    assert defaults["max_restarts"] == 0
    given, defaults = settings(Job(entrypoint=Entrypoint(script="a.py"), show="raw", exclude_after=0))
    assert given == {"entrypoint.script": "a.py"}
    assert (defaults["show"], defaults["exclude_after"]) == ("raw", 0)
    assert settings(Job(show="0,1", exclude_after=1))[0] == {"show": "0,1", "exclude_after": 1}
