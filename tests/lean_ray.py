"""`ray start` with less around it: `python lean_ray.py WORKERS start ...`. Ray has no options for any of this.

It waits for a node for longer than 30 s, which a busy machine may need, and starts no server for Ray Client. Without the
dashboard, it does not start the process that it would be in either. Each takes a second of CPU, and the latter is waited
for. Of the dashboard, the part for jobs is started and the part that finds nodes for it, each of them a process.

WORKERS is the socket of a warm Python, or `-`, or empty. With a socket, workers are forked there. With either, in place of
the two helpers of each raylet, the dashboard's agent and the one for `runtime_env`, there are processes that do nothing.
The ports that they would serve are -1, as in a Ray without `ray[default]`. Rays that know no such ports are left as they
are.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ray import _raylet
from ray._private import node, services
from ray.scripts import scripts

PATIENCE = 150.0
NOTHING = "import os, select; select.select([os.pidfd_open(os.getppid())], [], [])"
"""It ends with the raylet, which ends if it ends."""
HELPERS = "--dashboard_agent_command", "--runtime_env_agent_command"
"""The options of a raylet with the commands of its helpers."""
PORTS = tuple(
    getattr(_raylet, f"{name}_PORT_NAME", None)
    for name in ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN", "RUNTIME_ENV_AGENT")
)
"""The files in which a raylet looks for the ports of its helpers; None where Ray has no such files."""


def make_patient() -> None:
    asked, deadline = services.get_node, time.monotonic() + PATIENCE

    def get_node(*args: Any) -> Any:
        while True:
            try:
                return asked(*args)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    services.get_node = get_node


def make_dashboard_small() -> None:
    """Helpers go first besides: a raylet ends if they have not written their ports after 15 s."""
    start = services.start_ray_process

    def start_ray_process(command: list[str], *args: Any, **options: Any) -> Any:
        more = ["--modules-to-load=JobHead,NodeHead"] if any(word.endswith("dashboard.py") for word in command) else []
        return start([*map(first, command), *more], *args, **options)

    def first(word: str) -> str:
        name, _, value = word.partition("=")
        return f"{name}=nice -n -15 {value}" if name in HELPERS else word  # for others than root it only complains

    services.start_ray_process = start_ray_process


def make_lean(workers: str) -> None:
    """From now on what this process starts of Ray is as with this WORKERS."""
    if not all(PORTS):
        return
    start, worker = services.start_ray_process, Path(__file__).with_name("ray_worker.py")

    def start_ray_process(command: list[str], *args: Any, **options: Any) -> Any:
        return start([lean(word) for word in command], *args, **options)

    def lean(word: str) -> str:
        name, _, value = word.partition("=")
        if name == "--python_worker_command" and workers != "-":
            executable, _, program, *rest = shlex.split(value)
            return f"{name}={subprocess.list2cmdline([executable, '-IS', str(worker), workers, program, *rest])}"
        if name in HELPERS:
            node_id, folder = (re.search(rf"--{key}=(\S+)", value)[1] for key in ("node-id", "session-dir"))
            for port in PORTS:
                _raylet.persist_port(folder, node_id, port, -1)
            return f"{name}={subprocess.list2cmdline([sys.executable, '-ISc', NOTHING])}"
        return word

    services.start_ray_process = start_ray_process


if __name__ == "__main__":
    make_patient()
    scripts.get_ray_client_dependency_error = lambda: "no test uses Ray Client"
    if "--include-dashboard=false" in sys.argv:
        node.Node.start_api_server = lambda *_, **__: None
    else:
        make_dashboard_small()
    workers = sys.argv.pop(1)
    if workers:
        make_lean(workers)
    scripts.main()
