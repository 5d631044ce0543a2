"""The private folder in which a user's daemons on this machine listen on Unix sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from raylaunch.errors import ExitCode, RaylaunchError
from raylaunch.node.protocol import wire

_NAME = "raylaunch"
_SUFFIX = ".sock"
_SWEEP_TIMEOUT_SECONDS = 1.0


class NoDaemonError(RaylaunchError):
    """No daemon can be used, so the run stays in the command's process; the message says why."""

    exit_code = ExitCode.UNAVAILABLE


def folder(environ: Mapping[str, str]) -> Path:
    """Return the folder, and make it if needed: in XDG_RUNTIME_DIR if that is private, else in TMPDIR or /tmp.

    Raises NoDaemonError if other users could use the folder.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and not _not_private(Path(runtime)):
        found = Path(runtime) / _NAME
    else:
        found = Path(environ.get("TMPDIR") or "/tmp") / f"{_NAME}-{os.geteuid()}"  # noqa: S108
    with contextlib.suppress(FileExistsError):
        found.mkdir(0o700)
    if reason := _not_private(found):
        msg = f"the folder {found} {reason}"
        raise NoDaemonError(msg)
    return found


def _not_private(path: Path) -> str:
    """Return why a folder is not private to this user, "" if it is."""
    try:
        found = path.lstat()
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.geteuid():
        return "belongs to another user"
    if found.st_mode & 0o077:
        return "is accessible to other users: its mode should be 0700"
    return ""


def sockets(directory: Path, key: str = "") -> list[Path]:
    """Return the sockets of the daemons with a fingerprint, or of all. Their processes may have died."""
    return sorted(directory.glob(f"{key or '*'}-*{_SUFFIX}"))


def pid_of(path: Path) -> int:
    """Return the pid of the daemon, which is part of the name of its socket."""
    return int(path.name.removesuffix(_SUFFIX).rpartition("-")[2])


def listen(directory: Path, key: str) -> tuple[socket.socket, Path]:
    """Return the listening socket of this daemon and its path. Raises OSError."""
    path = directory / f"{key}-{os.getpid()}{_SUFFIX}"
    hidden = directory / f".{os.getpid()}"
    hidden.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _short_name(hidden) as name:
        server.bind(name)
    server.listen()
    hidden.rename(path)  # atomic: a socket that can be seen accepts connections
    return server, path


@contextlib.contextmanager
def _short_name(path: Path) -> Iterator[str]:
    """Give a socket a name that is short enough, however long its path is: unix(7) allows 107 bytes."""
    folder_fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder_fd}/{path.name}"
    finally:
        os.close(folder_fd)


def connect(path: Path, seconds: float) -> socket.socket | None:
    """Connect to a daemon, with a timeout in seconds for each answer; None if it belongs to another user or has died.

    The socket of a dead daemon is removed.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(seconds)
    try:
        with _short_name(path) as name:
            connection.connect(name)
        if wire.peer_is_same_user(connection):
            return connection
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
    except OSError:
        pass
    connection.close()
    return None


def sweep(directory: Path) -> None:
    """Remove the sockets of daemons that have died."""
    for path in sockets(directory):
        connection = connect(path, _SWEEP_TIMEOUT_SECONDS)
        if connection is not None:
            connection.close()
