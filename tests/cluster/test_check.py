"""`raylaunch check` on a cluster: the table on stdout, the exit code for scripts, and no failure report about itself."""

from __future__ import annotations

import subprocess

import pytest

from tests.cluster.conftest import Launcher

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


def check(launcher: Launcher, *words: str) -> subprocess.CompletedProcess[str]:
    env = launcher.torch_env(["torch"])
    return launcher.python("raylaunch", "check", "--set", "placement=pack", *words, env=env)


def test_what_works_is_verified_and_what_does_not_is_wrong(launcher):
    """Two agents with two workers each. Every operation is ok; a backend that is not available is a row of the table.

    The exit code is 1, without a crash report. tests/worker/selfcheck has a table without mistakes and its exit code.
    """
    done = check(launcher, "--nnodes", "2", "--nproc-per-node", "2", "--", "--backends", "gloo,ucc")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    for name in (
        "init env://",
        "init tcp://",
        "all_to_all_single",
        "batch_isend_irecv",
        "DDP step",
        "init_device_mesh, 2-D",
        "FSDP2 step",
    ):
        assert any(line.startswith(f"  {name}  ") and " ok, " in line for line in lines), (name, done.stdout)
    assert "ucc" in done.stdout
    assert "wrong" in lines[-1]
    assert not any("warning" in line for line in lines), done.stdout
    assert "error:" not in done.stderr
