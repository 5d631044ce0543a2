"""What a forked process does before it runs something else: session, signals, files, folder and environment.

`set_up_process` makes a child of the fork server look as if the shell had started it. Other processes that are forked
from the fork server use the parts that they need.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

from raylaunch.worker.runtime.spec import WorkerSpec

_PR_SET_PDEATHSIG = 1
"""From `linux/prctl.h`."""
_LIBC = ctypes.CDLL(None, use_errno=True)


def set_up_process(spec: WorkerSpec, report_fd: int, stacks_fd: int, parent: int, imports_fd: int = -1) -> None:
    """Give this process a session of its own, default signals, the worker's output files, folder and environment.

    `parent` is the process id of the fork server; this process is killed when that one dies. Of the file descriptors
    above stderr, only the three that are named here stay open; -1 stands for none. Raises OSError where a file or a
    folder cannot be opened, and ValueError where the environment has a value that no environment can hold.
    """
    os.setsid()
    die_with_parent(parent)
    _reset_signals()
    _redirect(spec)
    close_other_fds(report_fd, stacks_fd, imports_fd)
    os.environ.update(spec.env)  # variables that the interpreter or a preloaded module set stay, as in a fresh process
    os.chdir(spec.cwd)


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
    """Have the kernel kill this process when its parent dies; exit at once if the parent is dead already."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def close_other_fds(*fds: int) -> None:
    """Close every file descriptor above stderr except `fds`."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in fds:  # noqa: PLR2004
            with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed by now
                os.close(int(name))


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


def _reset_signals() -> None:
    """Set signals as a fresh interpreter has them: defaults, KeyboardInterrupt on SIGINT, SIGPIPE ignored."""
    signal.set_wakeup_fd(-1)
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):  # SIGKILL, SIGSTOP, and two that belong to the C library
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _redirect(spec: WorkerSpec) -> None:
    """Read stdin from /dev/null, and append stdout and stderr to the worker's log files."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for fd, path in ((1, spec.stdout), (2, spec.stderr)):
        make_private_dir(os.path.dirname(path), private_parents=2)  # those of the attempt and of the run
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        os.dup2(opened, fd)
        os.close(opened)
