"""`raylaunch check` on a cluster: the table on stdout, the exit code for scripts, and no failure report about itself."""

from __future__ import annotations

import subprocess

import pytest

from tests.cluster.conftest import Launcher

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def check(launcher: Launcher, *words: str) -> subprocess.CompletedProcess[str]:
    return launcher.python("raylaunch", "check", "--set", "placement=pack", *words)


def test_all_is_well(launcher):
    """Two agents with two workers each: every operation is verified."""
    done = check(launcher, "--nnodes", "2", "--nproc-per-node", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1].endswith(" ok")
    for name in (
        "init env://",
        "init tcp://",
        "init file://",
        "all_to_all",
        "isend, irecv",
        "DDP step",
        "init_device_mesh, 2-D",
        "FSDP2 step",
    ):
        assert any(line.startswith(f"  {name}  ") and " ok, " in line for line in lines), name


def test_something_is_wrong(launcher):
    """A backend that is not available: exit code 1, and a row of the table instead of a crash report."""
    done = check(launcher, "--nproc-per-node", "2", "--", "--backends", "ucc")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ucc" in done.stdout
    assert "wrong" in done.stdout
    assert "error:" not in done.stderr
