"""What a person sees while hosts come and go: `python -m tools.chaos.timeline` trains the character model on three of
them, adds one, cuts one off, heals it, drains one, and prints what raylaunch said.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.hosts.hosts import Hosts, inside
from tools.chaos.job import wait_for

_SCRIPT = Path(__file__).parents[2] / "examples" / "train_charlm.py"
_SETTINGS = ("--nnodes", "1:4", "--nproc-per-node", "1", "--show", "none", "--set", "last_call=2")
_LIMIT = 60.0


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="rlt-") as name, Hosts(3, cpus=1) as hosts:
        folder = Path(name)
        command = [
            sys.executable,
            "-m",
            "raylaunch",
            *_SETTINGS,
            str(_SCRIPT),
            "--steps",
            "100000",
            "--log-every",
            "50",
        ]
        with (folder / "said").open("w") as said:
            run = hosts.popen(hosts.head, command, cwd=folder, stdout=subprocess.DEVNULL, stderr=said)

            def until(text: str, times: int = 1) -> None:
                wait_for(lambda: (folder / "said").read_text().count(text) >= times, _LIMIT)
                time.sleep(4)

            until("runs: 3 workers")
            print("# a host is added", flush=True)
            hosts.add()
            until("runs: 4 workers")
            print("# the network of one is cut", flush=True)
            hosts.cut(hosts[1])
            until("runs: 3 workers", 2)
            print("# and works again", flush=True)
            hosts.heal(hosts[1])
            until("runs: 4 workers", 2)
            print("# one is drained", flush=True)
            hosts.drain(hosts[2], 60)
            until("runs: 3 workers", 3)
            os.kill(inside(run), signal.SIGINT)
            run.wait(timeout=60)
        print((folder / "said").read_text())


if __name__ == "__main__":
    main()
