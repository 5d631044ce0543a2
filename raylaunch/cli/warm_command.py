"""The command as the terminal of a run that a warm driver has: the driver is found or started, told, and waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from raylaunch.cli import fitness, warm_folder, warm_words
from raylaunch.cli.one_run import say
from raylaunch.cli.warm_folder import NoWarmDriverError
from raylaunch.cli.warm_words import Exited, Run, Signalled, State
from raylaunch.cluster import here, signals
from raylaunch.core.job import Job
from raylaunch.core.redaction import shown
from raylaunch.errors import InterruptedByUserError, RaylaunchError, stopped_by
from raylaunch.node import wire

_MOST = 4
"""Warm drivers of one user on one machine."""
_ANSWER_SECONDS = 5.0
PROGRAM = ("-P", "-m", "raylaunch.cli.warm_driver")
"""Python's words for the driver. It finds raylaunch where it is installed, whatever lies in the present folder."""


def run(job: Job, job_text: str) -> int | None:
    """Have a warm driver run the job; its exit code. None: the run has to do without one, and a line has said why."""
    why = "the warm driver has ended before it began"
    try:
        _object(job, os.environ)
        where = warm_folder.folder(os.environ)
        key = fitness.key(os.environ)
        told = _run(job, job_text)
        for line in _lines(where, key):
            if (code := _watched(line, job, told)) is not None:
                return code
    except (NoWarmDriverError, OSError) as error:
        why = str(error)
    except RaylaunchError:  # it died in the middle
        warm_folder.sweep(where)
        raise
    say(f"keep_warm is left out: {why}")
    return None


def _object(job: Job, environ: Mapping[str, str]) -> None:
    """Raises NoWarmDriverError where one would be of no use, or not do what this process does."""
    if here.is_alone(job.ray, environ):
        msg = "no Ray cluster is running, and without Ray nothing stays"
        raise NoWarmDriverError(msg)
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in environ:  # set by `ray job submit` for its entry points
        msg = "a submitted Ray job ends with all its processes"
        raise NoWarmDriverError(msg)
    if threading.current_thread() is not threading.main_thread():
        msg = "signals come to the main thread alone, and this is another"
        raise NoWarmDriverError(msg)
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if streams != (sys.__stdin__, sys.__stdout__, sys.__stderr__) or None in streams:
        msg = "stdin, stdout or stderr is closed or replaced"
        raise NoWarmDriverError(msg)


def _run(job: Job, job_text: str) -> Run:
    seen = shown(job, os.environ)
    umask = os.umask(0)
    os.umask(umask)
    names = [*job.signals_to_handle, *job.signals_to_forward]
    return Run(
        job=job,
        job_text=job_text,
        title=f"{seen.title}: {seen.entrypoint}",
        cwd=os.getcwd(),
        environ=dict(os.environ),
        umask=umask,
        ignored=tuple(name for name in names if _is_ignored(name)),
    )


def _is_ignored(name: str) -> bool:
    return name in signal.Signals.__members__ and signal.getsignal(signal.Signals[name]) is signal.SIG_IGN


# Finding one, or starting one.


def _lines(where: Path, key: str) -> Iterator[socket.socket]:
    """To drivers that fit and have now nothing else to do than what is asked here; in the end, to another one.

    One that is at work is not waited for: nobody knows for how long, and another command may want it next.
    """
    for path in warm_folder.sockets(where, key):
        line = warm_folder.connect(path, _ANSWER_SECONDS)
        if line is None:
            continue
        with contextlib.suppress(OSError):
            wire.send(line, warm_words.KNOCK)
        if warm_words.told(line) == warm_words.FREE:
            line.settimeout(None)
            yield line
        line.close()
    yield _started(where, key)


def _started(where: Path, key: str) -> socket.socket:
    """A line to a driver that is about to be there. It stays when this process ends."""
    import subprocess  # noqa: PLC0415

    _make_room(where)
    ours, its = wire.pair()
    with its:
        subprocess.Popen(  # noqa: S603
            [
                *(sys.executable, *subprocess._args_from_interpreter_flags()),  # type: ignore[attr-defined]  # noqa: SLF001
                *(*PROGRAM, str(where), key, str(its.fileno())),
            ],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # and stderr is ours until the first run begins
            cwd="/",
            start_new_session=True,
        ).returncode = 0  # it outlives us, so nobody waits for it
    return ours


def _make_room(where: Path) -> None:
    """End those that rest for longest, so that one more is not too many."""
    states = [state for path in warm_folder.sockets(where) if (state := ask(path, warm_words.STATE))]
    resting = sorted((state for state in states if not state.title), key=lambda state: -state.seconds)
    if len(states) - len(resting) >= _MOST:
        msg = f"{_MOST} warm drivers are at work already"
        raise NoWarmDriverError(msg)
    surplus = {state.pid for state in resting[: max(0, len(states) + 1 - _MOST)]}
    for path in warm_folder.sockets(where):
        if warm_folder.pid_of(path) in surplus:
            ask(path, warm_words.END)


def ask(path: Path, word: str) -> State | None:
    """What the driver that listens there answers to `STATE` or `END`; None: it is gone, or says nothing we know."""
    line = warm_folder.connect(path, _ANSWER_SECONDS)
    if line is None:
        return None
    with line, contextlib.suppress(OSError, TypeError):
        wire.send(line, word)
        return State(**warm_words.told(line))
    return None


# The run.


def _watched(line: socket.socket, job: Job, told: Run) -> int | None:
    """Pass signals on until the run is over. None: it never began."""
    passed: list[str] = []

    def tell(name: str) -> None:
        passed.append(name)
        with contextlib.suppress(OSError):
            wire.send(line, Signalled(signal=name))

    with line, signals.handled(job) as signalled:
        with contextlib.suppress(OSError):
            warm_words.hand_over(line, told)
        if warm_words.told(line) != warm_words.TAKEN:
            return None
        signalled.go_to(tell)
        word = warm_words.told(line)
    if isinstance(word, Exited):
        return word.code
    raise _died([name for name in passed if name in job.signals_to_handle])


def _died(stops: list[str]) -> RaylaunchError:
    if stops:  # as a command without one dies of a signal that nobody handles, before the run or after it
        error = InterruptedByUserError(f"stopped by {stops[0]}")
        error.exit_code = stopped_by(signal.Signals[stops[0]])
        return error
    return RaylaunchError(
        "the warm driver that had the run has died, and the run with it",
        hint="`dmesg` tells whether the kernel killed it for want of memory; the next run starts another",
    )
