"""Names of hosts: a DNS server that does not answer, and names that lead to loopback, as on Debian and Ubuntu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import hole

REPOSITORY = Path(__file__).parents[2]
TRAIN = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
print("both have met again", flush=True)
"""
ASK = "import socket; socket.getnameinfo(('::ffff:127.0.0.1', 1), socket.NI_NUMERICSERV)"


def in_the_hole(*command: str, cwd: Path, **env: str) -> tuple[str, list[str]]:
    """Run it; return its output and the names that were asked for."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MASTER_"))}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.hosts.hole", *command],
        env=kept | {"PYTHONPATH": str(REPOSITORY)} | env,
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    *lines, last = ran.stdout.splitlines()
    return "\n".join(lines) + ran.stderr, json.loads(last)["asked"]


@pytest.mark.skipif(hole.why_not() != "", reason=hole.why_not())
def test_workers_and_their_store_ask_nobody_for_names(tmp_path):
    """Neither at the start nor at a restart. torch by itself would ask for the name of each address, 127.0.0.1 too."""
    _, asked = in_the_hole(sys.executable, "-c", ASK, cwd=tmp_path, RES_OPTIONS="timeout:1 attempts:1")
    assert asked == ["1.0.0.127.in-addr.arpa"]
    (tmp_path / "train.py").write_text(TRAIN)
    command = [
        sys.executable,
        "-m",
        "raylaunch",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
        "train.py",
    ]
    printed, asked = in_the_hole(*command, cwd=tmp_path)
    assert "both have met again" in printed, printed
    assert asked == []
    assert "hostname of the client socket" not in printed


MEET = """
import os, socket, torch, torch.distributed as dist
assert socket.gethostbyname(socket.gethostname()) == "127.0.1.1"
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"met {int(total)} by {os.environ['GLOO_SOCKET_IFNAME']}", flush=True)
dist.barrier()
"""


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_hosts_whose_names_lead_to_loopback_meet(launcher):
    """gloo by itself would listen where only processes of the same host can reach it."""
    run = launcher.start(MEET, show="all", preload=["torch"]).wait()
    assert run.code == 0, run.err
    assert sorted(run.out.splitlines()) == [f"[{rank}] met 3 by eth0" for rank in range(3)]
    assert run.err.count("workers get GLOO_SOCKET_IFNAME=eth0, TP_SOCKET_IFNAME=eth0: other hosts cannot reach") == 1
    assert f"on the Ray cluster at {run.hosts.address}" in run.err
