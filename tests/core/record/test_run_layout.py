"""The names in a run folder, which are public."""

from __future__ import annotations

import pytest

from raylaunch.core.job.job import LOG_LAYOUTS, Job
from raylaunch.core.record import run_layout
from raylaunch.core.record.run_layout import LAYOUTS, future_losses


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


UNPACKED = "/scratch/r/session_2026-01-02_03-04-05_678901_23/runtime_resources/working_dir_files/_ray_pkg_ab"


@pytest.mark.parametrize(
    ("run_dir", "cwd", "args", "unpacked", "warnings"),
    [
        ("/home/me/session_2026/runs/x/1", "/tmp/ray", ["--out", "/tmp/x", 3], False, []),
        ("", "/home/me", [], True, ["Ray will delete the folder in which"]),
        (f"{UNPACKED}/runs/x/1", UNPACKED, [], True, ["Ray will delete the run folder", "Ray will delete the folder"]),
        ("/runs/x/1", "/tmp/ray/session_latest", [], False, ["Ray will delete the folder in which the workers run"]),
        ("/runs/x/1", "/home/me", [f"--out={UNPACKED}"], False, ["an argument of the script names a folder that Ray"]),
    ],
)
def test_files_that_ray_will_delete(run_dir, cwd, args, unpacked, warnings):
    """Those in the folders of a Ray session, wherever `ray start --temp-dir` puts them."""
    found = [*future_losses(run_dir, cwd, args, unpacked=unpacked)]
    assert [text[: len(start)] for text, start in zip(found, warnings, strict=True)] == warnings
