"""The agent's connection to the state keeper, which it starts where there is none."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

from raylaunch.node.protocol import wire
from raylaunch.node.state import fd_store

KEEP_SECONDS = 60.0
"""How long the state keeper waits for another agent after one was killed."""
_ANSWER_SECONDS = 2.0
"""How long the state keeper may take to answer. It only moves descriptors; but it may be stopped."""
_REAP_SECONDS = 0.5
"""How long we wait for the end of a state keeper that we have started. It goes on if other agents use it."""
_BACKLOG = 64


class FdStoreClient:
    """Reaches the state keeper of a run on this host by a name that the run's secret determines.

    The name is in the abstract namespace (unix(7)), so no file is left behind. Anybody on the host can see it; so both
    ends look whether the other is of the same user.
    """

    def __init__(self, secret: str, seconds: float = KEEP_SECONDS) -> None:
        """`secret`: the run's own; `""`: there is to be no state keeper, since no agent could follow this one."""
        digest = hashlib.sha256(secret.encode()).hexdigest()[:32]
        self._name = f"\0raylaunch-state-{digest}"
        self._is_wanted = bool(secret)
        self._seconds = seconds
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        #: The folders of agents that were killed, as `take` has found them.
        self.orphaned_folders: list[str] = []

    def connect(self) -> bool:
        """Return whether there is a state keeper, and be connected to it then. Raises OSError where one cannot be."""
        if self._sock is not None or not self._is_wanted:
            return self._sock is not None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(_ANSWER_SECONDS)
        try:
            sock.connect(self._name)
        except ConnectionRefusedError:  # nobody has the name
            sock.close()
            return False
        except OSError:
            sock.close()
            raise
        if not wire.peer_is_same_user(sock):
            sock.close()
            raise OSError(errno.EPERM, "the state keeper's name is taken by another user")
        self._sock = sock
        return True

    def start(self) -> None:
        """Be connected to the state keeper, and start it if there is none. Waits for nothing. Raises OSError."""
        while self._is_wanted and not self.connect():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                try:
                    listener.bind(self._name)
                except OSError as error:
                    if error.errno == errno.EADDRINUSE:  # another agent of this host was first
                        continue
                    raise
                listener.listen(_BACKLOG)  # from here on others and we can connect, and are served when it runs
                self._process = subprocess.Popen(  # noqa: S603
                    [sys.executable, "-S", fd_store.__file__, str(listener.fileno()), str(self._seconds)],
                    pass_fds=[listener.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                )

    def fileno(self) -> int:
        """Return the descriptor of the connection, -1 where there is none. It is readable when the keeper is gone."""
        return self._sock.fileno() if self._sock is not None else -1

    def keep(self, rank: int, index: int, fd: int) -> None:
        """Give the state keeper this file to hold. Raises OSError where it is gone."""
        self._send({"do": "keep", "rank": rank, "index": index}, fd)

    def drop(self, rank: int, index: int) -> None:
        """Tell the state keeper to close a file. Raises OSError where it is gone."""
        self._send({"do": "drop", "rank": rank, "index": index})

    def protect(self, path: str) -> None:
        """Tell the state keeper to lock a folder, and to remove it if this agent is killed. Raises OSError."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            self._send({"do": "protect", "path": path}, fd)
        finally:
            os.close(fd)  # the lock is the keeper's from now on

    def release(self, path: str) -> None:
        """Tell the state keeper to unlock a folder. Raises OSError where it is gone."""
        self._send({"do": "release", "path": path})

    def answer(self, fd: int, secret: str) -> None:
        """Let the keeper answer at this listening socket if the agent is killed. Raises OSError where it is gone."""
        self._send({"do": "answer", "secret": secret}, fd)

    def take(self) -> Iterator[tuple[int, int, int]]:
        """Yield rank, index and descriptor of each file, then set `orphaned_folders`.

        Raises OSError, also for no answer in time.
        """
        self._send({"do": "take"})
        while self._sock is not None:
            data, fds, _, _ = socket.recv_fds(self._sock, fd_store.MESSAGE_BYTES, 1)
            answer = json.loads(data) if data else None
            if answer is None:
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            if not fds:
                self.orphaned_folders = answer["folders"]
                return
            yield answer["rank"], answer["index"], fds[0]

    def _send(self, message: dict[str, object], fd: int | None = None) -> None:
        if self._sock is not None:
            socket.send_fds(self._sock, [json.dumps(message).encode()], [] if fd is None else [fd])

    def disconnect(self) -> None:
        """Forget a state keeper that is gone or does not answer."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def leave(self) -> None:
        """Say that this agent ends on purpose, and that no other one is to take its place."""
        with contextlib.suppress(OSError):
            self._send({"do": "leave"})
        self.disconnect()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_SECONDS)
