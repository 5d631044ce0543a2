"""The folder of checkpoints: which is the newest, which stay, and what is passed over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raylaunch.worker.state.checkpoints.durable_folder import METADATA, DurableFolder


@pytest.fixture
def folder(tmp_path):
    return DurableFolder(str(tmp_path / "checkpoints"), 600.0, 2)


def publish(folder: DurableFolder, steps: int, text: str = "") -> str:
    """Write a checkpoint as far as the folder knows it."""
    path = Path(folder.incomplete(steps, 0xAB))
    path.mkdir(parents=True)
    (path / METADATA).write_text(text)
    return folder.complete(str(path), steps)


def names(folder: DurableFolder) -> list[str]:
    return sorted(os.listdir(folder.path))


def test_without_a_name_there_is_none(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert DurableFolder.of(None, {}) is None
    assert DurableFolder.of(None, {"RAYLAUNCH_DURABLE": ""}) is None
    of_job = {"RAYLAUNCH_DURABLE": "a", "RAYLAUNCH_DURABLE_EVERY": "2.5", "RAYLAUNCH_DURABLE_KEEP": "7"}
    assert DurableFolder.of(None, of_job) == DurableFolder(str(tmp_path / "a"), 2.5, 7)
    assert DurableFolder.of("/b", of_job) == DurableFolder("/b", 2.5, 7)
    assert DurableFolder.of("/b", {}) == DurableFolder("/b", 600.0, 3)


def test_the_newest_complete_one_is_found_and_incomplete_ones_are_named(folder, capsys):
    assert folder.newest() == ("", [])
    publish(folder, 9)
    path = publish(folder, 10)
    for name in ("step-11", "step-12.incomplete-1", "step-3.incomplete-1", "other", "step-x"):
        (Path(folder.path) / name).mkdir()
    assert folder.newest() == (path, ["step-12.incomplete-1", "step-11"])
    assert folder.newest_told() == path
    told = "these are incomplete: step-12.incomplete-1, step-11; `State` restores step-10"
    assert told in capsys.readouterr().err


def test_the_last_ones_stay_and_what_others_have_left_incomplete_goes(folder):
    """What is newer than this one stays: it may be that somebody went back to an older one on purpose."""
    publish(folder, 100)
    os.mkdir(folder.incomplete(4, 1))
    os.mkdir(folder.incomplete(200, 1))
    for steps in (5, 6, 7):
        publish(folder, steps)
    assert names(folder) == ["step-100", "step-200.incomplete-1", "step-6", "step-7"]


def test_one_after_as_many_steps_is_replaced(folder):
    publish(folder, 5, "old")
    path = publish(folder, 5, "new")
    with open(f"{path}/{METADATA}") as file:
        assert file.read() == "new"
    assert names(folder) == ["step-5"]
