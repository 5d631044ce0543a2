"""Runs the user's code in a process that was started for it, and reports how it ended.

It runs in one of two ways: in a child of the fork server (`set_up_and_run`), or as the program of a fresh interpreter,
`python -u boot.py SPEC_FD REPORT_FD STACKS_FD TITLE` (`start_method: spawn`). Either way the user's code finds what
`python -u train.py` would have given it. `TITLE` is for people who look at command lines.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Started by path: make our own package importable without putting the current folder on sys.path.
    sys.path[: not getattr(sys.flags, "safe_path", False)] = [__file__.rsplit("/", 4)[0]]

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as `_reset_signals`: what follows takes a while to import

import contextlib
import faulthandler
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any, NamedTuple

from raylaunch.core.failures.failure import MOST_MESSAGE, MOST_TYPE, WorkerError, capped_traceback
from raylaunch.core.text import capped, printable, text_of
from raylaunch.worker import cpython_internals, torch_internals
from raylaunch.worker.heartbeats import heartbeat_writer
from raylaunch.worker.heartbeats.import_hook import when_imported
from raylaunch.worker.runtime import (
    entry,
    files_wait,
    gloo_threads,
    import_recorder,
    numa,
    output_order,
    stack_signal,
    tcpstore_patch,
)
from raylaunch.worker.runtime.process_setup import (
    SHORTAGES,
    append_output,
    close_other_fds,
    die_with_parent,
    encodable,
    note_output,
)
from raylaunch.worker.runtime.server_file import ServerFile
from raylaunch.worker.runtime.spec import WorkerSpec

_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
"""The folder of `raylaunch.worker`."""
_C10D = "torch.distributed.distributed_c10d"
_C_LONG = 1 << 63
"""The first number that is too large for a `long` of C."""
_SKIPPED_IDS = 100
"""More ids of Ray than a worker draws before it calls `ray.init`."""
_OWN_FRAMES = (_OWN_FOLDER, cpython_internals.RUNPY_FILE, "<frozen importlib")


class WorkerFiles(NamedTuple):
    """The files that the fork server has made for one worker."""

    report: ServerFile
    stacks: ServerFile
    imports: ServerFile | None = None
    """Of the modules that the script imports; None: they are not recorded."""


def set_up_and_run(spec: WorkerSpec, files: WorkerFiles, parent: int, target: Callable[..., int]) -> int:
    """Set up this forked process, then return what `target` returns: `run`, or a function that starts it by exec."""
    try:
        set_up_process(spec, files, parent)
    except (OSError, ValueError) as error:
        _write_setup_error(files.report, error, hopeless=getattr(error, "errno", None) not in SHORTAGES)
        return 1
    return target(spec, files)


def set_up_process(spec: WorkerSpec, files: WorkerFiles, parent: int) -> None:
    """Give this process a session of its own, default signals, the worker's output files, folder and environment.

    `parent` is the process id of the fork server; this process is killed when that one dies. Of the file descriptors
    above stderr, only `files` stay open. Raises OSError where a file or a folder cannot be opened, and
    ValueError where the environment has a value that no environment can hold.
    """
    os.setsid()
    die_with_parent(parent)
    _reset_signals()
    close_other_fds(*(file.fd for file in files if file is not None))  # first: there may be no room for more
    _redirect(spec)
    os.environ.update(spec.env)  # variables that the interpreter or a preloaded module set stay, as in a fresh process
    os.chdir(spec.cwd)


def _reset_signals() -> None:
    """Set signals as a fresh interpreter has them: defaults, SIGPIPE ignored.

    SIGINT raises KeyboardInterrupt only when the user's code begins: before, the traceback would be of our own files.
    """
    signal.set_wakeup_fd(-1)
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):  # SIGKILL, SIGSTOP, and two that belong to the C library
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _redirect(spec: WorkerSpec) -> None:
    """Read stdin from /dev/null, and append stdout and stderr to the worker's log files."""
    null = os.open(os.devnull, os.O_RDONLY)
    if null:
        os.dup2(null, 0)
        os.close(null)
    append_output(spec.stdout, spec.stderr)
    if spec.terminal:
        _use_terminal(spec)


def _use_terminal(spec: WorkerSpec) -> None:
    """Make the terminal this session's own, and use it instead of the log files, which the agent then writes."""
    terminal = os.open(spec.terminal, os.O_RDWR)
    for fd in (0, 1, 2) if spec.takes_input else (1, 2):
        os.dup2(terminal, fd)
    os.close(terminal)
    note_output()


def run(spec: WorkerSpec, files: WorkerFiles) -> int:
    """Run the user's code as `__main__`, and return the exit code that Python would have ended with.

    SystemExit and KeyboardInterrupt are left to the interpreter, which makes an exit code or a signal of them.

    The file for the report gets the error, pickled, or None.
    """
    report_file = files.report
    faulthandler.enable()
    files_wait.wait()
    _reseed(spec.local_rank)
    _prepare_torch(spec)
    try:
        numa.bind(spec)
    except numa.CannotBindError as error:
        return _refuse(report_file, error)
    if spec.kind == "command":
        return _exec_command(spec, report_file)
    output_order.install()
    stack_signal.register(files.stacks)
    heartbeat_writer.claim()
    if files.imports is not None:
        import_recorder.ImportRecorder(files.imports, spec.local_rank).install()
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        value = entry.run(spec)
        _before_exit()
        if spec.kind == "pickle":
            _write_report(report_file, None, value)
    except SystemExit as stop:
        _before_exit_by(stop, report_file)
        raise
    except KeyboardInterrupt as error:
        _print_traceback(without_own_frames(error))
        sys.excepthook = lambda *_: None  # printed already; the interpreter still runs exit handlers and SIGINT
        raise
    except entry.CannotBeginError as error:
        return _refuse(report_file, error)
    except BaseException as error:  # noqa: BLE001
        error = without_own_frames(error)
        with contextlib.suppress(Exception):  # the script may have broken what that needs; stderr has the error, too
            _report_error(report_file, error, with_object=spec.kind == "pickle")
        _print_traceback(error)
        return 1
    return 0


def _prepare_torch(spec: WorkerSpec) -> None:
    """Have torch use the store and the timeout of this attempt, and end groups safely, as soon as it is imported."""
    tcpstore_patch.remember(spec.env)
    when_imported(_C10D, lambda module: torch_internals.watch_group_ends(module, gloo_threads.let_finish))
    if spec.timeout:
        timeout = timedelta(seconds=spec.timeout)
        when_imported(_C10D, lambda module: torch_internals.set_default_timeout(module, timeout))


def _before_exit_by(stop: SystemExit, report_file: ServerFile) -> None:
    """Do what is due before the interpreter exits by this. A text, which it prints, is reported as an error."""
    if _is_success(stop.code):
        _before_exit()
    elif isinstance(stop.code, str):
        with contextlib.suppress(Exception):
            _report_error(report_file, without_own_frames(stop), with_object=False)


def _before_exit() -> None:
    """Do what a script that has succeeded may have left out: wait for its stop after a checkpoint, end gloo's work.

    If it has not called `State.finish`, say what that would have done.
    """
    heartbeat_writer.wait_instead_of_exiting()
    state = sys.modules.get("raylaunch.worker.state.elastic_state")
    if state is not None and (text := state.uncommitted()):
        _print(f"raylaunch: {text}")
    if torch_internals.is_group_made():
        gloo_threads.let_finish()


def _reseed(local_rank: int) -> None:
    """Seed NumPy's and torch's global generators anew: forked workers would all draw the same numbers.

    torch seeds the generators of CUDA devices only when it first uses them.

    Ray's generator of ids cannot be seeded. It has drawn if a class was decorated with `ray.remote`, as in `ray.data`.
    Each worker skips another number of ids: if two had the same and called `ray.init` at one time, Ray would end one.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    ray_ref = getattr(sys.modules.get("ray"), "ObjectRef", None)
    if ray_ref is not None:
        for _ in range(_SKIPPED_IDS * local_rank):
            ray_ref.from_random()


def _exec_command(spec: WorkerSpec, report_file: ServerFile) -> int:
    """Replace this process by another program. Return 127, as a shell does, where that fails."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # only Python ignores these
    try:
        os.execvpe(spec.target, [spec.target, *(encodable(str(one)) for one in spec.args)], spec.env)
    except (OSError, ValueError) as error:  # ValueError: an argument that no command line can hold
        why = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, FileNotFoundError) and os.path.exists(spec.target):
            is_path = "/" in spec.target
            more = ": the program that its first line names" if is_path else f" on the PATH; write `./{spec.target}`"
            why = f"{why}{more}"
        report = _error(type(error).__name__, f"cannot run `{spec.target}`: {why}", hopeless=True)
        _print(report.text)
        _write_report(report_file, report)
        return 127


def _is_success(code: object) -> bool:
    """Return whether `sys.exit(code)` makes 0 of it (`_Py_HandleSystemExit` in `Python/pythonrun.c`).

    The parent sees the lowest 8 bits of a whole number; -1 stands for one that no `long` of C holds.
    """
    if not isinstance(code, int):
        return code is None
    number = int.__index__(code)  # a subclass may calculate in its own way
    return number & 0xFF == 0 and -_C_LONG <= number < _C_LONG


def _print_traceback(error: BaseException) -> None:
    """Print the traceback with `sys.excepthook`, which may be the user's own."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as failed:  # noqa: BLE001
        _print("Error in sys.excepthook:")
        _print("".join(formatted(without_own_frames(failed))))
        _print("Original exception was:")
        _print("".join(formatted(error)).rstrip())


def _print(text: str) -> None:
    """Print to stderr, which the user's code may have closed, replaced or removed."""
    if sys.stderr is not None:  # `print` would take None for stdout
        with contextlib.suppress(Exception):
            print(text, file=sys.stderr)


def without_own_frames(error: BaseException) -> BaseException:
    """Remove the outermost frames from the error's traceback as long as they are of `raylaunch.worker`."""
    trace = error.__traceback__
    while trace is not None and _is_own(trace.tb_frame):
        trace = trace.tb_next
    return error.with_traceback(trace)


def _is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OWN_FRAMES)


def _report_error(report_file: ServerFile, error: BaseException, *, with_object: bool) -> None:
    """Report an error of the user's code. `with_object`: also the exception itself, if it can be pickled."""
    report = _error(
        str.__str__(type(error).__name__)[:MOST_TYPE],
        capped(text_of(error), MOST_MESSAGE),
        capped_traceback("".join(formatted(error))),
    )
    if with_object:
        with contextlib.suppress(TypeError):
            _write_report(report_file, report, error)
            return
    _write_report(report_file, report)


def formatted(error: BaseException) -> list[str]:
    """Return the parts of its traceback; empty if there can be none."""
    try:
        return traceback.format_exception(type(error), error, error.__traceback__)
    except Exception:  # noqa: BLE001
        return []  # an attribute of the exception is not what it should be


def _refuse(report_file: ServerFile, error: BaseException) -> int:
    """Say on stderr and in the report that the user's code cannot be started; return the exit code."""
    _print(f"raylaunch: {printable(text_of(error))}")
    _write_setup_error(report_file, error)
    return 1


def _write_setup_error(report_file: ServerFile, error: BaseException, *, hopeless: bool = True) -> None:
    """Report why the user's code was not begun. `hopeless`: a restart would meet the same, such as a missing folder."""
    _write_report(report_file, _error(type(error).__name__, text_of(error), hopeless=hopeless))


def _error(kind: str, message: str, trace: str = "", *, hopeless: bool = False) -> WorkerError:
    return WorkerError(type=kind, message=message, traceback=trace, hopeless=hopeless, timestamp=int(time.time()))


def _write_report(report_file: ServerFile, report: WorkerError | None, *value: object) -> None:
    """Write the report, and what the function returned or raised if it is given, in place of what was written before.

    Raises TypeError if that cannot be pickled. It is pickled into the file directly: it may be as large as the memory.
    A child that the script has forked, and that goes on in it, writes nothing.
    """
    if not report_file.is_of_this_process:
        return
    with report_file.descriptor() as fd, open(fd, "wb", closefd=False) as file:
        file.seek(0)
        file.truncate()
        pickle.dump(report, file)
        for one in value:
            entry.dump(one, file)


def main() -> int:
    """Run as the program of a fresh interpreter, in a process that is set up already; return its exit code."""
    spec_fd, report_fd, stacks_fd = map(int, sys.argv[1:4])
    with open(spec_fd, "rb") as file:
        file.seek(0)
        spec: Any = pickle.load(file)  # noqa: S301
    for fd in (report_fd, stacks_fd):
        os.set_inheritable(fd, False)
    report, stacks = (ServerFile.inherited(fd, os.getppid()) for fd in (report_fd, stacks_fd))
    note_output()
    entry.demote_bootstrap_path()
    tcpstore_patch.apply()
    return run(spec, WorkerFiles(report=report, stacks=stacks))


if __name__ == "__main__":
    sys.exit(main())
