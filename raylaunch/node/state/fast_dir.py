"""The files in RAYLAUNCH_FAST_DIR of a node, and beside them copies of the files of other nodes: whose they are.

The folder is the kernel's (`ram_folder`). What goes over the network is in `transfer`. On a cluster the subreaper has a
lock on the folder (`hold`), and if its agent was killed, it removes the folder only if no other agent of the run takes
it over (`inheritance`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from raylaunch.node.linux import processes, ram_folder, scratch
from raylaunch.node.linux.ram_folder import RamFolder

MOST_FILES = 10_000
"""A folder with more files is not copied: to look for changes would take too long."""
_MOST_NAME = 1000
_COPIES, _INCOMING, _OWNERS = "copies", "incoming", "owners.json"


class TooManyFilesError(Exception):
    """The folder has more than `MOST_FILES` files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesOwner:
    """Whose files some are: a node, and the ranks that it had when they were complete there."""

    node: str
    attempt: int
    first_rank: int
    nproc: int
    world_size: int

    def __post_init__(self) -> None:
        """Raise ValueError for what another host may tell, and cannot be."""
        if min(self.attempt, self.first_rank, self.nproc, self.world_size - 1) < 0:
            msg = "no owner of files"
            raise ValueError(msg)

    def has(self, rank: int) -> bool:
        """Return whether the rank, of a world of any size, would have found its files there."""
        return self.first_rank <= rank % self.world_size < self.first_rank + self.nproc


@dataclass(frozen=True, slots=True)
class FileStamp:
    """Size and mtime of a file. While they are equal, the file is unchanged."""

    size: int
    mtime_ns: int


class FastDir:
    """The files of one node in a run, and the copies of others beside them. Any thread may call the methods."""

    def __init__(self, folder: RamFolder | None = None) -> None:
        """`folder`: the node's, which its owner makes and removes; None: it has none yet."""
        self._ram_folder = folder or RamFolder()
        #: The folder, and what workers get of it.
        self.root, self.path = self._ram_folder.root, self._ram_folder.path
        self._lock = threading.RLock()
        #: By it the next agent of the run finds what this one leaves; "": there is none.
        self.run = ""
        #: By node, "" for the folder itself: whose files there are, now and in an attempt before.
        self._owners: dict[str, tuple[FilesOwner, ...]] = {}
        #: The bytes in the folder, and in copies by node, as they were when somebody looked last.
        self.own_bytes = 0
        self._copied_bytes: dict[str, int] = {}
        #: When copies were used last, by time.monotonic().
        self._used_at: dict[str, float] = {}

    def hold(self) -> int:
        """Return a descriptor with a lock, whose holder keeps all for the next agent of the run; -1: none."""
        with self._lock:
            fd = self._ram_folder.hold()
            self._save()
            return fd

    def _at(self, *names: str) -> str:
        return os.path.join(self.root, *names)

    # Whose files there are.

    @property
    def own(self) -> FilesOwner | None:
        """Whose files the folder has; None: it was not used in an attempt yet."""
        return self._owners[""][-1] if "" in self._owners else None

    def owners(self, before: float = math.inf) -> dict[str, FilesOwner]:
        """Return whose files there are, or were in the last attempt before this one: by node, "" for the folder itself.

        Nodes that have begun an attempt must not hide from others whose files they had.
        """
        with self._lock:
            found = {node: [one for one in known if one.attempt < before] for node, known in self._owners.items()}
        return {node: known[-1] for node, known in found.items() if known}

    @property
    def copied_bytes(self) -> int:
        """The bytes in all copies of others' files."""
        with self._lock:
            return sum(self._copied_bytes.values())

    def become(self, own: FilesOwner) -> None:
        """Record that the folder has all files that the node's ranks need."""
        with self._lock:
            self._add("", own)

    def _add(self, node: str, owner: FilesOwner) -> None:
        before = [one for one in self._owners.get(node, ()) if one.attempt != owner.attempt]
        self._owners[node] = (*before[-1:], owner)
        self._save()

    def copied(self, owner: FilesOwner) -> None:
        """Record that the copies of a node's files are complete."""
        with self._lock:
            scratch.create(self.folder(owner.node))  # there may be no file yet that could be copied
            found = scan(self.folder(owner.node)).values()
            self._copied_bytes[owner.node] = sum(stamp.size for stamp in found)
            self._add(owner.node, owner)

    def added(self, node: str, size: int) -> None:
        """Record the copy of one more file. `size`: in bytes."""
        with self._lock:
            self._copied_bytes[node] = self._copied_bytes.get(node, 0) + size

    def forget_before(self, attempt: int, seconds: float) -> None:
        """Remove a node's copies that were last complete before this attempt, and not used in the last `seconds`."""
        with self._lock:
            for node, owner in self.owners().items():
                is_unused = time.monotonic() - self._used_at.get(node, 0.0) > seconds
                if node and owner.attempt < attempt and is_unused:
                    del self._owners[node]
                    self._copied_bytes.pop(node, None)
                    scratch.remove(self.folder(node))
                    self._save()

    def _save(self) -> None:
        """Leave a note for an agent that takes the place of this one."""
        owners = {node: asdict(known[-1]) for node, known in self._owners.items()}
        with contextlib.suppress(OSError):
            scratch.create(self._at(_INCOMING))
            path = self._at(_INCOMING, _OWNERS)
            Path(path).write_text(json.dumps({"run": self.run, "owners": owners}))
            os.replace(path, self._at(_OWNERS))

    def adopt(self, root: str) -> None:
        """Take over the folder of an agent of the run that was killed, and remove it."""
        with self._lock, contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            for node, found in json.loads(Path(root, _OWNERS).read_text())["owners"].items():
                owner = FilesOwner(**found)
                if not node and self.own is None:
                    self.become(owner)
                with contextlib.suppress(OSError):
                    if node:
                        os.rename(os.path.join(root, _COPIES, node), self.folder(node))
                        self.copied(owner)
        old = ram_folder.files_in(root)
        with contextlib.suppress(OSError, TooManyFilesError):
            for name, stamp in scan(old).items():
                with contextlib.suppress(OSError):
                    self.link(old, name, stamp)
        scratch.remove(root)

    # Files.

    def folder(self, node: str = "") -> str:
        """Return where the copies of a node's files are; "": the folder itself. Raises ValueError for no valid name."""
        if not node:
            return self.path
        if "/" in node:
            msg = f"no name of a node: {node!r}"
            raise ValueError(msg)
        self._used_at[node] = time.monotonic()
        with contextlib.suppress(OSError):
            scratch.create(self._at(_COPIES))
        return self._at(_COPIES, checked(node))

    def link(self, folder: str, name: str, stamp: FileStamp) -> None:
        """Link a file of another folder on this host into this one, unless what is there is as new. Raises OSError."""
        with self.incoming() as (path, _):
            os.unlink(path)
            os.link(os.path.join(folder, checked(name)), path, follow_symlinks=False)
            self.place(path, self.path, name, stamp)

    @contextlib.contextmanager
    def incoming(self, size: int = 0) -> Iterator[tuple[str, int]]:
        """Give path and descriptor of a new file beside the folder, for which there is memory. Raises OSError.

        It is removed unless it is placed.
        """
        scratch.create(self._at(_INCOMING))
        path = self._at(_INCOMING, secrets.token_hex(8))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if size:
                os.posix_fallocate(fd, 0, size)
            yield path, fd
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(path)

    def place(self, incoming: str, folder: str, name: str, stamp: FileStamp) -> None:
        """Give a file its name in a folder, if there is none that is newer. Raises OSError."""
        path = os.path.join(folder, checked(name))
        _make_parents(folder, name)
        with self._lock:
            there = stamp_of(path)
            if folder != self.path or there is None or there.mtime_ns < stamp.mtime_ns:
                os.utime(incoming, ns=(stamp.mtime_ns, stamp.mtime_ns))
                os.replace(incoming, path)


def checked(name: str) -> str:
    """Return the name of a file, which another host may have told. Raises ValueError unless it is below its folder."""
    parts = name.split("/")
    if not name or len(name) > _MOST_NAME or "\0" in name or any(part in ("", ".", "..") for part in parts):
        msg = f"no name of a file: {name[:_MOST_NAME]!r}"
        raise ValueError(msg)
    return name


def _make_parents(folder: str, name: str) -> None:
    """Make the subfolders of a name. Raises OSError, also where one is a link, which may lead anywhere."""
    scratch.create(folder)
    for part in name.split("/")[:-1]:
        folder = os.path.join(folder, part)
        scratch.create(folder)


def stamp_of(file: str | int) -> FileStamp | None:
    """Return the stamp of a file, given by its path or descriptor; None: there is none."""
    try:
        found = os.stat(file) if isinstance(file, int) else os.lstat(file)
    except OSError:
        return None
    return FileStamp(found.st_size, found.st_mtime_ns)


def scan(folder: str) -> dict[str, FileStamp]:
    """Return all regular files of a folder and its subfolders, by their names; no links are followed.

    Raises TooManyFilesError, and OSError where there is no folder.
    """
    found: dict[str, FileStamp] = {}
    with os.scandir(folder) as entries:
        _scan(entries, "", found)
    return found


def _scan(entries: Iterator[os.DirEntry[str]], prefix: str, found: dict[str, FileStamp]) -> None:
    for entry in entries:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it is gone meanwhile
            if entry.is_dir(follow_symlinks=False):
                with os.scandir(entry.path) as inner:
                    _scan(inner, f"{prefix}{entry.name}/", found)
            elif entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                found[prefix + entry.name] = FileStamp(status.st_size, status.st_mtime_ns)
                if len(found) > MOST_FILES:
                    raise TooManyFilesError


def prune(folder: str, names: set[str]) -> None:
    """Remove all files of a folder but these, and subfolders that are empty then."""
    for base, folders, files in os.walk(folder, topdown=False):
        prefix = "" if base == folder else os.path.relpath(base, folder) + "/"
        for name in files:
            if prefix + name not in names:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(base, name))
        for name in folders:
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(os.path.join(base, name))


def open_complete(folder: str, name: str, *, settled: float = 0.1) -> int | None:
    """Open a file to read it; None: somebody is writing it, or it has just got its name, and may get another one.

    Raises OSError.
    """
    fd = os.open(os.path.join(folder, checked(name)), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    age = abs(time.time() - os.fstat(fd).st_ctime)
    if age < settled or is_written(fd, age):
        os.close(fd)
        return None
    return fd


def is_written(fd: int, age: float) -> bool:
    """Return whether a process has the file open to write it: then the kernel gives no read lease (fcntl(2))."""
    try:
        # The signal for a writer that comes before the lease is given back; SIGURG does nothing by default.
        fcntl.fcntl(fd, processes.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError:  # the file is another user's, or the system has no leases
        return age < 1.0
    return False


def abandoned(run: str) -> Iterator[str]:
    """Yield the folders of agents of this run that were killed on this host. Each is locked until the next one."""
    for root in ram_folder.all_on_host():
        if _run_of(root) == run:
            with scratch.locked(os.path.join(root, scratch.AGENT_LOCK)) as is_locked:
                if is_locked:
                    yield root


def _run_of(root: str) -> str:
    """Return the run whose agent has left a folder; "": it is not known."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        if os.lstat(root).st_uid == os.geteuid():
            return str(json.loads(Path(root, _OWNERS).read_text())["run"])
    return ""
