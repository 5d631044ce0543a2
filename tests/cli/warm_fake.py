"""`raylaunch` and its warm driver with runs that need no cluster: `warm_fake.py command WORDS...`, as `raylaunch`.

What a run does is the first argument of its script; what it finds goes to stdout as one line of JSON.
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

from raylaunch.cli import main, warm_command, warm_driver
from raylaunch.cluster import run as cluster_run
from raylaunch.cluster import signals
from raylaunch.cluster.run import Outcome
from raylaunch.core.result import RunResult
from raylaunch.errors import ClusterError, stopped_by
from raylaunch.node.logs import Output

LONGEST_SECONDS = 30.0
AGENTS = (("10.0.0.2", 8, 310_400_000), ("10.0.0.3", 1, 0))


def run_job(job, job_text, watcher):
    """In place of the real one."""
    assert job.keep_warm == 0.0 or "warm_fake.py driver" in " ".join(sys.orig_argv)
    what, *more = job.entrypoint.args
    code = getattr(Runs, what)(job, watcher, *more)
    return Outcome(result=result(code))


class Runs:
    """What a run can do."""

    @staticmethod
    def facts(_job, watcher, code="0"):
        """Tell what the process is like for the run."""
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
        watcher.said("a word of ours")
        return int(code)

    @staticmethod
    def wait(job, watcher, count="1", *_):
        """For so many signals that end a run; tell each."""
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
        return stopped_by(signal.Signals[name])

    @staticmethod
    def mistake(_job, _watcher):
        """Of ours."""
        raise ZeroDivisionError("oh")

    @staticmethod
    def refuse(_job, _watcher):
        """As where there is no cluster."""
        raise ClusterError("no cluster", hint="start one")

    @staticmethod
    def linger(_job, _watcher):
        """Leave the thread that writes to the terminal behind."""
        threading.Thread(target=time.sleep, args=(LONGEST_SECONDS,), daemon=True, name="raylaunch-output").start()
        return 0


def is_kept():
    """As where the cluster is another one, once."""
    if not os.path.exists("another-cluster"):
        return True
    os.remove("another-cluster")
    return False


def print_line(watcher, text):
    watcher.wrote([Output(rank=0, stream="stdout", data=f"{text}\n".encode())])


def result(code):
    return RunResult(exit_code=code, why="it was so", seconds=0.0, restarts=0, attempts=(), cause=None)


if __name__ == "__main__":
    cluster_run.run_job = run_job
    if sys.argv[1] == "driver":
        warm_driver.load = lambda: warm_driver.Cluster(
            address=lambda: "10.0.0.1:6379", agents=lambda: AGENTS, is_kept=is_kept
        )
        sys.exit(warm_driver.main(*sys.argv[2:]))
    warm_command.PROGRAM = ("-P", __file__, "driver")
    code = main.main(sys.argv[2:])
    if "MODULES" in os.environ:
        Path(os.environ["MODULES"]).write_text(" ".join(sys.modules))
    sys.exit(code)
