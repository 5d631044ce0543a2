"""`raylaunch doctor` on this machine, without a cluster: its text, its JSON and its exit code."""

from __future__ import annotations

import json
import os

import pytest

from raylaunch.cli import main as command
from raylaunch.cli.doctor import examination
from raylaunch.cli.doctor.diagnosis import error, ok, warning
from raylaunch.cluster.session import discovery
from raylaunch.errors import ExitCode


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """No cluster, and no variables that name one."""
    monkeypatch.setattr(discovery, "signs", lambda *_: [])
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


def test_the_text(golden):
    """One line for each finding, and one for what to do."""
    findings = [
        ok("cluster", "the Ray cluster at 10.0.0.1:6379 has 2 nodes"),
        warning("DNS", "slow to find the name of its own address: 10.0.0.2 (5.0 s)", "mend its name server"),
        error("job", "`nnode` is not a setting\n --> job.yaml:1:1", "mend what is marked"),
    ]
    golden("doctor", examination.text(findings))


def test_nothing_is_wrong(tmp_path, capsys):
    """The exit code is 0, nothing was started, and nothing is left."""
    (tmp_path / "job.yaml").write_text("entrypoint: {script: train.py}\nshow: all\n")
    assert command.main(["doctor", "job.yaml"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "ok       cluster: there is none: this machine alone\n" in shown
    assert "ok       room: would start 1 worker on 1 node\n" in shown
    assert "no errors" in shown.splitlines()[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "job.yaml"}


@pytest.mark.parametrize("words", ["job.yaml nproc_per_node=1 show=all", "job.yaml --json nproc_per_node=1"])
def test_settings_after_the_job_file(tmp_path, capsys, words):
    """They override it, as for a run and for `--plan`; flags may be among them."""
    (tmp_path / "job.yaml").write_text("entrypoint: {script: train.py}\nnproc_per_node: lots\n")
    assert command.main(["doctor", *words.split()]) == ExitCode.OK
    assert "would start 1 worker on 1 node" in capsys.readouterr().out


def test_a_wrong_setting_after_the_job_file(tmp_path, capsys):
    (tmp_path / "job.yaml").write_text("entrypoint: {script: train.py}\n")
    assert command.main(["doctor", "job.yaml", "nnode=2"]) == ExitCode.JOB_FAILED
    assert "raylaunch job.yaml nnode=2" in capsys.readouterr().out


def test_a_wrong_job_file(tmp_path, capsys):
    """It is an error among others, with its place; the machine is looked at all the same."""
    (tmp_path / "job.yaml").write_text("entrypoint: {script: tran.py}\nenv: {DB_PASSWORD: hunter33}\nnnode: 2\n")
    assert command.main(["doctor", "--json", "job.yaml"]) == ExitCode.JOB_FAILED
    shown = capsys.readouterr().out
    findings = {each["check"]: each for each in json.loads(shown)["findings"]}
    assert findings["job"]["severity"] == "error"
    assert "--> job.yaml:3:1" in findings["job"]["text"]
    assert findings["versions"]["severity"] == "ok"
    assert "hunter33" not in shown


def test_a_cluster_that_is_not_there(monkeypatch, capsys):
    """This machine is looked at all the same."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert command.main(["doctor"]) == ExitCode.JOB_FAILED
    shown = capsys.readouterr().out
    assert "error    cluster: no Ray cluster at 127.0.0.1:1" in shown
    assert "ok       versions: " in shown
