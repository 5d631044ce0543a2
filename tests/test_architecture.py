"""The shape of the house: which room may know which, and what it costs to come in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

IMPORTED = """
import sys
before = set(sys.modules)
import {modules}
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}))
"""


def imported_by(*modules: str) -> set[str]:
    """The top-level packages that a fresh Python has loaded after it imported these modules."""
    code = IMPORTED.format(modules=", ".join(modules))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_rooms_know_only_what_they_may():
    """The contracts in pyproject.toml hold: imports point downwards, and the core has no clock and cannot act."""
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([lint, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["raylaunch", "raylaunch.cli.main"])
def test_the_door_is_light(module):
    """Neither `import raylaunch` nor the command line's entry loads what takes long before it is needed."""
    assert imported_by(module).isdisjoint({"ray", "torch", "omegaconf"})


@pytest.mark.parametrize("module", ["raylaunch.cluster.run", "raylaunch.cluster.local_session"])
def test_driver_and_agent_need_no_torch(module):
    """It takes seconds to load, and only workers use it; and Ray is for clusters."""
    assert imported_by(module).isdisjoint({"torch", "ray"})


def test_agents_on_a_cluster_need_no_torch():
    """As those without one."""
    assert "torch" not in imported_by("raylaunch.cluster.ray_session")


def test_workers_load_nothing_of_others():
    """The fork server and what runs in the user's process: the standard library and raylaunch, no more."""
    found = imported_by("raylaunch.worker.boot", "raylaunch.node.forkserver")
    assert found - sys.stdlib_module_names == {"raylaunch"}
