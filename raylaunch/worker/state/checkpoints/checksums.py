"""Checksums of a checkpoint's files, in a file beside them: `sha256sum -c SHA256SUMS` reads it, too."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

FILE = "SHA256SUMS"
_CHUNK = 2**20
_DIGITS = 64


def of(path: str) -> str:
    """Return the checksum of a file, in hexadecimal. Raises OSError."""
    found, memory = hashlib.sha256(), memoryview(bytearray(_CHUNK))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(memory):
            found.update(memory[:size])
    return found.hexdigest()


def write(folder: str, sums: Mapping[str, str]) -> None:
    """Write the checksums of the files with these names. Raises OSError."""
    with open(os.path.join(folder, FILE), "w") as file:
        file.writelines(f"{sums[name]}  {name}\n" for name in sorted(sums))
        file.flush()
        os.fsync(file.fileno())


def damaged(folder: str, share: int = 0, shares: int = 1) -> str:
    """Return the name of a file that is not as it was written, "": there is none.

    `shares`: into how many parts the files are divided, of which this looks at one. A checkpoint of an earlier version
    of raylaunch has no checksums, and counts as whole.
    """
    try:
        with open(os.path.join(folder, FILE), errors="replace") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        return ""
    except OSError:
        return FILE
    for line in lines[share::shares]:
        wanted, _, name = line.partition("  ")
        if len(wanted) != _DIGITS or not name or "/" in name:
            return FILE
        try:
            is_same = of(os.path.join(folder, name)) == wanted
        except OSError:
            is_same = False
        if not is_same:
            return name
    return ""
