"""`raylaunch` and its daemon with fake runs that need no cluster: `fake_daemon.py command ARGS...` is `raylaunch ARGS`.

The first argument of the script names the method of `Runs` that is the run.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path

from raylaunch.cli import main
from raylaunch.cli.daemon import client, daemon
from raylaunch.cluster import run as cluster_run
from raylaunch.cluster.driver import signals
from raylaunch.cluster.run import RunOutcome
from raylaunch.core.record.result import RunResult
from raylaunch.errors import ClusterError, signal_exit_code
from raylaunch.node.logs.tail import LogOutput

LONGEST_SECONDS = 30.0
AGENTS = (("10.0.0.2", 8, 310_400_000), ("10.0.0.3", 1, 0))


def run_job(job, job_text, watcher, **_):
    """Replaces `raylaunch.cluster.run.run_job`."""
    assert job.keep_warm == 0.0 or "fake_daemon.py daemon" in " ".join(sys.orig_argv)
    what, *more = job.entrypoint.args
    code = getattr(Runs, what)(job, watcher, *more)
    return RunOutcome(result=result(code))


class Runs:
    """The fake runs. Each returns an exit code."""

    @staticmethod
    def facts(_job, watcher, code="0"):
        """Print what the process looks like to the run, as one line of JSON."""
        umask = os.umask(0)
        os.umask(umask)
        found = {
            "pid": os.getpid(),
            "cwd": os.getcwd(),
            "umask": umask,
            "environ": dict(os.environ),
            "stdin": os.path.realpath("/proc/self/fd/0"),
            "ignored": [s.name for s in signal.Signals if signal.getsignal(s) is signal.SIG_IGN],
            "keep_warm": _job.keep_warm,
        }
        print_line(watcher, json.dumps(found))
        watcher.on_message("a warning")
        return int(code)

    @staticmethod
    def wait(job, watcher, count="1", *_):
        """Wait for `count` signals that stop a run, and print each signal."""
        heard: queue.SimpleQueue[str] = queue.SimpleQueue()
        ends = 0
        with signals.handled(job) as signalled:
            signalled.go_to(heard.put)
            print_line(watcher, f"up {os.getpid()}")
            while ends < int(count):
                name = heard.get(timeout=LONGEST_SECONDS)
                print_line(watcher, name)
                with Path("heard").open("a") as file:
                    file.write(f"{name}\n")
                ends += name in job.signals_to_handle
        return signal_exit_code(signal.Signals[name])

    @staticmethod
    def mistake(_job, _watcher):
        """Fail as by a bug of raylaunch."""
        raise ZeroDivisionError("oh")

    @staticmethod
    def refuse(_job, _watcher):
        """Fail as if there were no cluster."""
        raise ClusterError("no cluster", hint="start one")

    @staticmethod
    def linger(_job, _watcher):
        """Leave a thread behind that could write to the terminal."""
        threading.Thread(target=time.sleep, args=(LONGEST_SECONDS,), daemon=True, name="raylaunch-output").start()
        return 0


def is_kept():
    """Return False once if the file `another-cluster` exists, as if the cluster had been replaced."""
    if not os.path.exists("another-cluster"):
        return True
    os.remove("another-cluster")
    return False


def print_line(watcher, text):
    watcher.on_output([LogOutput(rank=0, stream="stdout", data=f"{text}\n".encode())])


def result(code):
    return RunResult(exit_code=code, why="it was so", seconds=0.0, restarts=0, attempts=(), cause=None)


if __name__ == "__main__":
    cluster_run.run_job = run_job
    if sys.argv[1] == "daemon":
        daemon.load = lambda: daemon.DaemonCluster(
            address=lambda: "10.0.0.1:6379", agents=lambda: AGENTS, is_kept=is_kept
        )
        sys.exit(daemon.main(*sys.argv[2:]))
    client.PROGRAM = (*client.PROGRAM[:-2], __file__, "daemon")
    code = main.main(sys.argv[2:])
    if "MODULES" in os.environ:
        Path(os.environ["MODULES"]).write_text(" ".join(sys.modules))
    sys.exit(code)
