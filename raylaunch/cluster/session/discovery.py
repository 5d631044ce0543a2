"""Finds the signs of a Ray cluster that this machine belongs to, without importing Ray, and chooses the cluster.

`ray.init(address="auto")` connects to whatever a running raylet's command line names, or else the file that
`ray start` leaves in Ray's folder, whoever wrote them. A driver sends its token and its environment there, so here
only what root or this user wrote is believed. Ray 2.60 makes its folder, by default /tmp/ray, with mode 0777 and
without the sticky bit: everyone may replace the file in it, even by another one of its owner's. So usually it is the
raylet that is believed.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raylaunch.cluster.local import local_machine
from raylaunch.core.job.job import RayOptions
from raylaunch.errors import ClusterError

PROC = Path("/proc")
NO_CLUSTER_HINT = "`ray.address: none`, or `--standalone`, runs the job on this machine without a cluster"

_FOREIGN_VARIABLES = {
    "KUBERAY_GEN_RAY_START_CMD": "KubeRay sets it in the pods of a Ray cluster",
    "FQ_RAY_IP": "KubeRay sets it in the pods of a Ray cluster",
    "RAY_USAGE_STATS_KUBERAY_IN_USE": "KubeRay sets it in the pods of a Ray cluster",
    "RAY_DASHBOARD_ADDRESS": "KubeRay sets it in pods that submit jobs to a Ray cluster",
    "RAY_API_SERVER_ADDRESS": "it names the jobs API of a Ray cluster",
}
_MAX_BYTES = 4096
_MAX_LINKS = 40
"""As in Linux: a path with more symbolic links cannot be opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A sign that there is a cluster."""

    where: str
    """Where it was seen, as people call it: `the file /tmp/ray/ray_current_cluster`."""
    address: str = ""
    """The `host:port` of the cluster's head; `""`: the sign names none that can be used."""
    why: str = ""
    """Why no address can be used."""
    is_raylet: bool = False
    """It is a raylet that runs on this machine, as Ray needs for a driver."""


def is_alone(options: RayOptions, environ: Mapping[str, str], proc: Path = PROC) -> bool:
    """Return whether there is no cluster to connect to, as far as can be told without importing Ray, which is slow."""
    if options.address != "auto":
        return options.address == local_machine.NONE
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", bool)  # another thread may still import it
    uses_ray = is_initialized()
    return environ.get("RAY_ADDRESS", "") in ("", "auto") and not uses_ray and not signs(environ, proc)


def signs(environ: Mapping[str, str], proc: Path = PROC) -> list[Sign]:
    """Return all signs of a cluster, in the order in which they are believed. RAY_ADDRESS is none of them."""
    file = address_file(environ)
    return [*running(proc), *([file] if file else []), *_variables(environ)]


def choose(found: Sequence[Sign], probe: Callable[[str], Mapping[str, Any]]) -> str:
    """Return the address of the cluster to use; `""`: there is none.

    `probe` returns the metadata of the head at an address, or raises ClusterError. A Ray that a program started for
    itself with `ray.init()` does not count: it ends with that program. Raises ClusterError if there are signs of a
    cluster, but none that can be used, or if several can be used.
    """
    raylets = [sign for sign in found if sign.is_raylet]
    usable, errors = _probed(raylets, probe)
    others = [sign for sign in found if not sign.is_raylet]
    if len(usable) > 1:
        usable = [address for address in usable if address in {sign.address for sign in others}] or usable
    if len(usable) > 1:
        msg = f"several Ray clusters run on this machine, at {' and '.join(usable)}"
        raise ClusterError(msg, hint="set RAY_ADDRESS, or `ray.address`, to the address of one of them")
    if usable:
        return usable[0]
    if not errors:
        asked = {sign.address for sign in raylets}
        usable, errors = _probed([sign for sign in others if sign.address not in asked], probe)
    if errors and not usable:
        raise errors[0]
    return usable[0] if usable else ""


def _probed(found: Sequence[Sign], probe: Callable[[str], Mapping[str, Any]]) -> tuple[list[str], list[ClusterError]]:
    """Return the addresses of clusters that can be used, each once, and why others cannot."""
    usable: list[str] = []
    errors: list[ClusterError] = []
    for address in dict.fromkeys(sign.address for sign in found):
        sign = next(sign for sign in found if sign.address == address)
        if not address:
            msg = f"there is a sign of a Ray cluster that cannot be used: {sign.where}: {sign.why}"
            hint = f"set RAY_ADDRESS to the `host:port` of the cluster, which `ray start` printed\n{NO_CLUSTER_HINT}"
            errors.append(ClusterError(msg, hint=hint))
            continue
        try:
            if not probe(address).get("ray_init_cluster"):
                usable.append(address)
        except ClusterError as error:
            hint = "\n".join(filter(None, (error.hint, NO_CLUSTER_HINT)))
            errors.append(ClusterError(f"{error.message} (its address is from {sign.where})", hint=hint))
    return usable, errors


# Processes.


def running(proc: Path = PROC) -> list[Sign]:
    """Return Ray's processes on this machine that are root's or this user's: raylets, and heads without a raylet.

    Processes in containers do not count: a driver needs the files of its raylet.
    """
    found: dict[str, dict[str, Mapping[str, str]]] = {"raylet": {}, "gcs_server": {}}
    for pid in [path.name for path in proc.iterdir() if path.name.isdecimal()] if proc.is_dir() else []:
        with contextlib.suppress(OSError):
            name, arguments = _ray_process(proc / pid)
            if arguments:
                found[name][pid] = arguments
    # All raylets of a cluster have its session, but may call its address by different names.
    raylets = {arguments.get("session-name"): (pid, arguments) for pid, arguments in _by_pid(found["raylet"])}
    signs = [
        Sign(where=f"the raylet with process id {pid}", address=arguments.get("gcs-address", ""), is_raylet=True)
        for pid, arguments in raylets.values()
    ]
    signs += [
        Sign(where=f"the gcs_server with process id {pid}", why="no raylet of its cluster runs on this machine")
        for pid, arguments in _by_pid(found["gcs_server"])
        # `ray.init()` starts it with port 0, and its raylet a second later.
        if arguments.get("session-name") not in raylets and arguments.get("gcs_server_port") != "0"
    ]
    return [sign for sign in signs if sign.address or sign.why]


def _by_pid(processes: Mapping[str, Mapping[str, str]]) -> list[tuple[str, Mapping[str, str]]]:
    return sorted(processes.items(), key=lambda item: int(item[0]))


def _ray_process(folder: Path) -> tuple[str, dict[str, str]]:
    """Return the name of a process and, if it is Ray's and to be believed, its options. Raises OSError: it is gone.

    The process could change its user with its program while it is looked at, so the user is read before and after.
    """
    process = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # another process with the same id is not mixed up with it
    try:
        name = _read(process, "comm").strip()
        if name not in ("raylet", "gcs_server") or not _is_believed(process):
            return name, {}
        command = _read(process, "cmdline")
        if not _is_believed(process):
            return name, {}
    finally:
        os.close(process)
    options = (part.removeprefix("--").partition("=") for part in command.split("\0") if part.startswith("--"))
    return name, {key: value for key, _, value in options}


def _is_believed(process: int) -> bool:
    """Return whether a process is root's or this user's, and in this process's PID namespace.

    All its user ids count: the owner of /proc/PID is the effective one, which a set-user-ID program lends to anyone.
    """
    lines = (line.split() for line in _read(process, "status").splitlines())
    fields = {words[0]: words[1:] for words in lines if words}
    users = fields.get("Uid:", [])
    is_here = len(fields.get("NSpid:", ["0"])) == 1  # one process id for each namespace, from this one inwards
    return is_here and bool(users) and {int(user) for user in users} <= _believed_users()


def _read(folder: int, name: str) -> str:
    file = os.open(name, os.O_RDONLY, dir_fd=folder)
    with open(file, "rb") as opened:
        return opened.read().decode(errors="replace")


# The address file.


def address_file(environ: Mapping[str, str]) -> Sign | None:
    """Return the file in which `ray start` leaves the cluster's address; see Ray's `get_ray_address_file`.

    None: there is no file, it is empty, or its cluster has died without `ray stop`, which removes the file.
    """
    folder = environ.get("RAY_TMPDIR", environ.get("TMPDIR", "/tmp"))  # noqa: S108
    path = Path(folder, "ray", "ray_current_cluster").absolute()
    where = f"the file {path}"
    try:
        path.stat()  # without a file, it does not matter who may write to its folder
        why = why_not_believed(path)
        # What others may have put there is no link to a device that acts on `open`, and no pipe that waits.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (os.O_NOFOLLOW if why else 0))
        with open(file, "rb") as opened:
            address = (opened.read(_MAX_BYTES) or b"").decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return Sign(where=where, why=f"it cannot be read: {error.strerror}")
    if not address or _is_gone(address):
        return None
    return Sign(where=where, why=f"{why}, so others may have written it") if why else Sign(where=where, address=address)


def _is_gone(address: str) -> bool:
    """Return whether the head was on this machine, and nothing listens at its port any more.

    An address of another machine is not connected to: it cannot be bound to.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        ipaddress.ip_address(host)  # no name, which a name server would be asked for
        socket.create_connection((host, int(port)), timeout=1, source_address=(host, 0)).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, OverflowError):
        pass
    return False


def why_not_believed(path: Path) -> str:
    """Return why someone else than root and this user could have written a file; `""`: nobody could have.

    Follows symbolic links itself, since each link and each folder on the way counts. Raises OSError, for example
    FileNotFoundError.
    """
    here, rest, links = Path("/"), [part for part in reversed(path.parts) if part != "/"], 0
    closed: set[Path] = set()  # folders that others cannot enter
    while True:
        status = here.lstat()
        mode = status.st_mode
        if status.st_uid not in _believed_users():
            return f"{here} belongs to the user with id {status.st_uid}"
        if stat.S_ISLNK(mode):
            links += 1
            if links > _MAX_LINKS:
                return f"{here} is one of too many symbolic links"
            rest += reversed(here.readlink().parts)
            here = here.parent
        elif mode & (stat.S_IWGRP | stat.S_IWOTH) and closed.isdisjoint(here.parents) and not _is_sticky_folder(mode):
            return f"other users may write to {here}"
        elif stat.S_ISDIR(mode):
            closed |= set() if mode & (stat.S_IXGRP | stat.S_IXOTH) else {here}
        elif rest:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(here))
        elif not stat.S_ISREG(mode):
            return f"{here} is not a regular file"
        if not rest:
            return ""
        here = Path(os.path.normpath(here / rest.pop()))


def _is_sticky_folder(mode: int) -> bool:
    """Return whether everyone may make files in a folder, as in /tmp, but replace no one else's."""
    return stat.S_ISDIR(mode) and bool(mode & stat.S_ISVTX)


def _believed_users() -> frozenset[int]:
    return frozenset((0, os.geteuid()))


# Environment variables.


def _variables(environ: Mapping[str, str]) -> Iterator[Sign]:
    for name, why in _FOREIGN_VARIABLES.items():
        if environ.get(name):
            yield Sign(where=f"the variable {name}", why=f"{why}, but RAY_ADDRESS is not set and no raylet runs here")
