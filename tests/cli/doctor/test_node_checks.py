"""Each check of the cluster and its nodes: what it says, and when it says nothing."""

from __future__ import annotations

import pytest

from raylaunch.cli.doctor import node_checks
from raylaunch.cli.doctor.diagnosis import Severity, Surroundings
from raylaunch.cli.doctor.node_report import NodeReport
from raylaunch.cluster.inspection import Inspection
from raylaunch.node.linux.nvml import Health

VERSIONS = {"raylaunch": "1.0", "python": "3.11", "ray": "2.60.0", "torch": "2.13.0"}
GIB = 2**30


def seen(**more) -> Surroundings:
    """Return what was seen of a cluster."""
    return Surroundings(seen=Inspection(**more))


def nodes(**more) -> Surroundings:
    """Return a cluster of two nodes, of which the second one has these facts."""
    first = NodeReport(versions=VERSIONS)
    return seen(cluster="10.0.0.1:6379", answers={"10.0.0.1": first, "10.0.0.2": changed(**more)})


def changed(**more) -> NodeReport:
    return NodeReport(**{"versions": VERSIONS, **more})


CASES = {
    "reachable": (
        Surroundings(cluster_problem="no Ray cluster at here", cluster_fix="start one"),
        [("error", "cluster", "no Ray cluster at here")],
    ),
    "alone": (seen(answers={"127.0.0.1": changed()}), [("ok", "cluster", "there is none: this machine alone")]),
    "silent": (
        seen(cluster="c:1", silent={"10.0.0.3": "no raylaunch"}),
        [
            ("ok", "cluster", "the Ray cluster at c:1 has 1 node"),
            ("error", "nodes", "10.0.0.3 gives no answer: no raylaunch"),
        ],
    ),
    "raylets": (
        seen(cluster="c:1", answers={"10.0.0.1": changed()}, further=1),
        [("ok", "cluster", "the Ray cluster at c:1 has 2 nodes on 1 host")],
    ),
    "drained": (seen(draining=("10.0.0.2",)), [("warning", "draining", "being drained: 10.0.0.2")]),
    "token": (seen(cluster="c:1", has_token=False), [("warning", "token", "it needs no token")]),
    "versions": (
        nodes(versions=VERSIONS | {"torch": "2.12.0"}),
        [("error", "torch", "different versions: 2.13.0 on 10.0.0.1; 2.12.0 on 10.0.0.2")],
    ),
    "torch": (nodes(versions=VERSIONS | {"torch": None}), [("error", "torch", "not installed: 10.0.0.2")]),
    "driver": (
        nodes(versions=VERSIONS | {"nvidia_driver": "550.1"}),
        [
            ("warning", "driver", "different NVIDIA drivers: none on 10.0.0.1; 550.1 on 10.0.0.2"),
            ("ok", "versions", "raylaunch 1.0, python 3.11, ray 2.60.0, torch 2.13.0"),
        ],
    ),
    "network": (
        nodes(door_problem="Connection refused"),
        [("error", "network", "this machine cannot be reached from 10.0.0.2 (Connection refused)")],
    ),
    "shared_memory": (
        nodes(shared_memory=GIB // 16),
        [("warning", "shared memory", "small (/dev/shm): 10.0.0.2 (0.062 GiB)")],
    ),
    "temporary_space": (
        nodes(temporary=GIB // 2),
        [("warning", "temporary files", "little is free: 10.0.0.2 (0.5 GiB)")],
    ),
    "limits": (
        nodes(open_files=1024, locked_memory=65536, has_infiniband=True),
        [
            ("warning", "open files", "few allowed: 10.0.0.2 (1024)"),
            ("warning", "locked memory", "too little for InfiniBand: 10.0.0.2 (64 KiB)"),
        ],
    ),
    "core_files": (
        nodes(has_core_files=True, nvidia_gpus=1),
        [("warning", "core files", "10.0.0.2")],
    ),
    "clocks": (
        seen(clocks={"10.0.0.2": (-3.0, 0.1), "10.0.0.3": (2.0, 1.5)}),
        [("warning", "clocks", "not as here: 10.0.0.2 (-3.0 s)")],
    ),
    "names": (nodes(name_seconds=2.5), [("warning", "DNS", "10.0.0.2 (2.5 s)")]),
    "lost_gpus": (
        seen(
            cluster="c:1",
            gpus={"10.0.0.1": 8, "10.0.0.2": 2},
            answers={"10.0.0.1": changed(nvidia_gpus=7), "10.0.0.2": changed(nvidia_gpus=8)},
        ),
        [("error", "GPUs", "fewer than Ray counts: 10.0.0.1 (7 of 8)")],
    ),
    "gpu_faults": (
        nodes(gpu_health=Health(("GPU 1 does not answer", "GPU 3 has memory to replace, which needs a reset"))),
        [("error", "GPUs", "10.0.0.2 (GPU 1 does not answer; GPU 3 has memory to replace, which needs a reset)")],
    ),
    "logged_gpu_faults": (
        nodes(logged_gpu_faults=("Xid 79 at 0000:3b:00: the GPU has fallen off the bus",)),
        [("warning", "GPUs", "10.0.0.2 (Xid 79 at 0000:3b:00: the GPU has fallen off the bus)")],
    ),
    "slow_gpus": (
        nodes(gpu_health=Health(slowdowns=("GPU 2 is slowed down, because it is too hot",))),
        [("warning", "GPUs", "slowed down: 10.0.0.2 (GPU 2 is slowed down, because it is too hot)")],
    ),
    "persistence": (
        nodes(gpu_health=Health(is_not_persistent=True)),
        [("warning", "GPUs", "persistence mode is off: 10.0.0.2")],
    ),
    "gpus": (nodes(gpu_processes=2), [("warning", "GPUs", "in use: 10.0.0.2 (2 programs)")]),
}
SAME_CHECK = {
    "alone": "reachable",
    "silent": "reachable",
    "raylets": "reachable",
    "torch": "versions",
    "driver": "versions",
    "core_files": "limits",
    "lost_gpus": "gpus",
    "gpu_faults": "gpus",
    "logged_gpu_faults": "gpus",
    "slow_gpus": "gpus",
    "persistence": "gpus",
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_check_says(name):
    """One line, with what to do if it is not ok."""
    facts, expected = CASES[name]
    found = list(getattr(node_checks, SAME_CHECK.get(name, name))(facts))
    assert [(each.severity, each.check) for each in found] == [(severity, check) for severity, check, _ in expected]
    for each, (_, _, text) in zip(found, expected, strict=True):
        assert each.text.endswith(text)
        assert (each.fix == "") == (each.severity is Severity.OK)


def test_every_check_has_a_case():
    """Also one that is added."""
    assert {check.__name__ for check in node_checks.CHECKS} <= CASES.keys()


def test_nothing_is_wrong():
    """No check complains of two equal nodes, nor of facts that are not known."""
    plenty = {"shared_memory": 8 * GIB, "temporary": 9 * GIB, "open_files": 65536, "locked_memory": 65536}
    for facts in (nodes(), nodes(**plenty), Surroundings()):
        found = [each for check in node_checks.CHECKS for each in check(facts)]
        assert {each.severity for each in found} == {Severity.OK}


def test_many_nodes_are_not_all_named():
    """A line stays a line."""
    facts = seen(answers={f"10.0.0.{last}": changed(gpu_processes=1) for last in range(9)})
    (found,) = node_checks.gpus(facts)
    assert found.text.endswith("10.0.0.4 (1 program) and 4 more")
