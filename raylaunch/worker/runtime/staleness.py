"""Tells whether modules that this process has imported were changed on disk since."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import ModuleType

_PACKAGE_FOLDERS = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class _Preloaded:
    """What a process had imported before this one was forked from it."""

    count: int
    last: ModuleType
    """The module that was imported last."""
    own_files: tuple[str, ...]


preloaded: list[_Preloaded] = []
"""At most one."""


def note_preloaded() -> None:
    """Note what is imported, before forks. So forked processes look at no module that they have not imported.

    To look at one is to write to its memory, since that counts references; and a page of memory that a fork shares with
    its parent is copied before it is written. For the modules of torch and its compiler this takes 12 ms.
    """
    modules = list(sys.modules.values())
    preloaded[:] = [_Preloaded(len(modules), modules[-1], tuple(_own_files(modules)))]


def changed_since(began: float) -> bool:
    """Return whether an imported module was changed, or a package installed, after `began`, a time.time()."""
    return any(_changed_at(path) > began for path in (*_package_folders(), *_own_files(list(sys.modules.values()))))


class ImportedFiles:
    """The files of the modules that this process has imported by now, except installed packages."""

    def __init__(self) -> None:
        before = (path for known in preloaded for path in known.own_files)
        self._found = {path: _version(path) for path in (*before, *_own_files(_imported_here()))}

    def have_changed(self) -> bool:
        """Return whether one of them is another than it was. One that is gone is not."""
        return any(_version(path) not in (known, None) for path, known in self._found.items())


def _package_folders() -> list[str]:
    """Return the folders that every installation changes."""
    return [path for path in sys.path if os.path.basename(path) in _PACKAGE_FOLDERS]


def _imported_here() -> list[ModuleType]:
    """Return the modules that this process has imported after `note_preloaded` was called in its parent, or all."""
    for known in preloaded:
        # The newest modules are at the end, but for the script, which is in the place of the parent's.
        new = list(islice(reversed(sys.modules.values()), len(sys.modules) - known.count + 1))
        if new and new[-1] is known.last:
            return [*new[:-1], *filter(None, [sys.modules.get("__main__")])]
    return list(sys.modules.values())


def _own_files(modules: Iterable[ModuleType]) -> Iterator[str]:
    """Yield the files of the modules that are in no such folder, and not Python's own."""
    folders = _package_folders()
    installed = (*(folder + os.sep for folder in folders), sys.base_prefix + os.sep, sys.prefix + os.sep)
    for module in modules:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not file.startswith(installed):
            yield file


def _changed_at(path: str) -> float:
    """Return when the file was changed or replaced, as a time.time(); 0.0 if it is gone.

    A file that replaces another may have an older st_mtime; its st_ctime is the time of the replacement. A file that
    is gone cannot be imported again, so what was imported of it is the newest there is.
    """
    try:
        found = os.stat(path)
    except OSError:
        return 0.0
    return max(found.st_mtime, found.st_ctime)


def _version(path: str) -> tuple[int, int] | None:
    """Return what is another number when a file has other contents; None: it is gone."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_mtime_ns, found.st_size
    return None
