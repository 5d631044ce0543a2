"""The working folder of a process, and its end."""

from __future__ import annotations

import os

import pytest

from raylaunch.node.linux import working_folder


def test_a_working_folder_that_was_replaced(tmp_path, monkeypatch):
    """As Ray does where two raylets of one session unpack the files of a job."""
    folder = tmp_path / "files"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        working_folder.current()
    folder.mkdir()
    (folder / "train.py").touch()
    assert working_folder.current() == str(folder)
    assert os.listdir() == ["train.py"]
