"""What is refused before anything is started."""

from __future__ import annotations

import os
import tempfile

import pytest

from raylaunch.cluster import run
from raylaunch.cluster.session.local_session import LocalSession
from raylaunch.core.job.job import Job
from raylaunch.errors import ConfigError


def refuse(path: object) -> None:
    run.refuse_durable(Job(durable=str(path)), LocalSession())


def test_a_durable_folder_that_can_be_used(tmp_path):
    refuse(tmp_path)
    refuse(tmp_path / "new" / "checkpoints")
    run.refuse_durable(Job(), LocalSession())
    assert os.listdir(tmp_path) == []


def test_a_durable_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "new"):
        with pytest.raises(ConfigError, match=f"checkpoints cannot be written to {path}: {tmp_path}/file is no folder"):
            refuse(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_durable_folder_in_which_this_user_cannot_write():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        pid = os.fork()
        if not pid:
            found = ""
            try:
                os.setuid(12345)
                refuse(f"{folder}/new")
            except ConfigError as error:
                found = str(error)
            os._exit(0 if f"{folder} cannot be written" in found else 1)
        assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("path", ["/proc/new", "/proc"])
def test_a_durable_folder_that_nobody_can_write(path):
    """Not even root, whom permissions do not stop."""
    with pytest.raises(ConfigError, match=f"checkpoints cannot be written to {path}: /proc cannot be written: "):
        refuse(path)
