"""Parts of setting up a forked process, which the node's other processes use too: its parent, files and folders."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import stat
from collections.abc import Callable, Iterator

from raylaunch.worker.descriptors import Identity, identity, is_still
from raylaunch.worker.path_owners import refuse_strangers

_PR_SET_PDEATHSIG = 1
"""From `linux/prctl.h`."""
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS})
"""The errors of a process or a machine that lacks files, processes or memory, which others may give back soon."""
title_setters: list[Callable[[str], None]] = []
"""What shows this process under another title in `ps`; empty: nothing can, as in a fresh interpreter."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def encodable(text: str) -> str:
    """Return a text that the file system encoding of this process has, for a path, an argument or a variable.

    In a locale that is not UTF-8, it stands for the bytes that the text has in UTF-8. The result cannot be encoded
    either if the text has surrogates that stand for no byte (PEP 383).
    """
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        with contextlib.suppress(UnicodeEncodeError):
            return os.fsdecode(text.encode("utf-8", "surrogateescape"))
    return text


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies; exit at once if the parent is dead already."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def close_other_fds(*fds: int) -> None:
    """Close every file descriptor above stderr except `fds`, and NVML's, which may be in use."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in fds:  # noqa: PLR2004
            with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed by now
                if not is_of_nvml(os.readlink(f"/proc/self/fd/{name}")):
                    os.close(int(name))


def is_of_nvml(path: str) -> bool:
    """Return whether a file is one that NVML opens, which a forked process may use too. CUDA opens /dev/nvidia-uvm."""
    return path.startswith("/dev/nvidia") and not path.startswith("/dev/nvidia-uvm")


@contextlib.contextmanager
def environment_default(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for this block, unless it is set."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


_output: dict[int, Identity] = {}
"""What the descriptors of stdout and stderr are of, as this process was given them."""


def note_output() -> None:
    """Note what stdout and stderr are, before a script can put something else there."""
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            _output[fd] = identity(fd)


def append_output(stdout: str, stderr: str) -> None:
    """Let this process append its output to these files of a run folder, which are made. Raises OSError.

    A stream that the script has redirected, or whose number belongs to a file of the script, stays as it is.
    """
    for fd, path in ((1, stdout), (2, stderr)):
        if fd in _output and not is_still(fd, _output[fd]):
            continue
        make_private_dir(os.path.dirname(path), private_parents=2)  # the attempt's and the run's folder
        # The driver made the run folder. Its user may be another one than this process's.
        refuse_strangers(os.path.dirname(path), (), links_only=True)
        opened = without_waiting(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW)
        if opened != fd:
            os.dup2(opened, fd)
            os.close(opened)
        _output[fd] = identity(fd)


def without_waiting(path: str, flags: int) -> int:
    """Open a regular file as an `opener` of `open`, and make it for its owner alone.

    Raises OSError for a named pipe or a device, which a script may have put there: to open it, to read it and to write
    to it may wait for ever.
    """
    fd = os.open(path, flags | os.O_NONBLOCK, 0o600)
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # of a folder, `open` says that it is one
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    os.set_blocking(fd, True)
    return fd


def make_private_dir(path: str, *, private_parents: int) -> None:
    """Make a folder that only its owner can read, whatever the umask; one that exists is left as it is.

    As many of its parents as `private_parents` says are made in the same way, and those above them with the usual
    mode. Raises OSError.
    """
    with contextlib.suppress(FileExistsError):
        try:
            os.mkdir(path, 0o700)
        except FileNotFoundError:
            parent = os.path.dirname(path)
            if private_parents:
                make_private_dir(parent, private_parents=private_parents - 1)
            else:
                os.makedirs(parent, exist_ok=True)
            os.mkdir(path, 0o700)
