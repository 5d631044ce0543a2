"""The registry of runs: who is listed, for how long, and that it never ends a run."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from raylaunch.cluster.driver import run_registry
from raylaunch.cluster.driver.run_registry import DriverProcess, RegisteredRun
from raylaunch.errors import ClusterError
from tests.cli.runs.made_runs import NOBODY


def a_run(folder: Path | str = "", **facts: object) -> RegisteredRun:
    known = {"id": "1", "name": "x", "folder": str(folder), "cluster": "", "driver": DriverProcess.this()}
    return RegisteredRun(**{**known, "began": "2026-01-01T00:00:00+00:00", **facts})


@pytest.fixture
def environ(tmp_path):
    (tmp_path / "state").mkdir()
    return {"XDG_STATE_HOME": str(tmp_path / "state")}


def test_a_run_is_listed(environ, tmp_path):
    """While it lasts, and afterwards with its exit code. Only the user can read the files."""
    registry = run_registry.folder(environ)
    run = a_run(tmp_path, user="ann")
    with run_registry.entered(run, environ, pytest.fail) as entry:
        wait_for_files(registry, 1)
        assert run_registry.runs(registry) == [run]
        (path,) = registry.iterdir()
        modes = [stat.S_IMODE(each.stat().st_mode) for each in (registry.parent, registry, path)]
        assert modes == [0o700, 0o700, 0o600]
        entry.exit_code = 0
    (found,) = run_registry.runs(registry)
    assert replace(found, ended="", exit_code=None) == run
    assert (found.exit_code, found.ended > run.began) == (0, True)


def test_the_next_driver_of_a_run_takes_over_its_entry(environ, tmp_path):
    """So there is never none, and never a second one; the last driver does not say that the run has ended."""
    registry = run_registry.folder(environ)
    first = run_registry.RegistryEntry(a_run(tmp_path, token="x"), environ, pytest.fail)
    first.add()
    next_run = a_run(tmp_path, token="x", driver=NOBODY)
    second = run_registry.RegistryEntry(next_run, environ, pytest.fail)
    second.add()
    assert run_registry.runs(registry) == [next_run]
    first.end()
    assert run_registry.runs(registry) == [next_run]
    second.end()
    assert [run.ended != "" for run in run_registry.runs(registry)] == [True]


def wait_for_files(registry: Path, count: int) -> None:
    while not registry.exists() or sum(path.name[0] != "." for path in registry.iterdir()) < count:
        os.sched_yield()


@pytest.mark.parametrize(("error", "code"), [(ClusterError("gone"), 3), (ValueError("a bug"), 4)])
def test_a_run_that_raises(environ, tmp_path, error, code):
    """Its exit code is that of the error."""
    with pytest.raises(type(error)), run_registry.entered(a_run(tmp_path), environ, pytest.fail):
        raise error
    (found,) = run_registry.runs(run_registry.folder(environ))
    assert found.exit_code == code


def test_a_run_without_a_folder(environ):
    """It is listed while it lasts."""
    registry = run_registry.folder(environ)
    with run_registry.entered(a_run(), environ, pytest.fail):
        wait_for_files(registry, 1)
        assert len(run_registry.runs(registry)) == 1
    assert run_registry.runs(registry) == []


def test_a_registry_that_cannot_be_written(environ, tmp_path):
    """The run goes on, after a message."""
    (tmp_path / "state" / "raylaunch").touch()
    messages: list[str] = []
    with run_registry.entered(a_run(tmp_path), environ, messages.append):
        pass
    registry = run_registry.folder(environ)
    (said,) = messages
    assert said.startswith(f"`raylaunch ps` will not list this run: {registry} cannot be written: Not a directory; ")


def test_a_home_of_another_user(environ, tmp_path, monkeypatch):
    """Nothing is written there, since its owner could not remove it; and nothing there is believed."""
    registry = run_registry.folder(environ)
    with run_registry.entered(a_run(tmp_path), environ, pytest.fail):
        pass
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    messages: list[str] = []
    with run_registry.entered(a_run(tmp_path), environ, messages.append):
        pass
    assert "belongs to another user" in messages[0]
    assert run_registry.runs(registry) == []


def test_where_the_registry_is():
    """As the XDG base directory specification says: a relative path is ignored."""
    home = Path("~").expanduser()
    assert run_registry.folder({"XDG_STATE_HOME": "/state"}) == Path("/state/raylaunch/runs")
    for environ in ({}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "state"}):
        assert run_registry.folder(environ) == home / ".local/state/raylaunch/runs"


def test_old_entries_are_removed(environ, tmp_path, monkeypatch):
    """Those of ended runs beyond the newest ones, and those whose folder is gone; never a run that goes on."""
    monkeypatch.setattr(run_registry, "MOST_ENDED", 2)
    monkeypatch.setattr(run_registry, "MOST_ENTRIES", 4)
    gone = replace(DriverProcess.this(), started=-1)
    elsewhere = replace(gone, host="other", boot_id="other")
    entries = (  # the oldest first
        *(("elsewhere, too old", elsewhere, ""), ("going on", DriverProcess.this(), ""), ("elsewhere", elsewhere, "")),
        *(("ended 1", gone, "then"), ("killed", gone, ""), ("ended 2", elsewhere, "then"), ("no folder", gone, "")),
    )
    registry = run_registry.folder(environ)
    registry.mkdir(parents=True)
    for number, (name, driver, ended) in enumerate(entries):
        folder = tmp_path / ("none" if name == "no folder" else "")
        run = a_run(folder, name=name, driver=driver, ended=ended)
        (registry / f"1-{number}.json").write_text(json.dumps(asdict(run)))
    with run_registry.entered(a_run(tmp_path, name="this"), environ, pytest.fail):
        pass
    kept = ["ended 2", "killed", "elsewhere", "going on"]
    assert [run.name for run in run_registry.runs(registry)] == ["this", *kept]


def test_files_that_are_no_entries(environ):
    """Those of other versions are left out, and further fields of later ones do no harm."""
    registry = run_registry.folder(environ)
    registry.mkdir(parents=True)
    for number, text in enumerate(("", "[]", "3", "{}", '{"driver": 3}', '{"driver": {}, "signals": null}')):
        (registry / f"{number}.json").write_text(text)
    (registry / "later.json").write_text(json.dumps(asdict(a_run("/")) | {"new": 3}))
    (registry / "folder.json").mkdir()
    assert run_registry.runs(registry) == [a_run("/")]


def test_whether_a_driver_is_alive():
    """A pid that another process has now is not believed; of another machine nothing is known."""
    this = DriverProcess.this()
    assert this.is_alive is True
    assert replace(this, started=this.started - 1).is_alive is False
    assert replace(this, boot_id="before").is_alive is False
    assert replace(this, boot_id="other", host="other").is_alive is None
    assert replace(this, namespace="of a container").is_alive is None
