"""The agent's part in writing commits to disk: starts a process for each, and says what became of it.

The process imports torch, which the agent does not, has a low priority, and reads the buffers of the ranks. A disk that
is full or does not answer only ever stops that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from raylaunch.core.machine.commits import Commit
from raylaunch.node.linux import limits
from raylaunch.worker.state import commit_buffer
from raylaunch.worker.state.buffer_client import Request
from raylaunch.worker.state.checkpoints import checkpoint_process
from raylaunch.worker.state.commit_buffer import WriteState

_SECONDS = 60.0
"""How long the process waits for those of other nodes to begin."""
_END_SECONDS = 4.0
"""How long the end of the run waits for the last checkpoint. Its process goes on after that."""
_CHUNK = 4096
_END_OF_WORDS = b"\n"
"""Nothing follows this in what the process says."""


class CheckpointWrites:
    """The processes of one node: one at a time, and another one at the end."""

    def __init__(self, epoll: select.epoll) -> None:
        """`epoll`: reports `fileno()` when there is something for `poll`."""
        self._epoll = epoll
        self._folder, self._keep = "", 0
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._writing: Commit | None = None
        self._written: Commit | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable when the process has said something, or has ended; -1: there is none."""
        return self._process.stdout.fileno() if self._process is not None and self._process.stdout is not None else -1

    def note_folder(self, request: Request) -> None:
        """Take note of where a worker wants checkpoints to be."""
        if request.folder:
            self._folder, self._keep = request.folder, request.keep

    def begin(self, commits: Mapping[int, tuple[Commit, WriteState]]) -> None:
        """Begin an attempt. `commits`: those for the disk, by file. If nobody writes them, nobody will."""
        if self._process is None:
            for fd, (_, state) in commits.items():
                if state is WriteState.TO_WRITE:
                    _set_outcome(fd, WriteState.NONE, "")

    def write(self, commits: Mapping[int, tuple[Commit, WriteState]], workers: int) -> None:
        """Write to disk if all workers of the node have sealed the same commit. `commits`: as in `begin`."""
        found = {commit for commit, state in commits.values() if state is WriteState.TO_WRITE}
        if len(found) != 1 or len(commits) != workers or self._process is not None:
            return
        self._writing = found.pop()
        try:
            self._process = self._start([*commits], is_end=False)
            self._epoll.register(self.fileno(), select.EPOLLIN)
        except OSError as error:
            self._end(limits.explained(error, "the agent"), commits)

    def _start(self, fds: Sequence[int], *, is_end: bool) -> subprocess.Popen[bytes]:
        request: dict[str, Any] = {"folder": self._folder, "keep": self._keep, "fds": [*fds]}
        request |= {"is_end": is_end, "seconds": _SECONDS}
        return subprocess.Popen(  # noqa: S603
            [sys.executable, checkpoint_process.__file__, json.dumps(request)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd="/",
            start_new_session=True,
        )

    def poll(self, commits: Mapping[int, tuple[Commit, WriteState]]) -> None:
        """Read what the process has said. `commits`: as in `begin`."""
        data = os.read(self.fileno(), _CHUNK)
        self._said += data
        if not data and self._process is not None:
            self._epoll.unregister(self.fileno())
            _close(self._process)
            self._process = None
            said, self._said = self._said, b""
            self._end(_why(said), commits)

    def _end(self, why: str, commits: Mapping[int, tuple[Commit, WriteState]]) -> None:
        commit, self._writing = self._writing, None
        for fd, (found, _) in commits.items():
            if found == commit:
                _set_outcome(fd, WriteState.FAILED if why else WriteState.WRITTEN, why)
        if not why:
            self._written = commit

    def close(self, fds: Mapping[int, Commit]) -> list[str]:
        """End the run: write the newest commit that all ranks have, unless it is written. `fds`: files of the ranks.

        Waits for seconds at most. The processes go on after that. Return what to tell a person.
        """
        messages = []
        deadline = time.monotonic() + _END_SECONDS
        processes = [(self._process, self._said)] if self._process is not None else []
        if self._folder and fds and max(fds.values()) != self._written:
            with contextlib.suppress(OSError):
                processes.append((self._start([*fds], is_end=True), b""))
        self._process = None
        for process, said in processes:
            if why := self._last_words(process, said, deadline):
                messages.append(why)
            _close(process)
        return messages

    def _last_words(self, process: subprocess.Popen[bytes], said: bytes, deadline: float) -> str:
        """Return why the process has not written its checkpoint by the deadline, for a person; "": it has.

        `said`: what was read of it before. Its end, for which torch may take long, is not awaited when it has said all.
        """
        while process.stdout is not None and (left := deadline - time.monotonic()) > 0:
            if said.endswith(_END_OF_WORDS):
                return _why(said)
            if select.select([process.stdout], [], [], left)[0]:
                data = os.read(process.stdout.fileno(), _CHUNK)
                said += data
                if not data:
                    return _why(said)
        return (
            f"a checkpoint is not written to {self._folder} yet: a process of this node goes on with that in the "
            "background, and does not end with the run"
        )


def _why(said: bytes) -> str:
    """Return why a process has not written what it should; "": it has."""
    try:
        return str(json.loads(said)["failed"])
    except (ValueError, TypeError, KeyError):
        return "a checkpoint is not written: the process that does it was ended"


def _close(process: subprocess.Popen[bytes]) -> None:
    if process.stdout is not None:
        process.stdout.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)  # it has forked the one that writes, and ended


def _set_outcome(fd: int, state: WriteState, outcome: str) -> None:
    with contextlib.suppress(OSError):
        commit_buffer.set_outcome(fd, state, outcome)
