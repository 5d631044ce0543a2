"""What a worker imports, written down for the fork server, which may have it ready for the next attempt."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from types import FrameType, ModuleType

_MOST = 20_000
"""Modules that are written down: a script that makes modules of its own has no end of them."""
_DEPTH = 2
"""Frames between a finder and what asks it: an import, or somebody who only wants to know where a module is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One module whose import began, or, without a name, the environment alone."""

    local_rank: int
    name: str
    where: tuple[str, ...]
    """The file or the folders that a top-level module comes from; the folder that another one is in."""
    env: dict[str, str | None]
    """How the environment differed at that time from the one that the worker was given."""


class Notes:
    """A finder of `sys.meta_path` that never finds anything. Imports go on as if it were not there."""

    def __init__(self, file: int, local_rank: int) -> None:
        self._file = file
        self._is = os.fstat(file).st_ino
        self._local_rank = local_rank
        self._given = dict(os.environ)
        self._seen: set[str] = set()
        self._known = dict(self._raw())
        self._env: dict[str, str | None] = {}
        os.register_at_fork(after_in_child=self._end)

    def begin(self) -> None:
        """From here on, all imports are noted."""
        sys.meta_path.insert(0, self)

    def _end(self) -> None:
        """A child of the worker is no worker."""
        self._file = -1

    def find_spec(self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None) -> None:
        """Take note of the first import of a module."""
        if self._file < 0 or fullname in self._seen or not _is_import(sys._getframe(1)):  # noqa: SLF001
            return
        self._seen.add(fullname)
        try:
            self._note(fullname, path)
        except Exception:  # noqa: BLE001
            self._file = -1  # whatever a script has done to what we look at, its import is not to fail of that

    def _note(self, name: str, path: Sequence[str] | None) -> None:
        changed = self._env_changed()
        if self._local_rank == 0:
            self._write(name, _where(name, path))
        elif changed:
            self._write("", ())

    def _env_changed(self) -> bool:
        if self._known == self._raw():
            return False
        self._known = dict(self._raw())
        names = self._given.keys() | os.environ.keys()
        changed = (name for name in names if self._given.get(name) != os.environ.get(name))
        self._env = {name: os.environ.get(name) for name in changed}
        return True

    @staticmethod
    def _raw() -> dict[bytes, bytes]:
        """The environment without the cost of decoding it, to be compared at each import."""
        found: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # noqa: SLF001
        return found

    def _write(self, name: str, where: tuple[str, ...]) -> None:
        if os.fstat(self._file).st_ino == self._is and len(self._seen) < _MOST:
            os.write(self._file, pickle.dumps((self._local_rank, name, where, self._env)))
        else:
            self._file = -1  # it may be a file of the script's by now, which is left alone


def read(data: bytes) -> Iterator[Note]:
    """All notes in a file; what is cut off at its end is left out."""
    file = io.BytesIO(data)
    try:
        while True:
            local_rank, name, where, env = pickle.load(file)  # noqa: S301
            yield Note(local_rank=local_rank, name=name, where=where, env=env)
    except (EOFError, pickle.UnpicklingError):
        return


def _is_import(frame: FrameType | None) -> bool:
    """Whether a module is asked for to be loaded."""
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_name == "_find_and_load_unlocked":
            return True
        frame = frame.f_back
    return False


def _where(name: str, path: Sequence[str] | None) -> tuple[str, ...]:
    folders = list(path) if path is not None else []
    if len(folders) == 1:
        return (folders[0],)
    try:
        found = PathFinder.find_spec(name, path)
    except Exception:  # noqa: BLE001
        return ()  # the import itself will tell
    if found is None:
        return ()
    return (found.origin,) if found.origin else tuple(found.submodule_search_locations or ())
