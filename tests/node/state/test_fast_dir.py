"""The folder for files in memory: who removes it, and who must not."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.node.linux import scratch
from raylaunch.node.state import fast_dir
from raylaunch.node.state.fast_dir import FastDir, FilesOwner
from raylaunch.node.state.fd_store_client import FdStoreClient
from raylaunch.node.state.state_memory import StateMemory
from raylaunch.worker.heartbeats.shared_page import SharedPage
from tests.node.harness import until
from tests.node.state.test_state_memory import children, killed, no_zombies, wait_for_its_end

__all__ = ["no_zombies"]


@pytest.fixture
def folder() -> Iterator[FastDir]:
    found = FastDir()
    found.create()
    yield found
    found.remove()
    assert not os.path.exists(found.root)


def write(folder: FastDir, name: str = "x") -> Path:
    path = Path(folder.path, name)
    path.write_text(name)
    return path


def owner(node: str, attempt: int = 1) -> FilesOwner:
    return FilesOwner(node=node, attempt=attempt, first_rank=0, nproc=1, world_size=2)


def test_only_the_user_can_read_it(folder):
    assert os.stat(folder.root).st_mode & 0o777 == 0o700
    assert folder.path.startswith("/dev/shm/")


@pytest.mark.parametrize("at_the_end", [False, True])
def test_the_next_run_or_the_end_of_another_removes_what_nobody_owns_any_more(folder, at_the_end):
    """Not what another run has, or its state keeper, and nothing that may just be made."""
    other = FastDir()
    if at_the_end:
        other.create()
    abandoned, young, kept = (f"{folder.root}-{word}" for word in ("abandoned", "young", "kept"))
    for root in (abandoned, young, kept):
        os.makedirs(f"{root}/files/sub")
    for root in (abandoned, kept, folder.root):
        os.utime(root, (time.time() - 100, time.time() - 100))
    keeper = os.open(kept, os.O_RDONLY)
    fcntl.flock(keeper, fcntl.LOCK_SH)
    if at_the_end:
        other.release()
    else:
        other.create()
    try:
        assert [os.path.exists(root) for root in (abandoned, young, kept, folder.root)] == [False, True, True, True]
    finally:
        os.close(keeper)
        other.remove()
        for root in (young, kept):
            scratch.remove(root)


def test_a_script_may_remove_the_folder_and_make_it_again(folder):
    """Another run that starts on the host, or ends, a minute later does not take it for abandoned."""
    other = FastDir()
    shutil.rmtree(folder.path)
    os.makedirs(folder.path)
    path = write(folder)
    os.utime(folder.root, (time.time() - 100, time.time() - 100))
    other.create()
    other.remove()
    assert path.exists()


def test_what_is_locked_stays_for_the_process_that_has_the_lock(folder):
    path = write(folder)
    keeper = os.open(folder.root, os.O_RDONLY)
    fcntl.flock(keeper, fcntl.LOCK_SH)
    scratch.remove_unless_locked(folder.root)
    assert path.exists()
    os.close(keeper)
    scratch.remove_unless_locked(folder.root)
    assert not path.exists()


def test_the_state_keeper_removes_the_folder_of_an_agent_that_was_killed_and_has_no_heir(folder):
    client = FdStoreClient(secrets.token_hex(8), seconds=0.1)
    client.start()
    write(folder)
    client.protect(folder.root)
    assert scratch.is_locked(folder.root)
    killed(client)
    until(lambda: not os.path.exists(folder.root), "the folder is left")


def test_the_state_keeper_unlocks_the_folder_of_an_agent_that_leaves(folder):
    secret = secrets.token_hex(8)
    client = FdStoreClient(secret)
    client.start()
    client.protect(folder.root)
    client.leave()
    wait_for_its_end(secret)
    assert os.path.exists(folder.root)
    assert not scratch.is_locked(folder.root)


def test_the_next_agent_on_the_host_takes_over_what_one_that_was_killed_has_left():
    """Files, copies, and whose they are. What it has itself stays if it is newer."""
    secret = secrets.token_hex(8)
    before, after = FastDir(), FastDir()
    page, fd = SharedPage.create()
    for each in (before, after):
        each.create()
    client = FdStoreClient(secret)
    client.start()
    client.protect(before.root)
    write(before, "only")
    os.utime(write(before, "both"), (1, 1))
    Path(before.path, "sub").mkdir()
    write(before, "sub/x")
    write(after, "both").write_text("newer")
    os.mkdir(before.folder("other"))
    Path(before.folder("other"), "copy").write_text("copy")
    before.copied(owner("other"))
    before.become(owner("before", 7))
    killed(client)
    memory = StateMemory(page, secret, None, after)
    memory.adopt()
    found = {name: Path(after.path, name).read_text() for name in fast_dir.scan(after.path)}
    assert found == {"only": "only", "both": "newer", "sub/x": "sub/x"}
    assert after.owners() == {"": owner("before", 7), "other": owner("other")}
    assert [*fast_dir.scan(after.folder("other"))] == ["copy"]
    assert not os.path.exists(before.root)
    memory.close()
    os.close(fd)
    after.remove()
    wait_for_its_end(secret)
    before.remove()


def test_a_new_state_keeper_protects_the_folder_too(folder):
    secret = secrets.token_hex(8)
    page, fd = SharedPage.create()
    memory = StateMemory(page, secret, None, folder)
    before = children()
    memory.files.protect_folder()
    assert scratch.is_locked(folder.root)
    (keeper,) = children() - before
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    assert not scratch.is_locked(folder.root)
    memory.files.renew_keeper()
    until(lambda: scratch.is_locked(folder.root), "nobody protects the folder")
    memory.files.release_folder()
    until(lambda: not scratch.is_locked(folder.root), "the folder stays locked")
    memory.close()
    os.close(fd)
    wait_for_its_end(secret)


def test_the_next_run_of_a_warm_agent_finds_an_empty_folder(folder):
    write(folder)
    folder.become(owner("a"))
    folder.copied(owner("b"))
    folder.clear()
    assert (fast_dir.scan(folder.path), folder.owners()) == ({}, {})


def test_a_file_is_complete_when_nobody_has_it_open_for_writing(folder):
    with write(folder).open("a"):
        assert fast_dir.open_complete(folder.path, "x", settled=0) is None
    fd = fast_dir.open_complete(folder.path, "x", settled=0)
    assert fd is not None
    os.close(fd)
    assert fast_dir.open_complete(folder.path, "x", settled=1000) is None


def test_without_leases_a_file_is_complete_when_it_has_not_changed_for_a_second(folder, monkeypatch):
    def refuse(*_):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(fast_dir.fcntl, "fcntl", refuse)
    assert fast_dir.is_written(0, 0.5)
    assert not fast_dir.is_written(0, 1.5)


def test_a_rank_has_had_its_files_where_it_was(folder):
    """One that did not exist counts as that of which `State` would take the values."""
    found = FilesOwner(node="b", attempt=1, first_rank=2, nproc=2, world_size=4)
    assert [found.has(rank) for rank in range(8)] == [False, False, True, True] * 2
