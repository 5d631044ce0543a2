"""Tells whether a stranger has put a path where it is: this user must not write there, or believe what is there."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection


def refuse_strangers(path: str, trusted: Collection[int], *, links_only: bool = False) -> None:
    """Raise PermissionError if another user put a part of the path into a folder in which everybody may write.

    That part may be a link, or be replaced by one: then this user's files would be written wherever it leads. Linux
    checks the same for links if `fs.protected_symlinks` is set. `trusted`: ids of users who may have made the folders,
    besides root and this user. `links_only`: folders may belong to anybody.
    """
    known = {0, os.geteuid(), *trusted}
    part = os.path.abspath(path)
    while (above := os.path.dirname(part)) != part:
        folder, found = os.stat(above), os.lstat(part)
        is_stranger = folder.st_mode & stat.S_IWOTH and found.st_uid not in known | {folder.st_uid}
        if is_stranger and (stat.S_ISLNK(found.st_mode) or not links_only):
            raise PermissionError(errno.EPERM, f"{part} belongs to another user, who put it where everybody may write")
        part = above
