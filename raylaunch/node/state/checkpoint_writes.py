"""The agent's part in writing commits to disk: starts a process for each, and says what became of it.

The process imports torch, which the agent does not, and reads the buffers of the ranks. A disk that is full or does not
answer only ever stops that process. It ends with the agent.
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
from dataclasses import dataclass
from typing import Any

from raylaunch.core.machine.commits import Commit
from raylaunch.node.linux import limits
from raylaunch.worker.state.buffer_client import Request
from raylaunch.worker.state.checkpoints import checkpoint_process
from raylaunch.worker.state.commit_buffer import CommitHeader, WriteState

_SECONDS = 60.0
"""How long the process waits for other nodes' processes to begin."""
_END_SECONDS = 2.0
"""How long a process that is to end may take."""
_CHUNK = 65536
_ENV = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""The process leaves GPUs alone: DCP asks whether there are any, for which torch else initializes CUDA."""


@dataclass(frozen=True, slots=True)
class LastWrite:
    """What became of the last checkpoint of a node, at the end of a run."""

    is_over: bool
    folder: str = ""
    written: int = 0
    """How many bytes are written of the node's tensors."""
    total: int = 0
    """How many there are; 0: that is not known yet."""
    why: str = ""
    """Why it could not be written, for a person."""


class CheckpointWrites:
    """The processes of one node: one at a time."""

    def __init__(self, epoll: select.epoll) -> None:
        """`epoll`: reports `fileno()` when there is something for `poll`."""
        self._epoll = epoll
        self._folder, self._keep = "", 0
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._began_at = 0.0
        #: How long the slowest checkpoint took that is written, in seconds; 0: none is.
        self.longest = 0.0
        #: What the process that runs writes; None: it is the end, and the process finds out.
        self._writing: Commit | None = None
        self._written: Commit | None = None
        #: The files of the ranks and what they have, if the run is over, until the last checkpoint is begun.
        self._left: Mapping[int, Commit] = {}
        self._last: LastWrite | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable when the process has said something, or has ended; -1: there is none."""
        return self._process.stdout.fileno() if self._process is not None and self._process.stdout is not None else -1

    def note_folder(self, request: Request) -> None:
        """Record where a worker wants checkpoints to be."""
        if request.folder:
            self._folder, self._keep = request.folder, request.keep

    def begin(self, commits: Mapping[int, tuple[Commit, CommitHeader]]) -> None:
        """Begin an attempt. `commits`: the commits for the disk, by file. If nobody writes them now, nobody will."""
        if self._process is None:
            for _, header in commits.values():
                if header.write_state is WriteState.TO_WRITE:
                    header.set_outcome(WriteState.NONE, "")

    def write(self, commits: Mapping[int, tuple[Commit, CommitHeader]], workers: int) -> None:
        """Write to disk if all workers of the node have sealed the same commit. `commits`: as in `begin`."""
        found = {commit for commit, header in commits.values() if header.write_state is WriteState.TO_WRITE}
        if len(found) != 1 or len(commits) != workers or self._process is not None:
            return
        self._writing = found.pop()
        if why := self._start([*commits], is_end=False):
            self._end(why, commits)

    def write_last(self, fds: Mapping[int, Commit]) -> LastWrite:
        """At the end of the run, write the newest commit that all ranks have, unless it is written.

        `fds`: files of the ranks. Returns how far that is: call it again until it is over. What is being written
        already is waited for.
        """
        if self._last is None:
            self._left, self._last = fds, LastWrite(is_over=False, folder=self._folder)
            self._begin_last()
        return self._last

    def _begin_last(self) -> None:
        if self._last is None or self._last.is_over or self._process is not None:
            return
        fds, self._left = self._left, {}
        why = ""
        if self._folder and fds and max(fds.values()) != self._written:
            why = self._start([*fds], is_end=True)
        if self._process is None:
            self._last = LastWrite(is_over=True, folder=self._folder, why=why)

    def _start(self, fds: Sequence[int], *, is_end: bool) -> str:
        """Start a process. Return why that cannot be, for a person; "": it is done."""
        request: dict[str, Any] = {"folder": self._folder, "keep": self._keep, "fds": [*fds]}
        request |= {"is_end": is_end, "seconds": _SECONDS}
        self._began_at = time.monotonic()
        try:
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, checkpoint_process.__file__, json.dumps(request)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | _ENV,
                cwd="/",
                start_new_session=True,
            )
            self._epoll.register(self.fileno(), select.EPOLLIN)
        except OSError as error:
            return limits.explained(error, "the agent")
        return ""

    def poll(self, commits: Mapping[int, tuple[Commit, CommitHeader]]) -> None:
        """Read what the process has said. `commits`: as in `begin`."""
        data = os.read(self.fileno(), _CHUNK)
        *lines, self._said = (self._said + data).split(b"\n")
        why = None if data else "a checkpoint is not written: the process that does it was ended"
        for line in lines:
            said = _parsed(line)
            if "failed" in said:
                why = str(said["failed"])
            elif self._last is not None:
                self._last = LastWrite(False, self._folder, int(said["written"]), int(said["total"]))
        if why is not None:
            self._end_process(wait=bool(data))
            self._end(why, commits)

    def _end(self, why: str, commits: Mapping[int, tuple[Commit, CommitHeader]]) -> None:
        commit, self._writing = self._writing, None
        if commit is None:
            self._last = LastWrite(is_over=True, folder=self._folder, why=why)
            return
        for found, header in commits.values():
            if found == commit:
                header.set_outcome(WriteState.FAILED if why else WriteState.WRITTEN, why)
        if not why:
            self._written = commit
            self.longest = max(self.longest, time.monotonic() - self._began_at)
        self._begin_last()

    def _end_process(self, *, wait: bool) -> None:
        """Have no process any more. `wait`: it has said all, and ends by itself."""
        process, self._process = self._process, None
        if process is None or process.stdout is None:
            return
        self._said = b""
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(process.stdout.fileno())
        process.stdout.close()
        if not wait:
            process.terminate()  # it removes what is incomplete
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # its disk does not answer
            process.kill()

    def close(self) -> None:
        """End the process: what it has not written is given up."""
        self._end_process(wait=False)


def _parsed(line: bytes) -> dict[str, Any]:
    """Return what the process says in a line."""
    try:
        said = json.loads(line)
        return said if "failed" in said else {"written": said["written"], "total": said["total"]}
    except (ValueError, TypeError, KeyError):
        return {"failed": "a checkpoint is not written: the process that does it does not answer as it should"}
