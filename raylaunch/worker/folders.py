"""Folders that are the user's alone, whatever the umask allows."""

from __future__ import annotations

import contextlib
import os


def make(folder: str, *, above: int) -> None:
    """Make it, and so many above it, as far as they are not there; what is above these has the usual mode.

    Raises OSError.
    """
    with contextlib.suppress(FileExistsError):
        try:
            os.mkdir(folder, 0o700)
        except FileNotFoundError:
            parent = os.path.dirname(folder)
            if above:
                make(parent, above=above - 1)
            else:
                os.makedirs(parent, exist_ok=True)
            os.mkdir(folder, 0o700)
