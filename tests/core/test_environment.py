"""What the workers of a node inherit, and from whom."""

from __future__ import annotations

import pytest

from raylaunch.core.environment import base_env, submitted
from raylaunch.core.rules import Place

NODE = {"PATH": "/node/bin", "HOME": "/node"}


def base(
    node: dict[str, str] | None = None,
    submitter: dict[str, str] | None = None,
    *given: dict[str, str],
    nproc: int = 1,
) -> dict[str, str]:
    place = Place(address="10.0.0.7")
    return base_env(node or {}, submitter or {}, given, place=place, nproc=nproc, ray_address="10.0.0.1:6379")


def test_the_submitters_variables_come_along():
    """As under torchrun, where workers inherit the shell's."""
    assert submitted({"WANDB_MODE": "offline", "HF_TOKEN": "x"}) == {"WANDB_MODE": "offline", "HF_TOKEN": "x"}


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "HOME",
        "PYTHONPATH",
        "CUDA_VISIBLE_DEVICES",
        "SSH_TTY",
        "SLURM_JOB_ID",
        "KUBERNETES_PORT",
        "RAY_ADDRESS",
        "LC_ALL",
    ],
)
def test_what_describes_the_submitters_machine_stays_there(name):
    """A node has its own."""
    assert submitted({name: "x"}) == {}


def test_rays_debugger_is_not_the_submitters():
    """`ray.init()` leaves it behind in the process that submits another run later; one of the user's own comes along."""
    assert submitted({"PYTHONBREAKPOINT": "ray.util.rpdb._driver_set_trace"}) == {}
    assert submitted({"PYTHONBREAKPOINT": "ipdb.set_trace"}) == {"PYTHONBREAKPOINT": "ipdb.set_trace"}


def test_later_ones_win():
    """The node's own, then the submitter's, then the job's, then those of the rules that match the node."""
    node = dict.fromkeys("ABCD", "node")
    found = base(node, dict.fromkeys("BCD", "shell"), dict.fromkeys("CD", "job"), {"D": "rule"})
    assert found == {"A": "node", "B": "shell", "C": "job", "D": "rule", "RAY_ADDRESS": "10.0.0.1:6379"}


def test_values_build_on_what_is_below_them():
    """A rule's on the job's, the job's on the node's; the node's address is filled in."""
    found = base(NODE, {}, {"PATH": "/job:$PATH", "HOST": "${node_address}"}, {"PATH": "/rule:${PATH}"})
    assert (found["PATH"], found["HOST"]) == ("/rule:/job:/node/bin", "10.0.0.7")


def test_rays_own_variables_are_left_out():
    """What Ray sets in its workers is not the node's; what a script needs to find the cluster is kept."""
    node = {"RAY_JOB_ID": "1", "RAY_AUTH_MODE": "token", "OMP_NUM_THREADS": "1", "PYTHONBREAKPOINT": "x", **NODE}
    assert base(node) == {**NODE, "RAY_AUTH_MODE": "token", "RAY_ADDRESS": "10.0.0.1:6379"}


def test_the_job_may_name_anything():
    """Even what we set ourselves."""
    assert base(NODE, {}, {"RAY_ADDRESS": "mine", "PATH": "/job/bin"})["RAY_ADDRESS"] == "mine"


def test_one_openmp_thread_unless_somebody_said_otherwise():
    """torchrun's rule, where Ray's own value does not count as said."""
    assert base({"OMP_NUM_THREADS": "9"}, nproc=2)["OMP_NUM_THREADS"] == "1"
    assert base(submitter={"OMP_NUM_THREADS": "3"}, nproc=2)["OMP_NUM_THREADS"] == "3"
    assert base({}, {}, {"OMP_NUM_THREADS": "5"}, nproc=2)["OMP_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS" not in base(nproc=1)


def test_without_ray_nothing_is_of_its_making():
    """The environment is the user's own: what looks like Ray's stays, and nobody is told of a Ray."""
    node = {"RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "3", "SPT_NOENV": "1"}
    assert base_env(node, {}, (), place=Place(address="127.0.0.1"), nproc=4, ray_address="") == node
