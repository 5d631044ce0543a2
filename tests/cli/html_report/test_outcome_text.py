"""The first lines of a report."""

from __future__ import annotations

import pytest

from raylaunch.cli.html_report.outcome_text import OutcomeKind, RunEnd
from raylaunch.errors import ExitCode
from tests.cli.html_report.reports import done, facts, failed_run, replay_folder, write_journal


@pytest.mark.parametrize(
    ("end", "kind", "title"),
    [
        (done(ExitCode.OK, "all 4 workers finished"), OutcomeKind.SUCCEEDED, "The run succeeded"),
        (done(143, "stopped by SIGTERM"), OutcomeKind.STOPPED, "The run was stopped by SIGTERM"),
        (done(ExitCode.INTERRUPTED), OutcomeKind.STOPPED, "The run was stopped by SIGINT"),
        (done(ExitCode.RESUMABLE, "its time is over"), OutcomeKind.STOPPED, "The run was stopped in time"),
        (done(ExitCode.POINTLESS), OutcomeKind.FAILED, "The run failed"),
        (
            done(ExitCode.UNAVAILABLE, "there is no torch"),
            OutcomeKind.UNAVAILABLE,
            "The run could not go on: the cluster lacks what it needs",
        ),
        (done(ExitCode.INTERNAL), OutcomeKind.FAILED, "The run failed"),
        (
            RunEnd(state="running", exit_code=None, why="all nodes run", is_alive=True),
            OutcomeKind.GOES_ON,
            "The run goes on: starting, attempt 38 of 6 workers on 3 nodes",
        ),
        (
            RunEnd(state="running", exit_code=None, why="", is_alive=None),
            OutcomeKind.UNFINISHED,
            "The run has no result: it was starting, attempt 38 of 6 workers on 3 nodes",
        ),
        (
            RunEnd(state="lost", exit_code=None, why="", is_alive=False),
            OutcomeKind.UNFINISHED,
            "The run has no result: it was starting, attempt 38 of 6 workers on 3 nodes",
        ),
    ],
)
def test_titles(tmp_path, end, kind, title):
    """What became of a run, whether or not its journal tells."""
    found = facts(replay_folder(tmp_path, "chaos-on-hosts"), end).outcome
    assert (found.kind, found.title) == (kind, title)


def test_what_a_run_waits_for(tmp_path):
    """Or why it does what it does; and whether its driver is known to be gone."""
    folder = replay_folder(tmp_path, "chaos-on-hosts")
    going = RunEnd(state="running", exit_code=None, why="", is_alive=True)
    assert facts(folder, going).outcome.why.startswith("It waits for ")
    gone = RunEnd(state="lost", exit_code=None, why="", is_alive=False)
    assert facts(folder, gone).outcome.why.startswith("The driver of the run is gone")


def test_hints_and_reasons_of_a_failure(tmp_path):
    """They are sentences."""
    entries = failed_run(tail="OSError: No space left on device", exit_code=1)
    why = entries[-1].actions[1].why
    found = facts(write_journal(tmp_path, entries), done(1, why)).outcome
    assert found.title == "The run failed: rank 1 exited with code 1"
    assert found.why == "It was not restarted: no restarts were asked for."
    assert found.next == (
        "A disk of node-1 is full: `df -h` there, /tmp and /dev/shm included.",
        "`raylaunch logs run-1 --failed` prints what this rank has written.",
    )
