"""Tells whether modules that this process has imported were changed on disk since."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

_PACKAGE_FOLDERS = ("site-packages", "dist-packages")


def changed_since(began: float) -> bool:
    """Return whether an imported module was changed, or a package installed, after `began`, a time.time()."""
    return any(_changed_at(path) > began for path in _watched_paths())


def _watched_paths() -> Iterator[str]:
    """Yield the folders that every installation changes, and the files of imported modules that are in none of them."""
    folders = [path for path in sys.path if os.path.basename(path) in _PACKAGE_FOLDERS]
    yield from folders
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
