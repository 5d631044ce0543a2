"""Whether what a process has imported is still what is on the disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

_PACKAGES = ("site-packages", "dist-packages")


def since(began: float) -> bool:
    """Whether anything imported was changed, or a package installed, after this time.time().

    A file that was put in the place of another may be older than that one; the time at which that was done is not.
    """
    return any(_changed(path) > began for path in _sources())


def _sources() -> Iterator[str]:
    """Folders that every installation changes, and the files of modules that are in none of them."""
    folders = [path for path in sys.path if os.path.basename(path) in _PACKAGES]
    yield from folders
    installed = (*(folder + os.sep for folder in folders), sys.base_prefix + os.sep, sys.prefix + os.sep)
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and not file.startswith(installed):
            yield file


def _changed(path: str) -> float:
    """0.0 where it is gone: what was imported of it cannot be imported again, but has not changed either."""
    try:
        found = os.stat(path)
    except OSError:
        return 0.0
    return max(found.st_mtime, found.st_ctime)
