"""Tells whether modules that this process has imported were changed on disk since."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

_PACKAGE_FOLDERS = ("site-packages", "dist-packages")


def changed_since(began: float) -> bool:
    """Return whether an imported module was changed, or a package installed, after `began`, a time.time()."""
    return any(_changed_at(path) > began for path in (*_package_folders(), *_own_files()))


class ImportedFiles:
    """The files of the modules that this process has imported by now, except those of installed packages."""

    def __init__(self) -> None:
        self._found = {path: _version(path) for path in _own_files()}

    def have_changed(self) -> bool:
        """Return whether one of them is another than it was. One that is gone is not."""
        return any(_version(path) not in (known, None) for path, known in self._found.items())


def _package_folders() -> list[str]:
    """Return the folders that every installation changes."""
    return [path for path in sys.path if os.path.basename(path) in _PACKAGE_FOLDERS]


def _own_files() -> Iterator[str]:
    """Yield the files of imported modules that are in no such folder, and not Python's own."""
    folders = _package_folders()
    installed = (*(folder + os.sep for folder in folders), sys.base_prefix + os.sep, sys.prefix + os.sep)
    for module in list(sys.modules.values()):
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
