"""The folder for files in memory: who removes it, and who must not."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.node.linux import scratch
from raylaunch.node.linux.ram_folder import RamFolder
from raylaunch.node.state import fast_dir, inheritance
from raylaunch.node.state.fast_dir import FastDir, FilesOwner
from raylaunch.node.state.state_files import FOLDER, PORT
from raylaunch.node.state.state_memory import StateMemory
from raylaunch.worker.heartbeats.shared_page import SharedPage


@pytest.fixture
def folder() -> Iterator[RamFolder]:
    found = RamFolder()
    found.create()
    yield found
    found.remove()
    assert not os.path.exists(found.root)


def write(folder: RamFolder, name: str = "x") -> Path:
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
    """Not what another run has, or a subreaper whose agent was killed, and nothing that may just be made."""
    other = RamFolder()
    if at_the_end:
        other.create()
    abandoned, young, kept = (f"{folder.root}-{word}" for word in ("abandoned", "young", "kept"))
    for root in (abandoned, young, kept):
        os.makedirs(f"{root}/files/sub")
    for root in (abandoned, kept, folder.root):
        os.utime(root, (time.time() - 100, time.time() - 100))
    holder = os.open(kept, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_SH)
    if at_the_end:
        other.release()
    else:
        other.create()
    try:
        assert [os.path.exists(root) for root in (abandoned, young, kept, folder.root)] == [False, True, True, True]
    finally:
        os.close(holder)
        other.remove()
        for root in (young, kept):
            scratch.remove(root)


def test_a_script_may_remove_the_folder_and_make_it_again(folder):
    """Another run that starts on the host, or ends, a minute later does not take it for abandoned."""
    other = RamFolder()
    shutil.rmtree(folder.path)
    os.makedirs(folder.path)
    path = write(folder)
    os.utime(folder.root, (time.time() - 100, time.time() - 100))
    other.create()
    other.remove()
    assert path.exists()


def folder_fds(folder: RamFolder) -> dict[str, int]:
    """Return what the subreaper of an agent that was killed has, if the script has no `State`."""
    fds = {FOLDER: os.dup(folder.hold()), f"{PORT}secret": 0}
    folder.abandon()
    return fds


def test_files_are_kept_for_the_next_agent_for_a_while(folder):
    fds = folder_fds(folder)
    inheritance.wait_for_heir(fds, 3600)  # there is nothing to wait for
    write(folder)
    began = time.monotonic()
    inheritance.wait_for_heir(fds, 0.2)
    assert time.monotonic() - began >= 0.2
    os.close(fds[FOLDER])


def test_memory_of_state_is_kept_without_a_file(folder):
    fds = folder_fds(folder) | {"0 0": 0}
    began = time.monotonic()
    inheritance.wait_for_heir(fds, 0.2)
    assert time.monotonic() - began >= 0.2
    os.close(fds[FOLDER])


def test_the_subreaper_does_not_wait_any_longer_when_the_next_agent_has_the_folder(folder):
    write(folder)
    fds = folder_fds(folder)
    remover = threading.Timer(0.2, scratch.remove, [folder.root])
    remover.start()
    inheritance.wait_for_heir(fds, 3600)
    remover.join()
    os.close(fds[FOLDER])


def test_the_subreaper_waits_until_the_next_agent_has_all(folder):
    """It would remove the folder at once."""
    write(folder)
    fds = folder_fds(folder)
    with scratch.locked(os.path.join(folder.root, scratch.AGENT_LOCK)) as is_locked:
        assert is_locked
        waiter = threading.Thread(target=inheritance.wait_for_heir, args=(fds, 0.0))
        waiter.start()
        waiter.join(0.2)
        assert waiter.is_alive()
    waiter.join(60)
    assert not waiter.is_alive()
    os.close(fds[FOLDER])


def test_the_next_agent_on_the_host_takes_over_what_one_that_was_killed_has_left():
    """Files, copies, and whose they are. What it has itself stays if it is newer."""
    secret = secrets.token_hex(8)
    before, after = RamFolder(), RamFolder()
    pages = [SharedPage.create() for _ in range(2)]
    for each in (before, after):
        each.create()
    first, second = (
        StateMemory(page, secret, None, each) for (page, _), each in zip(pages, (before, after), strict=True)
    )
    first.files.adopt()
    write(before, "only")
    os.utime(write(before, "both"), (1, 1))
    Path(before.path, "sub").mkdir()
    write(before, "sub/x")
    write(after, "both").write_text("newer")
    os.mkdir(first.files.folder.folder("other"))
    Path(first.files.folder.folder("other"), "copy").write_text("copy")
    first.files.folder.copied(owner("other"))
    first.files.folder.become(owner("before", 7))
    before.abandon()
    second.files.adopt()
    found = {name: Path(after.path, name).read_text() for name in fast_dir.scan(after.path)}
    assert found == {"only": "only", "both": "newer", "sub/x": "sub/x"}
    assert second.files.folder.owners() == {"": owner("before", 7), "other": owner("other")}
    assert [*fast_dir.scan(second.files.folder.folder("other"))] == ["copy"]
    assert not os.path.exists(before.root)
    for memory, (_, fd) in zip((first, second), pages, strict=True):
        memory.close()
        os.close(fd)
    after.remove()


def test_the_next_run_of_a_warm_agent_finds_an_empty_folder(folder):
    write(folder)
    files = FastDir(folder)
    files.become(owner("a"))
    files.copied(owner("b"))
    folder.clear()
    assert (fast_dir.scan(folder.path), FastDir(folder).owners()) == ({}, {})
    assert not os.path.exists(files.folder("b"))


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
