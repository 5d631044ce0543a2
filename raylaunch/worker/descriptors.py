"""What an open descriptor is of: scripts close descriptors that are not theirs, and reuse their numbers."""

from __future__ import annotations

import os

Identity = tuple[int, int]
"""Device and inode of an open file: what its number stands for, as long as nobody closes it."""


def identity(fd: int) -> Identity:
    """Return what this descriptor is of. Raises OSError where it is closed."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def is_still(fd: int, known: Identity) -> bool:
    """Return whether this descriptor is of what it was of. A script may have closed it and opened a file of its own."""
    try:
        return identity(fd) == known
    except OSError:
        return False
