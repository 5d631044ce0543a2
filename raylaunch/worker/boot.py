"""Turns a fresh process into what `python train.py` would have been, runs the user's code, reports how it ended.

Runs in two ways: in a child of the fork server (`become`, then `run`), or as the program of a fresh interpreter,
`python -u boot.py SPEC_FD REPORT_FD STACKS_FD` (`start_method: spawn`).
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Started by path: make our own package importable without putting the current folder on sys.path.
    sys.path[: not sys.flags.safe_path] = [__file__.rsplit("/", 3)[0]]

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from raylaunch.worker import affinity, agent_store, attach, entry, folders, imports, parking, stacks
from raylaunch.worker.spec import Report, WorkerSpec

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_OUR_FOLDER = os.path.dirname(os.path.abspath(__file__))


def live(spec: WorkerSpec, report_fd: int, stacks_fd: int, notes_fd: int, parent: int, then: Callable[..., int]) -> int:
    """`become`, `then` what comes: `run`, or another way to it."""
    try:
        become(spec, report_fd, stacks_fd, parent, notes_fd)
    except (OSError, ValueError) as error:
        refuse(report_fd, error)
        return 1
    return then(spec, report_fd, stacks_fd, notes_fd)


def become(spec: WorkerSpec, report_fd: int, stacks_fd: int, parent: int, notes_fd: int = -1) -> None:
    """Take on the worker's surroundings: session, signals, files, folder, environment.

    `parent` is the process id of the fork server, whose death must be ours. Of its files, the one for our last words,
    the one for our stacks, and the one for what we import, if it is wanted, are kept open.
    """
    os.setsid()
    die_with_parent(parent)
    _reset_signals()
    _redirect(spec)
    keep_only(report_fd, stacks_fd, notes_fd)
    os.environ.update(spec.env)  # what the interpreter and the imports added to it stays, as in a script of its own
    os.chdir(spec.cwd)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill us when the parent dies; it may have died before we asked."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def keep_only(*fds: int) -> None:
    """Close every file descriptor above stderr but these."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in fds:  # noqa: PLR2004
            with contextlib.suppress(OSError):  # the folder's own descriptor is gone by now
                os.close(int(name))


def _reset_signals() -> None:
    """What a fresh Python has: everything default, SIGINT raising KeyboardInterrupt, SIGPIPE ignored, none blocked."""
    signal.set_wakeup_fd(-1)
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):  # SIGKILL, SIGSTOP, and two that belong to the C library
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _redirect(spec: WorkerSpec) -> None:
    """Put the worker's files where stdout and stderr were. With `-u`, a write goes straight there."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for fd, path in ((1, spec.stdout), (2, spec.stderr)):
        folders.make(os.path.dirname(path), above=2)  # its attempt's, and the run's
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, fd)
        os.close(opened)


def run(spec: WorkerSpec, report_fd: int, stacks_fd: int, notes_fd: int = -1) -> int:
    """Run the user's code as `__main__`; the exit code that Python would have ended with."""
    faulthandler.enable()
    _reseed()
    agent_store.remember(spec)
    try:
        affinity.bind(spec)
    except affinity.CannotBindError as error:
        print(f"raylaunch: {error}", file=sys.stderr)
        refuse(report_fd, error)
        return 1
    if spec.kind == "command":
        return _exec(spec, report_fd)
    stacks.register(stacks_fd)
    attach.begin()
    if notes_fd >= 0:
        imports.Notes(notes_fd, spec.local_rank).begin()
    try:
        value = entry.call(spec)
        parking.park_instead_of_an_end()
        report = Report(value=entry.pickled(value)) if spec.kind == "pickle" else None
    except SystemExit as stop:
        code = _exit_code(stop)
        if code == 0:
            parking.park_instead_of_an_end()
        return code
    except KeyboardInterrupt as error:
        _show(_users_part(error))
        sys.excepthook = lambda *_: None  # it is shown; the interpreter goes on with it: exit handlers, then SIGINT
        raise
    except entry.CannotBeginError as error:
        print(f"raylaunch: {error}", file=sys.stderr)
        refuse(report_fd, error)
        return 1
    except BaseException as error:  # noqa: BLE001
        _leave(report_fd, _report(_users_part(error), keep=spec.kind == "pickle"))
        _show(error)
        return 1
    if report is not None:
        _leave(report_fd, report)
    return 0


def _reseed() -> None:
    """Undo what a fork shares: NumPy's and torch's global generators, which each process seeds anew, would be the same.

    torch seeds those of CUDA devices only when it first uses them.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def _exec(spec: WorkerSpec, report_fd: int) -> int:
    """Become another program. Returns only where that fails."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python alone ignores these
    try:
        os.execvpe(spec.target, [spec.target, *map(str, spec.args)], spec.env)
    except OSError as error:
        hopeless = Report(
            error_type=type(error).__name__, message=f"cannot run `{spec.target}`: {error.strerror}", hopeless=True
        )
        print(f"{hopeless.error_type}: {hopeless.message}", file=sys.stderr)
        _leave(report_fd, hopeless)
        return 127


def _exit_code(stop: SystemExit) -> int:
    """Python's own rule for `sys.exit(x)`."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 0xFF
    print(stop.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """Print the traceback, by the user's own hook if there is one."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as failed:  # noqa: BLE001
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(_users_part(failed))
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(error)


def _users_part(error: BaseException) -> BaseException:
    """The error, as if our own frames did not exist."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame):
        trace = trace.tb_next
    return error.with_traceback(trace)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((_OUR_FOLDER, "<frozen runpy>", "<frozen importlib"))


def _report(error: BaseException, *, keep: bool) -> Report:
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return Report(
        error_type=type(error).__name__,
        message=_text(error),
        traceback="".join(lines),
        value=entry.pickled(error) if keep else b"",
    )


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001
        return "(its text cannot be made)"


def _leave(report_fd: int, report: Report) -> None:
    data = memoryview(pickle.dumps(report))
    while data:
        data = data[os.write(report_fd, data) :]


def refuse(report_fd: int, error: BaseException) -> None:
    """Report that the surroundings could not be taken on: a folder missing, a log file that cannot be opened."""
    _leave(report_fd, Report(error_type=type(error).__name__, message=str(error), hopeless=True))


def main() -> int:
    """The program of a spawned worker: its surroundings are taken on already, its specification comes by file."""
    spec_fd, report_fd, stacks_fd = map(int, sys.argv[1:])
    with open(spec_fd, "rb") as file:
        file.seek(0)
        spec: Any = pickle.load(file)  # noqa: S301
    for fd in (report_fd, stacks_fd):
        os.set_inheritable(fd, False)
    entry.forget_start()
    agent_store.mend_private_groups()
    return run(spec, report_fd, stacks_fd)


if __name__ == "__main__":
    sys.exit(main())
