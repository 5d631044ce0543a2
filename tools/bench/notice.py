"""From a cloud's notice in its metadata server until the driver drains the node (`preemption_notices`).

Each node asks every 2 s, and the notice comes at any time between two questions: so a second is what the poll costs on
average, and two seconds at most. One rank runs on this machine, without Ray, beside a server that answers as Google's.

`python -m tools.bench.notice TIMES` measures it, in the folder where it is started, and prints the seconds as JSON.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from raylaunch.capabilities.notices import agent
from raylaunch.cluster.run import run_job
from raylaunch.core.job.job import Entrypoint, Job, RayOptions
from raylaunch.core.machine.events_and_actions import NodeDraining, WorkersStarted
from tests.fakes import RunRecorder
from tests.private_cluster import Cluster
from tools.bench import figures, launches
from tools.bench.contenders import RAYLAUNCH, new_folder
from tools.bench.figures import Bench, Figure, Outcome

_SECONDS = 300.0
_SCRIPT = """\
import os, time
while not os.path.exists("drained"):
    time.sleep(0.02)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    times: int = 12


def measure(_: Cluster, scratch: Path, size: Size) -> Outcome:
    """Run as many jobs as there are samples, in a process of their own."""
    folder = new_folder(scratch, RAYLAUNCH)
    command, root = [sys.executable, "-m", "tools.bench.notice", str(size.times)], Path(__file__).parents[2]
    with launches.started(command, folder, extra={"PYTHONPATH": str(root)}) as launch:
        launch.wait(_SECONDS)
        samples = tuple(json.loads(launch.out.read_text().splitlines()[-1]))
    goal = figures.worst_at_most(agent.POLL_SECONDS + 0.5)
    what = f"{figures.first_line(__doc__)} It asks every {agent.POLL_SECONDS:g} s."
    return Outcome(figures=(Figure(name="notice", what=what, unit="s", samples={RAYLAUNCH: samples}, goals=(goal,)),))


class _Watch(RunRecorder):
    """Gives the notice at a random time after the worker has started, and lets it end when its node is drained."""

    def __init__(self) -> None:
        super().__init__()
        #: When it gave the notice; 0: not yet.
        self.given_at = 0.0
        self.seconds = 0.0

    def _give(self) -> None:
        self.given_at = time.monotonic()

    def on_plan(self, *_: Any) -> None:
        pass

    def on_entry(self, entry: Any, machine: Any) -> None:
        del machine
        if isinstance(entry.event, WorkersStarted):
            threading.Timer(random.uniform(0, agent.POLL_SECONDS), self._give).start()
        if isinstance(entry.event, NodeDraining):
            self.seconds = time.monotonic() - self.given_at
            Path("drained").touch()


def _run_one() -> float:
    """Return the seconds from the notice until the driver took it."""
    watch = _Watch()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"TRUE" if watch.given_at else b"FALSE")

        def log_message(self, *_: Any) -> None:
            pass

    Path("drained").unlink(missing_ok=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers: Any = agent.SERVERS
        servers["gcp"] = "http://127.0.0.1:{1}".format(*server.server_address)
        job = Job(
            entrypoint=Entrypoint(script="train.py"),
            preemption_notices="gcp",
            preload=[],
            log_dir="runs",
            ray=RayOptions(address="none"),
        )
        code = run_job(job, "", watch).result.exit_code
        server.shutdown()
    if code or not watch.seconds:
        raise RuntimeError(f"the run ended with {code}, after a drain that took {watch.seconds} s")
    return watch.seconds


def main() -> None:
    """Print the samples."""
    Path("train.py").write_text(_SCRIPT)
    print(json.dumps([_run_one() for _ in range(int(sys.argv[1]))]))


BENCH = Bench(measure=measure, full=Size(), smoke=Size(times=1), needs_cluster=False)

if __name__ == "__main__":
    main()
