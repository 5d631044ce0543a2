"""The subreaper's part when its agent was killed: what becomes of the memory for `State`, and of the folder for files.

It has their descriptors (`fd_store`). It keeps them until another agent of the run on this host takes them, or a minute
is over. Meanwhile it gives parts of commits to agents of other hosts, at the port of the agent that was killed.

The next agent (`StateFiles.adopt`) finds the folder by the run, and by the folder the process that has it open, whose
memory files it opens by their names in /proc. It then removes the folder, and the subreaper ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Mapping

from raylaunch.node.linux import scratch
from raylaunch.node.state.fast_dir import FastDir
from raylaunch.node.state.part_server import PartServer
from raylaunch.node.state.state_files import FOLDER, PORT, MemoryFile, StateFiles

_PART = re.compile(r"\d+ \d+")
"""The name of a memory file in the store: rank and index."""
KEEP_SECONDS = 60.0
"""How long a subreaper waits for another agent after its own was killed."""
_LOOK_SECONDS = 0.5
"""How often it looks whether one has come."""


def serve(fds: Mapping[str, int]) -> PartServer | None:
    """Give parts of commits to other agents from now on, in threads. `fds`: what is in the store."""
    files = StateFiles("", 0, FastDir())
    with contextlib.suppress(OSError, RuntimeError):  # no descriptors or threads are left
        for name, fd in fds.items():
            if _PART.fullmatch(name):
                rank, index = map(int, name.split())
                files.add((rank, index), MemoryFile(os.dup(fd)))
        for name in fds:
            if name.startswith(PORT):
                server = PartServer(socket.socket(fileno=os.dup(fds[name])), files, secret=name.removeprefix(PORT))
                server.start()
                return server
    return None


def wait_for_heir(fds: Mapping[str, int], seconds: float = KEEP_SECONDS) -> None:
    """Wait until another agent has taken what is in `fds`, or time is over. Returns at once if that is nothing."""
    deadline = time.monotonic() + seconds
    folder = fds.get(FOLDER, -1)
    if folder < 0:
        return
    path = f"/proc/self/fd/{folder}"
    lock = os.path.join(path, scratch.AGENT_LOCK)
    if any(map(_PART.fullmatch, fds)) or any(files for base, _, files in os.walk(path) if base != path):
        while os.fstat(folder).st_nlink and (time.monotonic() < deadline or scratch.is_locked(lock)):
            time.sleep(_LOOK_SECONDS)
