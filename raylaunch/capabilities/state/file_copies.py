"""The agent's part for files of RAYLAUNCH_FAST_DIR: copies them to another host, and fetches what its ranks lack."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import NoneType

from raylaunch.core.machine.commits import CopyAddress
from raylaunch.core.placement.environment import Assignment
from raylaunch.core.text import printable
from raylaunch.node.linux import limits
from raylaunch.node.state import fast_dir, transfer
from raylaunch.node.state.fast_dir import FastDir, FilesOwner, FileStamp, TooManyFilesError
from raylaunch.node.state.state_memory import StateMemory
from raylaunch.node.state.transfer import CopyRefusedError

_LOOK_SECONDS, _MOST_LOOK_SECONDS = 0.2, 5.0
"""How often is looked for files that are to be copied; more rarely where to list them takes long."""
_LOOK_SHARE = 0.05
_REFUSED_SECONDS = 60.0
"""Seconds before a refused file is offered to the other agent again: it may have room by then."""
_FAILING_SECONDS = 10.0
"""Seconds of failures before the agent reports them. If a host is lost, the driver names another target sooner."""
_FETCH_TRIES = 3
_RETRY_SECONDS = 0.3
_ASK_SECONDS = 3.0
"""How long another agent may take to say which files it has."""
_KEPT_SECONDS = 120.0
"""How long copies stay that nobody uses, of a node that copies to another one now, or is lost."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where files of a node are: at another agent, or here in the copies (None)."""

    owner: FilesOwner
    at: CopyAddress | None
    is_copy: bool

    @property
    def node(self) -> str:
        """How that agent calls them: by the node's name if they are copies, else "", its own."""
        return self.owner.node if self.is_copy else ""


class FilePushes:
    """Copies the node's files to another agent, whenever they have changed."""

    def __init__(self, folder: FastDir, secret: str, is_interrupted: Callable[[], bool]) -> None:
        """`is_interrupted`: whether to break off copying."""
        self._folder = folder
        self._secret = secret
        self._is_interrupted = is_interrupted
        #: What was copied last: where to, whose files, and which.
        self._done: tuple[object, ...] = ()
        #: Until when that need not be done again, by time.monotonic().
        self._done_until = math.inf
        #: Since when copies to this agent have failed, by time.monotonic().
        self._failing: tuple[CopyAddress | None, float] = None, math.inf

    def push(self, target: CopyAddress, own: FilesOwner, files: dict[str, FileStamp]) -> None:
        """Copy what has changed of these files.

        Raises CopyRefusedError, and OSError, also where it is interrupted or a file cannot be read.
        """
        state = (target, own, tuple(files.items()))
        if (self._done == state and time.monotonic() < self._done_until) or not (files or self._done):
            return
        try:
            if self._push(target, own, files):
                self._done, self._done_until = state, math.inf
        except CopyRefusedError:
            self._done, self._done_until = state, time.monotonic() + _REFUSED_SECONDS
            self._failing = target, math.inf
            raise
        self._failing = target, math.inf

    def note_failure(self, target: CopyAddress) -> bool:
        """Note that copying to this agent has failed. Return whether it has done so for a while."""
        now = time.monotonic()
        failing, since = self._failing
        self._failing = target, min(since, now) if failing == target else now
        return now - self._failing[1] > _FAILING_SECONDS

    def _push(self, target: CopyAddress, own: FilesOwner, found: dict[str, FileStamp]) -> bool:
        """Copy what the other agent lacks. Return whether it has all; False: some files are being written."""
        is_complete, refused = True, ""
        with transfer.connection(target, self._secret) as line:
            lacking = transfer.ask(line, set[str], "offer", owner=own, files=found)
            # Files that name others are written after them, and so they are copied after them.
            for name in sorted(lacking & found.keys(), key=lambda each: (found[each].mtime_ns, each)):
                try:
                    is_complete &= self._put(line, own.node, name, found[name])
                except CopyRefusedError as error:
                    refused = refused or str(error)
            transfer.ask(line, NoneType, "finish", owner=own, files=found)
        if refused:
            raise CopyRefusedError(refused)
        return is_complete

    def _put(self, line: socket.socket, node: str, name: str, stamp: FileStamp) -> bool:
        try:
            fd = fast_dir.open_complete(self._folder.path, name)
        except OSError:  # it is gone
            return False
        if fd is None:
            return False
        try:
            if fast_dir.stamp_of(fd) != stamp:
                return False
            transfer.ask(line, NoneType, "put", node=node, name=name, stamp=stamp)
            is_whole = transfer.send_file(
                line,
                fd,
                stamp.size,
                lambda: fast_dir.stamp_of(fd) == stamp,
                is_stopped=self._is_interrupted,
                rate=transfer.COPY_BYTES_PER_SECOND,
            )
            with contextlib.nullcontext() if is_whole else contextlib.suppress(CopyRefusedError):
                transfer.read_answer(line, NoneType)
            return is_whole
        finally:
            os.close(fd)


class FileFetches:
    """Gets the files that a node's ranks had elsewhere, when an attempt begins."""

    def __init__(self, folder: FastDir, secret: str) -> None:
        self._folder = folder
        self._secret = secret

    def fetch(self, assignment: Assignment, peers: tuple[CopyAddress, ...]) -> None:
        """Get what the node lacks from these agents, and from its own copies. Raises CopyRefusedError and OSError."""
        for source in self._sources(assignment, peers):
            self._fetch(source)

    def _sources(self, assignment: Assignment, peers: tuple[CopyAddress, ...]) -> list[_Source]:
        """Return whose files the node's ranks need, of those that there are, but for its own."""
        own = self._folder.owners(before=assignment.attempt)
        found = [_Source(owner, None, is_copy=bool(node)) for node, owner in own.items()]
        for peer in peers:
            if peer.node == assignment.node:
                continue
            with contextlib.suppress(OSError), transfer.connection(peer, self._secret, seconds=_ASK_SECONDS) as line:
                theirs = transfer.ask(line, dict[str, FilesOwner], "owners", before=assignment.attempt)
                found += [_Source(owner, peer, is_copy=bool(node)) for node, owner in theirs.items()]
        chosen = [source for rank in assignment.ranks if (source := choose(rank, found)) is not None]
        return [one for one in dict.fromkeys(chosen) if one.at is not None or one.is_copy]

    def _fetch(self, source: _Source) -> None:
        if source.at is None:
            folder = self._folder.folder(source.node)
            for name, stamp in fast_dir.scan(folder).items():
                self._folder.link(folder, name, stamp)
            return
        with transfer.connection(source.at, self._secret) as line:
            for name, stamp in transfer.ask(line, dict[str, FileStamp], "list", node=source.node).items():
                self._fetch_file(line, source, name, stamp)

    def _fetch_file(self, line: socket.socket, source: _Source, name: str, stamp: FileStamp) -> None:
        there = fast_dir.stamp_of(os.path.join(self._folder.path, fast_dir.checked(name)))
        if there is not None and there.mtime_ns >= stamp.mtime_ns:
            return
        folder = self._folder.folder(source.owner.node)
        if fast_dir.stamp_of(os.path.join(folder, name)) == stamp:
            if source.is_copy:
                self._folder.link(folder, name, stamp)
            else:  # the copy is still that node's: a script that overwrites its file in place must not change it
                with self._folder.incoming(stamp.size) as (path, _):
                    shutil.copyfile(os.path.join(folder, name), path)
                    self._folder.place(path, self._folder.path, name, stamp)
            return
        try:
            now = transfer.ask(line, FileStamp, "get", node=source.node, name=name)
        except CopyRefusedError:
            return  # it is gone, or was not complete when its writer ended
        with self._folder.incoming(now.size) as (path, fd):
            transfer.receive_file(line, fd, now.size)
            self._folder.place(path, self._folder.path, name, now)


class FileCopies:
    """Copies a node's files, in one thread from the first attempt on. Its methods are called in the event loop.

    They return at once.
    """

    def __init__(
        self, memory: StateMemory, secret: str, report: Callable[[str], None], found_files: Callable[[], None]
    ) -> None:
        """`secret`: what the agents of the run say.

        `report` is given sentences for a person, and `found_files` is called again and again while there are files,
        in the thread.
        """
        self._memory = memory
        self._folder = memory.files.folder
        self._report = report
        self._found_files = found_files
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        #: Held by the event loop and the thread while they use the two fields that follow; the others are the thread's.
        self._lock = threading.Lock()
        #: The assignment of an attempt whose files are being fetched, and where they may be.
        self._launch: tuple[Assignment, tuple[CopyAddress, ...]] | None = None
        self._target: CopyAddress | None = None
        self._pushes = FilePushes(self._folder, secret, self._is_interrupted)
        self._fetches = FileFetches(self._folder, secret)

    def launched(self, assignment: Assignment, peers: tuple[CopyAddress, ...]) -> bool:
        """Copy for the ranks of this attempt from now on. Return whether its workers wait for files of these agents."""
        own, mine = self._folder.own, _owner(assignment)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="raylaunch-files")
            self._thread.start()
        is_same = own is not None and replace(own, attempt=mine.attempt, world_size=mine.world_size) == mine
        is_complete = not peers or (is_same and own is not None and own.attempt == mine.attempt - 1)
        with self._lock:
            self._launch, self._target = None if is_complete else (assignment, peers), None
            if is_complete:
                self._folder.become(mine)
        self._wake.set()
        return not is_complete

    def copy_to(self, target: CopyAddress) -> None:
        """Copy files to this agent from now on."""
        with self._lock:
            self._target = target
        self._wake.set()

    def close(self) -> None:
        """Tell the thread to end, and do not wait for it. A file that it is sending may not arrive."""
        self._stop.set()
        self._wake.set()

    # In the thread.

    def _run(self) -> None:
        transfer.lower_priority()
        pause = _LOOK_SECONDS
        while not self._stop.is_set():
            self._wake.wait(pause)
            self._wake.clear()
            with self._lock:
                launch = self._launch
            if launch is not None:
                self._complete(launch)
            if self._stop.is_set():
                return
            try:
                pause = self._look()
            except Exception as error:  # noqa: BLE001  # whatever it is, other files may be copied
                self._say(f"files of RAYLAUNCH_FAST_DIR are not copied: {type(error).__name__}: {error}")

    def _is_interrupted(self) -> bool:
        with self._lock:
            return self._stop.is_set() or self._launch is not None

    def _look(self) -> float:
        """Copy what has changed since the last time. Return after how many seconds to look again."""
        began = time.monotonic()
        try:
            found = fast_dir.scan(self._folder.path)
        except TooManyFilesError:
            self._say(f"RAYLAUNCH_FAST_DIR has more than {fast_dir.MOST_FILES} files, which are not copied")
            return _MOST_LOOK_SECONDS
        except OSError:
            return _MOST_LOOK_SECONDS  # the run is over
        pause = min(_MOST_LOOK_SECONDS, max(_LOOK_SECONDS, (time.monotonic() - began) / _LOOK_SHARE))
        self._copy(found)
        return pause

    def _copy(self, found: dict[str, FileStamp]) -> None:
        """Copy what has changed of these files."""
        self._folder.own_bytes = sum(stamp.size for stamp in found.values())
        if found:
            self._found_files()
        with self._lock:
            own, target = self._folder.own, self._target
        if own is not None:
            self._folder.forget_before(own.attempt, _KEPT_SECONDS)
        if own is None or target is None:
            return
        try:
            self._pushes.push(target, own, found)
        except CopyRefusedError as error:
            self._say(f"{own.node} has no copy of files on {target.node}: {error}")
        except OSError as error:  # that agent may be gone, and the driver names another one
            if not self._is_interrupted() and self._pushes.note_failure(target) and self._is_target(target):
                self._say(f"{own.node} has no copy of files on {target.node}: {error or type(error).__name__}")

    def _is_target(self, target: CopyAddress) -> bool:
        with self._lock:
            return target == self._target

    # At the beginning of an attempt.

    def _complete(self, launch: tuple[Assignment, tuple[CopyAddress, ...]]) -> None:
        """Get the files that the node's ranks had elsewhere, and let the workers begin."""
        error: Exception | None = None
        assignment, peers = launch
        for _ in range(_FETCH_TRIES):
            try:
                self._fetches.fetch(assignment, peers)
                error = None
                break
            except Exception as failure:  # noqa: BLE001  # whatever it is, the workers wait
                error = failure
            is_over = self._stop.wait(_RETRY_SECONDS)
            with self._lock:
                if is_over or self._launch is not launch:
                    return
        with self._lock:
            if self._launch is not launch:
                return
            self._launch = None
            if error is None:
                self._folder.become(_owner(assignment))
        if error is not None:
            why = limits.explained(error, "the agent") if isinstance(error, OSError) else str(error)
            self._say(f"{assignment.node} does not have all files of its ranks in RAYLAUNCH_FAST_DIR: {why}")
        self._memory.files_ready(assignment.attempt)

    def _say(self, text: str) -> None:
        self._report(printable(text))


def _owner(part: Assignment) -> FilesOwner:
    return FilesOwner(
        node=part.node,
        attempt=part.attempt,
        first_rank=part.base_rank,
        nproc=part.nproc,
        world_size=part.world_size,
    )


def choose(rank: int, found: list[_Source]) -> _Source | None:
    """Return whose files a rank needs: of those who had it in the newest attempt, the first; None: nobody had it."""
    for attempt in sorted({one.owner.attempt for one in found}, reverse=True):
        having = [one for one in found if one.owner.attempt == attempt and one.owner.has(rank)]
        if having:
            return min(having, key=lambda one: (one.is_copy, one.at is not None))
    return None
