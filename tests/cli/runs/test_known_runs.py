"""Which run a person means by an id, a name or a folder."""

from __future__ import annotations

import os

import pytest

from raylaunch.cli.runs import known_runs
from raylaunch.cluster.driver import run_registry
from raylaunch.errors import ConfigError, ExitCode
from tests.cli.runs.made_runs import make_folder


@pytest.fixture
def three(registry, tmp_path):
    """Two runs of `charlm` and one of `bert`, the newest."""
    for name, run_id in (("charlm", "2026-01-01T10"), ("charlm", "2026-01-01T11"), ("bert", "2026-02-01T10")):
        registry.add(make_folder(tmp_path / "runs" / name / run_id, "budget-spent"))
    return registry


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (None, "2026-02-01T10"),
        ("charlm", "2026-01-01T11"),
        ("2026-01-01T10", "2026-01-01T10"),
        ("2026-02", "2026-02-01T10"),
        ("charlm/2026-01-01T10", "2026-01-01T10"),
        ("runs/charlm/2026-01-01T10", "2026-01-01T10"),
        ("runs/charlm/2026-01-01T10/", "2026-01-01T10"),
    ],
)
def test_a_run_is_found(three, text, meant):
    """By id, beginning of an id, name, name and id, or folder; without a word it is the newest."""
    assert known_runs.find(text, three.environ).entry.id == meant


@pytest.mark.parametrize(
    ("text", "said", "hint"),
    [
        ("2026-01", "`2026-01` may be one of 2 runs", "`charlm/2026-01-01T11`, `charlm/2026-01-01T10`"),
        ("2026-01-01", "`2026-01-01` may be one of 2 runs", "`charlm/2026-01-01T11`, `charlm/2026-01-01T10`"),
        ("charml", "there is no run `charml`", "there are `charlm/2026-01-01T11`, `charlm/2026-01-01T10`"),
        ("xyz", "there is no run `xyz`", "`bert/2026-02-01T10`"),
        ("", "there is no run ``", "`bert/2026-02-01T10`"),
        ("a\0b", "there is no run", "`bert/2026-02-01T10`"),
        ("runs/none", "there is no run `runs/none`", "`bert/2026-02-01T10`"),
        ("runs/bert", "there is no run `runs/bert`", "`bert/2026-02-01T10`"),
    ],
)
def test_a_run_that_is_not_found(three, text, said, hint):
    """The error names those that may be meant."""
    with pytest.raises(ConfigError) as caught:
        known_runs.find(text, three.environ)
    assert said in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == ExitCode.USAGE


def test_runs_of_the_working_folder_are_meant_first(registry, tmp_path, monkeypatch):
    """Without a word it is the newest of them; who changes a run means one that goes on, and only one."""
    for project, run_id, how in (("a", "1", {}), ("a", "2", {"ended": "x", "exit_code": 0}), ("b", "3", {})):
        registry.add(make_folder(tmp_path / project / "runs" / "train" / run_id, "budget-spent"), **how)
    for folder, newest, going_on in ((".", "3", None), ("a", "2", "1"), ("b", "3", "3")):
        monkeypatch.chdir(tmp_path / folder)
        assert known_runs.find(None, registry.environ).entry.id == newest
        if going_on is not None:
            assert known_runs.find_to_change(None, registry.environ).entry.id == going_on
    monkeypatch.chdir(tmp_path / "a" / "runs" / "train" / "2")
    assert known_runs.find(None, registry.environ).entry.id == "2"
    with pytest.raises(ConfigError, match="2 runs go on: which one is meant") as caught:
        known_runs.find_to_change(None, registry.environ)
    assert "write `train/3`, `train/1`" in caught.value.hint
    assert known_runs.find_to_change("1", registry.environ).entry.id == "1"


def test_who_changes_a_run_means_one_that_goes_on(registry, tmp_path):
    """Also where the ids of others that have ended begin in the same way."""
    for run_id, how in (
        ("2026-1", {"ended": "x", "exit_code": 0}),
        ("2026-2", {}),
        ("2026-3", {"ended": "x", "exit_code": 1}),
    ):
        registry.add(make_folder(tmp_path / "runs" / "train" / run_id, "budget-spent"), **how)
    with pytest.raises(ConfigError, match="may be one of 3 runs"):
        known_runs.find("2026", registry.environ)
    assert known_runs.find_to_change("2026", registry.environ).entry.id == "2026-2"


def test_no_run_yet(registry):
    """It is said how another one is named."""
    with pytest.raises(ConfigError, match="there is no run yet"):
        known_runs.find(None, registry.environ)
    with pytest.raises(ConfigError, match="nor any other run"):
        known_runs.find("charlm", registry.environ)


def test_a_folder_that_the_registry_does_not_have(registry, tmp_path):
    """Its name is in its journal; without a journal it is that of the folder above."""
    found = known_runs.find(str(make_folder(tmp_path / "copied" / "it", "budget-spent")), registry.environ).entry
    assert (found.name, found.id, found.driver, found.began[:4]) == ("train", "it", None, "2026")
    (tmp_path / "copied" / "new").mkdir()
    (tmp_path / "copied" / "new" / "job.yaml").touch()
    assert known_runs.find("copied/new", registry.environ).entry.name == "copied"


def test_a_folder_of_another_user(registry, tmp_path, monkeypatch):
    """It cannot be read."""
    make_folder(tmp_path / "theirs")

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(ConfigError, match="theirs cannot be read: Permission denied"):
        known_runs.find("theirs", registry.environ)


def test_a_folder_that_is_removed_is_not_listed(three, tmp_path):
    """Nor is an entry that is none."""
    (tmp_path / "runs" / "bert" / "2026-02-01T10" / "events.jsonl").unlink()
    (tmp_path / "runs" / "bert" / "2026-02-01T10").rmdir()
    (three.folder / "x.json").write_text("{")
    three.add(tmp_path / "runs" / "bert" / "none", exit_code=0, ended="2026-01-01T00:00:00+00:00")
    bert = [run for run in run_registry.runs(three.folder) if run.name == "bert"]
    assert len(bert) == 2
    assert [run for run in known_runs.all_runs(three.environ) if run.entry.id == "none"] == []


def test_no_home(registry, monkeypatch):
    """It is said what to set."""

    def unknown(*_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.expanduser", unknown)
    with pytest.raises(ConfigError, match="Could not determine home directory"):
        known_runs.all_runs({})
