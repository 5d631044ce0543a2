"""The environment variables that the workers of a node inherit."""

from __future__ import annotations

import pytest

from raylaunch.core.job.node_rules import NodeAttributes
from raylaunch.core.placement.environment import base_env, interface_env, is_of_a_terminal, submitted

NODE = {"PATH": "/node/bin", "HOME": "/node"}


def base(
    node: dict[str, str] | None = None,
    submitter: dict[str, str] | None = None,
    *given: dict[str, str],
    nproc: int = 1,
) -> dict[str, str]:
    place = NodeAttributes(address="10.0.0.7")
    return base_env(node or {}, submitter or {}, given, place=place, nproc=nproc, ray_address="10.0.0.1:6379")


def test_submitter_variables_are_inherited():
    """As for torchrun, whose workers inherit the variables of the shell."""
    assert submitted({"WANDB_MODE": "offline", "HF_TOKEN": "x"}) == {"WANDB_MODE": "offline", "HF_TOKEN": "x"}


@pytest.mark.parametrize(
    "name",
    [
        "PATH",
        "HOME",
        "PYTHONPATH",
        "CUDA_VISIBLE_DEVICES",
        "HIP_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
        "SSH_TTY",
        "SLURM_JOB_ID",
        "KUBERNETES_PORT",
        "RAY_ADDRESS",
        "LC_ALL",
    ],
)
def test_variables_of_the_submitting_host_are_not_inherited(name):
    """A node has its own values."""
    assert submitted({name: "x"}) == {}


def test_debugger_set_by_ray_is_not_inherited():
    """`ray.init()` sets it in a process that may submit another run; a value of the user is inherited."""
    assert submitted({"PYTHONBREAKPOINT": "ray.util.rpdb._driver_set_trace"}) == {}
    assert submitted({"PYTHONBREAKPOINT": "ipdb.set_trace"}) == {"PYTHONBREAKPOINT": "ipdb.set_trace"}


def test_later_environments_win():
    """The order: the node's environment, the submitter's, the job's, those of matching rules."""
    node = dict.fromkeys("ABCD", "node")
    found = base(node, dict.fromkeys("BCD", "shell"), dict.fromkeys("CD", "job"), {"D": "rule"})
    assert found == {"A": "node", "B": "shell", "C": "job", "D": "rule", "RAY_ADDRESS": "10.0.0.1:6379"}


def test_values_may_refer_to_earlier_environments():
    """A rule's value may refer to the job's, the job's to the node's; placeholders are filled in."""
    found = base(NODE, {}, {"PATH": "/job:$PATH", "HOST": "${node_address}"}, {"PATH": "/rule:${PATH}"})
    assert (found["PATH"], found["HOST"]) == ("/rule:/job:/node/bin", "10.0.0.7")


def test_variables_set_by_ray_are_omitted():
    """Variables that a script needs to find the cluster are kept."""
    node = {"RAY_JOB_ID": "1", "RAY_AUTH_MODE": "token", "OMP_NUM_THREADS": "1", "PYTHONBREAKPOINT": "x", **NODE}
    assert base(node) == {**NODE, "RAY_AUTH_MODE": "token", "RAY_ADDRESS": "10.0.0.1:6379"}


def test_variables_of_the_job_always_win():
    """Even those that raylaunch sets."""
    assert base(NODE, {}, {"RAY_ADDRESS": "mine", "PATH": "/job/bin"})["RAY_ADDRESS"] == "mine"


def test_one_openmp_thread_unless_set_by_the_user():
    """torchrun's rule; the value that Ray sets does not count."""
    assert base({"OMP_NUM_THREADS": "9"}, nproc=2)["OMP_NUM_THREADS"] == "1"
    assert base(submitter={"OMP_NUM_THREADS": "3"}, nproc=2)["OMP_NUM_THREADS"] == "3"
    assert base({}, {}, {"OMP_NUM_THREADS": "5"}, nproc=2)["OMP_NUM_THREADS"] == "5"
    assert "OMP_NUM_THREADS" not in base(nproc=1)


def test_without_ray_the_environment_is_unchanged():
    """Variables with names of Ray stay, and RAY_ADDRESS is not set."""
    node = {"RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "3", "SPT_NOENV": "1"}
    assert base_env(node, {}, (), place=NodeAttributes(address="127.0.0.1"), nproc=4, ray_address="") == node


def test_variables_of_the_terminal():
    """They differ between two windows of the same user without a meaning for the run."""
    assert all(map(is_of_a_terminal, ("COLUMNS", "TMUX_PANE", "SSH_TTY", "TERM", "PWD")))
    assert not any(map(is_of_a_terminal, ("PATH", "LR", "RAY_ADDRESS", "HOME", "PYTHONPATH", "COLUMNS_OF_MINE")))


# The interface that other hosts can reach.

LO, ETH = {"lo": ("127.0.0.1", "::1")}, {"eth0": ("10.0.0.7", "fd00::7")}
BRIDGES = {"docker0": ("172.17.0.1",), "virbr0": ("192.168.122.1",), "br-1": ("172.18.0.1",)}
BOTH = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}


def interface(host_addresses=(), interfaces=LO | ETH, address="10.0.0.7", **given):
    """Return the variables of a node with these interfaces, of which br-1, docker0 and virbr0 are bridges."""
    place = NodeAttributes(address=address, interfaces=interfaces)
    return interface_env(place, host_addresses, BRIDGES.keys(), given)


@pytest.mark.parametrize(
    ("host_addresses", "expected"),
    [
        (["127.0.1.1"], BOTH),  # Debian, Ubuntu
        (["127.0.0.1"], BOTH),
        (["::1", "10.0.0.7"], BOTH),  # the first one counts
        ([], BOTH),  # a name that leads nowhere
        (["10.0.0.7"], {}),
        (["fd00::7"], {}),
        (["172.17.0.1", "10.0.0.7"], BOTH),
        (["10.1.0.7"], {}),  # another network: that may be what is wanted
    ],
)
def test_a_host_name_that_leads_to_an_address_that_others_cannot_reach(host_addresses, expected):
    """Workers are told the interface with the node's address."""
    interfaces = LO | ETH | {"eth1": ("10.1.0.7",)} | BRIDGES
    assert interface(host_addresses, interfaces) == expected


def test_variables_for_the_interface_that_a_person_set():
    """Each counts by itself; an empty one is none."""
    given = {"GLOO_SOCKET_IFNAME": "eth9", "NCCL_SOCKET_IFNAME": "ib0", "TP_SOCKET_IFNAME": ""}
    assert interface(["127.0.1.1"], BRIDGES | ETH, **given) == {"TP_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize(
    ("interfaces", "expected"),
    [
        (LO | ETH, {}),
        (LO | {"docker0": BRIDGES["docker0"]} | ETH, {}),
        (LO | BRIDGES | ETH, {"NCCL_SOCKET_IFNAME": "=eth0"}),  # virbr0 is chosen by older versions
        (LO | ETH | BRIDGES, {}),
        (LO | {"eth1": ("10.1.0.7",)} | ETH, {}),
        (BRIDGES | {"ibs1": ("10.2.0.7",)} | ETH, {}),
        (LO | {"br-1": ("10.0.0.7",)}, {}),  # the node's own address is the bridge's
        ({"lo": ("127.0.0.1", "10.0.0.7")}, {}),
        ({"lo": ("127.0.0.1",), "docker-7": ("10.0.0.7",)}, {}),
    ],
)
def test_nccl_is_told_only_if_it_would_choose_a_bridge(interfaces, expected):
    """It looks for ib, then for anything but docker and lo, in the kernel's order."""
    assert interface(["10.0.0.7"], interfaces) == expected


@pytest.mark.parametrize("address", ["127.0.0.1", "10.9.9.9", "a-name"])
def test_a_node_whose_address_helps_nobody(address):
    """One machine alone, or an address that no interface has, as behind NAT."""
    assert interface(["127.0.1.1"], address=address) == {}
