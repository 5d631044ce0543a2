"""The folder of checkpoints: which is the newest, which stay, and what is passed over."""

from __future__ import annotations

import os
import socket
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


def test_checkpoints_are_known_by_their_names(folder):
    """The newest is the first, and a number is written as `State` writes it."""
    assert folder.checkpoints() == []
    publish(folder, 9)
    publish(folder, 10**30)
    for name in ("step-11", "step-12.incomplete-1", "step-3.incomplete-1", "other", "step-x", "step--9", "step-013"):
        (Path(folder.path) / name).mkdir()
    (Path(folder.path) / "step-2").touch()
    found = [("step-12.incomplete-1", False), ("step-11", False), ("step-9", True), ("step-3.incomplete-1", False)]
    assert folder.checkpoints() == [(f"step-{10**30}", True), *found, ("step-2", False)]


def test_the_last_ones_stay_and_what_others_have_left_incomplete_goes(folder):
    """What is newer than this one stays: it may be that somebody went back to an older one on purpose."""
    publish(folder, 100)
    os.mkdir(folder.incomplete(4, 1))
    os.mkdir(folder.incomplete(200, 1))
    for steps in (5, 6, 7):
        publish(folder, steps)
    assert names(folder) == ["step-100", "step-200.incomplete-1", "step-6", "step-7"]


def test_what_state_has_not_written_stays(folder):
    """Other programs name their checkpoints like this, too. Of a link, only the link goes."""
    for name in ("step-3", "step-0004", "other"):
        os.makedirs(f"{folder.path}/{name}")
    moved = Path(folder.path).parent / "moved"
    moved.mkdir()
    (moved / METADATA).touch()
    os.symlink(moved, f"{folder.path}/step-1")
    for steps in (5, 6, 7):
        publish(folder, steps)
    assert names(folder) == ["other", "step-0004", "step-3", "step-6", "step-7"]
    assert (moved / METADATA).exists()


def test_a_file_that_has_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    for path in ("file", "file/checkpoints"):
        with pytest.raises(NotADirectoryError, match=f"{tmp_path}/file is no folder"):
            DurableFolder(str(tmp_path / path), 600.0, 2).check()
    DurableFolder(str(tmp_path / "new" / "checkpoints"), 600.0, 2).check()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_a_folder_is_not_made_where_a_stranger_says(tmp_path):
    (tmp_path / "stranger").mkdir()
    os.chown(tmp_path / "stranger", 12345, 12345)
    tmp_path.chmod(0o1777)
    with pytest.raises(PermissionError, match="stranger belongs to another user"):
        DurableFolder(str(tmp_path / "stranger" / "checkpoints"), 600.0, 2).check()


class Owner:
    pass


def test_another_run_that_uses_the_folder_is_named(folder, monkeypatch, capsys):
    """Not another process of the same run, of which a worker stays when its rank changes."""
    owners = [Owner(), Owner(), Owner()]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    folder.claim(owners[0])
    folder.claim(owners[1])
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    folder.claim(owners[1])
    told = f"another run, first on {socket.gethostname()}, writes checkpoints to {folder.path} too"
    assert told in capsys.readouterr().err
    owners.clear()
    folder.claim(owner := Owner())
    assert capsys.readouterr().err == ""
    del owner


def test_one_after_as_many_steps_is_replaced(folder):
    publish(folder, 5, "old")
    path = publish(folder, 5, "new")
    with open(f"{path}/{METADATA}") as file:
        assert file.read() == "new"
    assert names(folder) == ["step-5"]
