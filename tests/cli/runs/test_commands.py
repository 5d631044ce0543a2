"""The commands on runs as a person types them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from raylaunch.cli import main
from raylaunch.cli.args import subcommands
from raylaunch.cli.runs.run_summary import RunSummary
from raylaunch.cluster import run
from raylaunch.cluster.local import local_machine
from raylaunch.core.history.run_status import NodeSummary
from raylaunch.errors import ExitCode
from tests.cli.runs.made_runs import NOBODY, dead, make_folder

REFERENCE = Path(__file__).parents[3] / "docs" / "reference.md"


@pytest.fixture
def runs(registry, tmp_path):
    """One run that goes on, one that was lost and one that has ended."""
    registry.add(make_folder(tmp_path / "runs" / "a" / "ended", "budget-spent", result=True))
    registry.add(make_folder(tmp_path / "runs" / "b" / "gone", "chaos-on-hosts", lines=27), driver=dead())
    registry.add(make_folder(tmp_path / "runs" / "b" / "going", "chaos-on-hosts", lines=27), driver=NOBODY)
    return registry


def printed(capsys, *arguments: str) -> str:
    assert main.main(arguments) == ExitCode.OK
    return capsys.readouterr().out


def ids(text: str) -> list[str]:
    return [line.split()[1] for line in text.splitlines()[1:] if not line[0].isdigit()]


def test_ps_lists_runs(runs, capsys):
    """Running ones, or all with `-a`, or the newest with `-n`."""
    assert ids(printed(capsys, "ps")) == ["going"]
    assert ids(printed(capsys, "ps", "-a")) == ["going", "gone", "ended"]
    assert printed(capsys, "ps", "-an", "2").endswith("1 more: `-n 0` lists all\n")
    assert ids(printed(capsys, "ps", "--all", "--last=0")) == ["going", "gone", "ended"]


def test_nothing_to_list(registry, capsys, monkeypatch):
    """It is said, and how to see more."""
    assert printed(capsys, "ps") == "no run is going on; `raylaunch ps -a` lists those that ended\n"
    assert printed(capsys, "ps", "-a") == "there is no run yet\n"
    monkeypatch.setattr(run, "find_cluster", lambda _: local_machine.NONE)
    assert printed(capsys, "ps", "--end") == "there are no idle agents of this user and machine\n"
    assert json.loads(printed(capsys, "ps", "--json")) == {"runs": []}


def test_status_of_a_run(runs, capsys):
    """The newest one, or the one that is named; `unknown` is said where nothing is known."""
    assert printed(capsys, "status").startswith("b going: running, 4 workers on 2 nodes\n")
    assert printed(capsys, "status", "gone").startswith("b gone: lost, ")
    assert printed(capsys, "status", "a").startswith("a ended: failed with exit code 1, 4 workers on 2 nodes\n")


def test_json_has_the_documented_keys(runs, capsys):
    """Those of docs/reference.md, no more and no fewer."""
    text = REFERENCE.read_text(encoding="utf-8").partition("## Commands on runs")[2].partition("\n## ")[0]
    of_run, of_nodes = text.partition("| key of a run |")[2].split("Each of `node_states`:")
    documented = [
        set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", part, re.MULTILINE))))
        for part in (of_run, of_nodes)
    ]
    listed = json.loads(printed(capsys, "ps", "--json"))
    (run,) = listed["runs"]
    shown = json.loads(printed(capsys, "status", "--json"))
    assert set(shown) == documented[0]
    assert set(run) == {field.name for field in fields(RunSummary)}
    assert set(shown["node_states"][0]) == documented[1] == {field.name for field in fields(NodeSummary)}
    assert shown["attempts"][0]["number"] == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("ps --jsn", "did you mean `--json`?"),
        ("status --end", "it is a flag of `raylaunch ps`"),
        ("status --xyz", "`raylaunch status --help` lists its flags"),
        ("status --nnodes 2", "`raylaunch status --help` lists its flags"),
        ("doctor --xyz", "`raylaunch doctor --help` lists its flags"),
        ("doctor --module train", "`raylaunch doctor --help` lists its flags"),
        ("doctor --standalone train.py", "settings go after a job file: `raylaunch doctor job.yaml ray.address=none`"),
        ("slurm --nproc_per_node=8", "settings go after a job file: `raylaunch slurm job.yaml nproc_per_node=VALUE`"),
        ("status a b", "`status` does not take `b`"),
        ("ps train", "`ps` does not take `train`"),
        ("ps -n", "expected one argument"),
        ("ps -n x", "`--last` must be a number, but is `x`"),
        ("ps -w --json", "`--json` and `--watch` exclude each other"),
        ("status -w", "`--watch` needs a terminal"),
        ("status nothing", "there is no run `nothing`"),
        ("--nnodes 2 ps", "`ps` is a command, before which no flags are written"),
    ],
)
def test_wrong_arguments(runs, capsys, arguments, said):
    """The error says what to write, and the exit code is 2."""
    assert main.main(arguments.split()) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


@pytest.mark.parametrize("command", subcommands.TABLE, ids=lambda command: command.name)
def test_help(registry, capsys, golden, command):
    """Each command has its own, whatever else is given."""
    golden(f"help_{command.name}", printed(capsys, command.name, "-h"))
    assert printed(capsys, command.name, "--help", "--wrong").startswith(f"usage: raylaunch {command.name}")


def test_a_watched_run_is_shown_until_it_ends(runs, capsys, monkeypatch):
    """The screen is cleared before each text, and lines are cut at its width."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    out = printed(capsys, "status", "-w", "ended")
    assert out.startswith("\x1b[H\x1b[2J\x1b[3Ja ended: failed wit\n")
    shown = []
    monkeypatch.setattr("time.sleep", lambda seconds: shown.append(seconds) or interrupted(len(shown)))
    assert printed(capsys, "ps", "-w").count("\x1b[H") == 2
    assert shown == [2.0, 2.0]


def interrupted(times: int) -> None:
    if times == 2:
        raise KeyboardInterrupt


def test_a_reader_that_has_seen_enough(runs, tmp_path):
    """`raylaunch ps -a | head -1` ends quietly."""
    program = (
        "import sys; sys.stdout.reconfigure(write_through=True)\n"
        "from raylaunch.cluster.control import cluster_registry; cluster_registry.runs = lambda _: []\n"
        "from raylaunch.cli.main import main; exit(main())"
    )
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", program, "ps", "-a"]
    done = subprocess.run(command, env=os.environ, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
