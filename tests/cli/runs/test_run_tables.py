"""The texts of `ps` and `status`, and what they are made of."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta

import pytest

from raylaunch.cli.runs import known_runs, run_tables
from raylaunch.cli.runs.run_summary import summary
from raylaunch.core.machine.measured import CommitRate, NodeMemory
from raylaunch.core.placement.devices import GpuUse
from tests.cli.runs.made_runs import BEGAN, NOBODY, dead, make_folder

NOW = BEGAN + timedelta(hours=3)


@pytest.fixture
def several(registry, tmp_path):
    """Runs in all states."""
    runs = tmp_path / "runs"
    registry.add(make_folder(runs / "charlm" / "first", "budget-spent", result=True), driver=NOBODY)
    registry.add(make_folder(runs / "charlm" / "stopped", "interrupted-twice"), driver=NOBODY)
    registry.add(make_folder(runs / "bert" / "killed", "drained-then-joined", lines=9), driver=dead())
    registry.add(
        make_folder(runs / "bert" / "large", "chaos-on-hosts", lines=27), driver=NOBODY, cluster="10.0.0.1:6379"
    )
    registry.add(make_folder(runs / "bert" / "gathering", "drained-then-joined", lines=3), driver=NOBODY)
    registry.add("", driver=NOBODY)
    (runs / "bad\x1b[2J" / "name").mkdir(parents=True)
    registry.add(runs / "bad\x1b[2J" / "name", driver=replace(NOBODY, host="host-2"))
    return registry


def test_ps(several, tmp_path, golden):
    """One line for each run; foreign names cannot move the cursor."""
    runs = [summary(run, NOW) for run in known_runs.all_runs(several.environ)]
    assert [run.state for run in runs] == ["unknown", "unknown", "gathering", "running", "lost", "stopped", "failed"]
    golden("ps", run_tables.table(runs, NOW, "vm").replace(str(tmp_path), "/home/me"))


@pytest.mark.parametrize("run_id", ["first", "large", "killed", "gathering"])
def test_status(several, tmp_path, golden, run_id):
    """What a run does and why, its nodes and its attempts."""
    run = known_runs.find(run_id, several.environ)
    text = run_tables.page(summary(run, NOW), run.status())
    golden(f"status_{run_id}", text.replace(str(tmp_path), "/home/me"))


def test_takeovers_are_counted(several, tmp_path):
    """Beside the driver, which is the last of them."""
    shown = replace(summary(known_runs.find("large", several.environ), NOW), takeovers=2)
    assert re.search(r"driver +process \d+ on \S+, after 2 takeovers", run_tables.page(shown, None))


def test_what_nodes_hold_for_state(several):
    """Its size for each node, the newest commits, and how often there is one and why."""
    run = known_runs.find("large", several.environ)
    rate = CommitRate(every=4, commit_seconds=0.0067, step_seconds=0.0828)
    shown = replace(summary(run, NOW), committed_step=840, copied_step=820, commit_rate=rate)
    status = run.status()
    memory = NodeMemory(node=status.nodes[0].name, own=200 << 20, copies=0, files=3 << 20)
    nodes = (replace(status.nodes[0], memory=memory), *status.nodes[1:])
    text = run_tables.page(shown, replace(status, nodes=nodes))
    said = "  state      committed after step 840, copied to other hosts after step 820; every 4 steps, "
    assert f"{said}since a commit takes 6.7 ms and a step 82.8 ms\n" in text
    rows = text.partition("NODE ")[2].splitlines()
    assert [row.split()[-5:] for row in rows[1:2]] == [["200", "MiB", "3", "MiB", "-"]]
    assert [row.split()[-3:] for row in (rows[0], rows[2])] == [["COMMITS", "FILES", "COPIES"], ["-", "-", "-"]]


def test_how_much_of_their_gpus_ranks_use(several):
    """After the nodes, for each rank. Nodes that hold nothing for `State` have no columns for it."""
    run = known_runs.find("large", several.environ)
    shown = summary(run, NOW)
    status = run.status()
    uses = (
        GpuUse(rank=1, gpu="GPU-a", used=61 << 30, total=80 << 30, busy=90),
        GpuUse(rank=0, gpu="3", used=1 << 29, total=80 << 30),
    )
    memory = NodeMemory(node=status.nodes[0].name, own=0, copies=0, gpus=uses)
    nodes = (replace(status.nodes[0], memory=memory), *status.nodes[1:])
    text = run_tables.page(shown, replace(status, nodes=nodes))
    rows = text.partition("RANK ")[2].splitlines()
    assert [row.split() for row in rows[:3]] == [
        ["GPU", "MEMORY", "BUSY"],
        ["0", "3", "0.5", "of", "80.0", "GiB", "-"],
        ["1", "GPU-a", "61.0", "of", "80.0", "GiB", "90", "%"],
    ]
    assert "COMMITS" not in text
    uses = tuple(replace(uses[0], rank=rank) for rank in range(70))
    assert run_tables.gpu_table(uses).splitlines()[-1] == "... 6 more GPUs"


def test_a_run_with_very_many_attempts(several):
    """The last ones are shown, and the others are counted."""
    run = known_runs.find(str(make_folder(several.folder / "x" / "y", "chaos-on-hosts")), several.environ)
    text = run_tables.page(summary(run, NOW), run.status())
    assert "26 earlier attempts: see events.jsonl" in text
    assert "\n38 " in text


def test_what_the_driver_noted_at_its_end(several, tmp_path):
    """A run that ended before it had a result has the exit code that its driver noted."""
    folder = tmp_path / "runs" / "bert" / "refused"
    folder.mkdir()
    several.add(folder, ended=BEGAN.isoformat(), exit_code=3)
    found = summary(known_runs.find("refused", several.environ), NOW)
    assert (found.state, found.exit_code, found.why) == ("failed", 3, "it ended before it had a result")


def test_times_go_on_while_a_run_trains(several):
    """A run that trains has trained until now; one that ended took as long as its journal says."""
    trains = summary(known_runs.find("large", several.environ), NOW)
    later = summary(known_runs.find("large", several.environ), NOW + timedelta(seconds=100))
    assert later.seconds - trains.seconds == 100.0
    assert later.training_seconds - trains.training_seconds == pytest.approx(100.0)
    ended = summary(known_runs.find("first", several.environ), NOW)
    assert ended.seconds < 100
