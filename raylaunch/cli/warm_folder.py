"""Where a user's warm drivers on this machine listen: sockets in a folder that is that user's alone."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Mapping
from pathlib import Path

from raylaunch.errors import ExitCode, RaylaunchError

_NAME = "raylaunch"
_ENDING = ".sock"
_SWEEP_SECONDS = 1.0
_PEER = struct.Struct("3i")
"""Linux's `struct ucred`: pid, uid, gid."""


class NoWarmDriverError(RaylaunchError):
    """Nobody can be asked, or started, so a run has to do without; the text says why."""

    exit_code = ExitCode.UNAVAILABLE


def folder(environ: Mapping[str, str]) -> Path:
    """In the user's runtime folder, else in the temporary folder; made if it is not there.

    Raises NoWarmDriverError where somebody else could put a socket there, or hears what is said to one.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and not _objection(Path(runtime)):
        found = Path(runtime) / _NAME
    else:
        found = Path(environ.get("TMPDIR") or "/tmp") / f"{_NAME}-{os.geteuid()}"  # noqa: S108
    with contextlib.suppress(FileExistsError):
        found.mkdir(0o700)
    if objection := _objection(found):
        msg = f"the folder {found} {objection}"
        raise NoWarmDriverError(msg)
    return found


def _objection(path: Path) -> str:
    """What is wrong with it as a private folder."""
    try:
        found = path.lstat()
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return "is no folder"
    if found.st_uid != os.geteuid():
        return "belongs to somebody else"
    if found.st_mode & 0o077:
        return "is open to others: its mode should be 0700"
    return ""


def sockets(where: Path, key: str = "") -> list[Path]:
    """Of the drivers that have a key, or of all. Their processes may be gone."""
    return sorted(where.glob(f"{key or '*'}-*{_ENDING}"))


def pid_of(path: Path) -> int:
    """The process that listens there, by the name of its socket."""
    return int(path.name.removesuffix(_ENDING).rpartition("-")[2])


def listen(where: Path, key: str) -> tuple[socket.socket, Path]:
    """For a driver: be found from here on. Raises OSError."""
    path = where / f"{key}-{os.getpid()}{_ENDING}"
    aside = where / f".{os.getpid()}"
    aside.unlink(missing_ok=True)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(str(aside))
    door.listen()
    aside.rename(path)  # who sees it can connect
    return door, path


def connect(path: Path, seconds: float) -> socket.socket | None:
    """To the driver that listens there, which has as many seconds for each answer; None: it is gone, or not ours."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(seconds)
    try:
        line.connect(str(path))
        if is_ours(line):
            return line
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
    except OSError:
        pass
    line.close()
    return None


def sweep(where: Path) -> None:
    """Remove what those left behind who are gone."""
    for path in sockets(where):
        line = connect(path, _SWEEP_SECONDS)
        if line is not None:
            line.close()


def is_ours(line: socket.socket) -> bool:
    """Whether the other end is a process of the same user."""
    _, uid, _ = _PEER.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(uid == os.geteuid())
