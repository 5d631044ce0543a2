"""A DNS server that does not answer: no part of a run may wait for it."""

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
