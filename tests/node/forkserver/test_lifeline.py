"""Which folders of a node are removed at its end, and by whom."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from pathlib import Path

import pytest

from raylaunch.node.forkserver import lifeline
from raylaunch.node.linux import scratch


@pytest.fixture
def folder(tmp_path):
    found = tmp_path / "folder"
    (found / scratch.AGENT_LOCK).mkdir(parents=True)
    return found


def locked(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def removed(folder: Path, *, is_dead: bool, is_last: bool = False, lock: Path | None = None) -> bool:
    """Return whether a folder is removed when the agent has died, or has only shut down its end of the lifeline."""
    agents, ours = socket.socketpair()
    fd = locked(lock) if lock is not None else -1
    with ours, agents:
        if is_dead:
            agents.close()
        else:
            agents.shutdown(socket.SHUT_WR)
        lifeline.remove_folders([str(folder)], ours.fileno(), is_last=is_last)
    if fd >= 0:
        os.close(fd)
    return not folder.exists()


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("is_dead", [True, False])
def test_at_the_end_of_the_node_its_folders_are_removed(folder, is_dead, is_last):
    assert removed(folder, is_dead=is_dead, is_last=is_last)


@pytest.mark.parametrize("is_dead", [True, False])
def test_what_the_subreaper_keeps_stays(folder, is_dead):
    assert not removed(folder, is_dead=is_dead, lock=folder)


def test_what_the_agent_goes_on_with_stays_when_it_starts_another_fork_server(folder):
    assert not removed(folder, is_dead=False, lock=folder / scratch.AGENT_LOCK)


@pytest.mark.parametrize("is_last", [True, False])
def test_the_lock_of_an_agent_that_was_killed_does_not_count(folder, is_last):
    """Its end may take a while."""
    assert removed(folder, is_dead=True, is_last=is_last, lock=folder / scratch.AGENT_LOCK)


@pytest.mark.parametrize("is_dead", [True, False])
def test_what_a_dead_subreaper_has_kept_does_not_count(folder, is_dead):
    """Its end may take a while, and so may that of the agent, which has the same lock."""
    assert removed(folder, is_dead=is_dead, is_last=True, lock=folder)


def test_an_agent_that_is_killed_later_than_the_subreaper_is_waited_for(folder):
    """Ray kills an actor's children before the actor, which may then take seconds to end."""
    agents, ours = socket.socketpair()
    with ours, agents:
        waiting = threading.Thread(
            target=lifeline.remove_folders, args=([str(folder)], ours.fileno()), kwargs={"is_last": True}
        )
        waiting.start()
        waiting.join(2.5)
        assert folder.exists()
        agents.close()
        waiting.join()
    assert not folder.exists()
