"""A background process of this machine that is the driver of a detached run, for runs without a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict

from raylaunch.cluster.detached.detached_run import DetachedRun, DriverNews
from raylaunch.errors import RaylaunchError
from raylaunch.worker import cpython_internals

PROGRAM = cpython_internals.safe_module("raylaunch.cli.detached.background_process")
"""Python's arguments for the process."""


def start(run: DetachedRun) -> Iterator[DriverNews]:
    """Start the process, in a session of its own, and yield its news; it goes on when nobody asks for more.

    Raises RaylaunchError if it ends without telling how, and OSError.
    """
    yield DriverNews(begins=True)
    readable, writable = os.pipe()
    with open(readable, "rb") as news:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, *cpython_internals.interpreter_options(), *PROGRAM, str(writable)],
            pass_fds=[writable],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(writable)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            pickle.dump(run, process.stdin)
        for line in news:
            found = DriverNews(**json.loads(line))
            yield found
            if found.exit_code is not None:
                process.wait()
                return
        if process.wait() is not None:
            msg = f"the driver of the run ended with exit code {process.returncode} and has not told why"
            raise RaylaunchError(msg)


def main(descriptor: str) -> int:
    """Be the driver of the run that is on stdin. `descriptor`: the pipe for its news."""
    from raylaunch.cli.detached import background_run  # noqa: PLC0415

    run = pickle.load(sys.stdin.buffer)  # noqa: S301, of the process that started this one
    pipe = int(descriptor)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.set_inheritable(pipe, False)

    def tell(news: DriverNews) -> None:
        with contextlib.suppress(OSError):  # the command has heard enough
            os.write(pipe, json.dumps(asdict(news)).encode() + b"\n")

    code = background_run.drive(run, tell)
    tell(DriverNews(exit_code=code))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
