"""Nodes that differ: numbers of workers, environments, and the address of the store."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.cluster.driver.driver import Driver
from raylaunch.cluster.local import local_machine
from raylaunch.core.job.job import Entrypoint, Job, NodeRule
from raylaunch.errors import ClusterError
from raylaunch.node.protocol.node_goal import LaunchWorkers, OpenStore
from raylaunch.node.protocol.node_status import StoreOpened
from tests.cluster.conftest import Launcher, left_in_ray, wait_until
from tests.fakes import FakeFleet, RunRecorder
from tests.private_cluster import Cluster, end_marked, free_ports, marked, private_cluster
from tests.warm_python import WarmPython

# The driver, with a fake fleet.


def drive(fleet: FakeFleet, **settings) -> tuple[int, RunRecorder]:
    """Run to the end; return the exit code and the lines for the user."""
    recorder = RunRecorder()
    job = Job(entrypoint=Entrypoint(script="train.py"), nnodes=len(fleet.names), **settings)
    return Driver(job, "run", fleet, recorder, recorder, time.monotonic()).run().exit_code, recorder


def test_with_a_fixed_port_no_store_is_opened_ahead():
    """The next attempt's store is opened when the present attempt is over, and the port free."""
    fleet = FakeFleet(2)
    fleet.on_launched[1] = lambda: fleet.fail(1)
    code, _ = drive(fleet, max_restarts=1, master_port=29500)
    assert code == 0
    found = [order[:3] for order in fleet.sent if order[0] in ("store", "launch")]
    assert found == [
        *(("store", "node-1", 1), ("launch", "node-1", 1), ("launch", "node-2", 1)),
        *(("store", "node-1", 2), ("launch", "node-1", 2), ("launch", "node-2", 2)),
    ]


def test_a_fixed_port_that_is_taken_ends_the_run():
    """Another agent on the same host would not find it free either."""
    fleet = FakeFleet(1)
    taken = StoreOpened(attempt=1, port=0, address="10.0.0.1", why="Address already in use")
    fleet.overrides[OpenStore] = lambda node, _: fleet.report(node, taken)
    words = r"port 29500 of node-1 \(10.0.0.1\) cannot be used as `master_port`: Address already in use"
    with pytest.raises(ClusterError, match=words):
        drive(fleet, master_port=29500)


def test_a_warning_about_the_stores_address_is_shown_once():
    """Each attempt's store repeats it. The workers get the address that is used."""
    fleet = FakeFleet(1)
    told = []

    def open_store(node, order):
        fleet.report(node, StoreOpened(attempt=order.attempt, port=5000, address="10.0.0.9", why="it is not that node"))

    def launch(node, order):
        told.append(order.rendezvous.master_addr)
        fleet.obey(node, order)

    fleet.overrides |= {OpenStore: open_store, LaunchWorkers: launch}
    fleet.on_launched[1] = lambda: fleet.fail(1)
    code, recorder = drive(fleet, max_restarts=1)
    assert code == 0
    assert told == ["10.0.0.9", "10.0.0.9"]
    assert recorder.lines.count("it is not that node") == 1


@pytest.mark.parametrize(
    ("settings", "cpus"),
    [
        ({"nnodes": 2, "nproc_per_node": 500}, 1000),
        ({"nnodes": 2, "spares": 1, "nproc_per_node": 500}, 1500),
        ({"nnodes": 2, "nproc_per_node": 1, "nodes": {"127.0.0.1": NodeRule(nproc_per_node=700)}}, 1400),
        ({"nprocs": 900, "cpus_per_worker": 0.5}, 450),
        ({"nproc_per_node": "cpu"}, os.cpu_count()),
        ({"nproc_per_node": "gpu"}, 300),
    ],
)
def test_a_local_ray_is_as_large_as_the_job(monkeypatch, settings, cpus):
    """It has as many logical CPUs as the workers want, and those of the machine at least. There are 300 GPUs."""
    monkeypatch.setattr(
        local_machine, "visible_gpus", lambda: local_machine.Gpus("CUDA_VISIBLE_DEVICES", tuple(map(str, range(300))))
    )
    assert local_machine.cpus(Job(entrypoint=Entrypoint(script="train.py"), **settings)) == cpus


# Real Ray: three nodes of one machine, with 1, 2 and 3 CPUs.


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with private_cluster(cpus=1, labels="kind=one", lean=True) as cluster:
        cluster.add_node(cpus=2, labels="kind=two")
        cluster.add_node(cpus=3, gpus=2, labels="kind=three")
        yield cluster
        wait_until(lambda: left_in_ray(cluster) == [], 100, "actors and placement groups to be gone")


@pytest.fixture
def unequal(three: Cluster, tmp_path: Path, warm_torch: WarmPython) -> Iterator[Launcher]:
    found = Launcher(tmp_path, three, warm_torch=lambda: warm_torch)
    yield found
    for run in found.runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.communicate()
        end_marked(run.mark, seconds=0.0)
        wait_until(lambda run=run: not marked(run.mark), 100, f"processes of the run to be gone ({run.mark})")


FIND = """
import json, os, signal
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "KIND", "PATH",
         "IFNAME", "ME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
found = {name: os.environ.get(name) for name in names} | {
    "nice": os.nice(0), "cwd": os.getcwd(),
    "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
}
"""
TELL = "print(json.dumps(found), flush=True)"
MEET = f"""
{FIND}
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
found["total"] = total.item()
{TELL}
dist.barrier()
if dist.get_rank() == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


def dumps(run, count: int, attempt: int = 1) -> list[dict[str, object]]:
    """Return what each rank found."""
    return [json.loads(run.log(rank, attempt=attempt)) for rank in range(count)]


@pytest.mark.ray
@pytest.mark.own_cluster
@pytest.mark.timeout(300)
def test_each_node_has_as_many_workers_as_cpus(unequal: Launcher):
    """1 + 2 + 3 ranks with one fixed port restart after kill -9 with the same ranks and with variables by rule."""
    (port,) = free_ports(1)
    nodes = {f"label:kind={kind}": {"env": {"KIND": kind}} for kind in ("one", "two", "three")}
    nodes["0.0.0.0/0"] = {"env": {"PATH": "/rule:$PATH", "ME": "${node_address}"}}
    nodes["127.0.0.0/8"] = {"env": {"IFNAME": "${interface:127.0.0.0/8}$$"}}
    run = unequal.run(
        entrypoint={"script": unequal.script(MEET)},
        nnodes=3,
        nproc_per_node="cpu",
        placement="spread",
        max_restarts=1,
        nodes={
            key: {"env": {name: _literal(text) for name, text in rule["env"].items()}} for key, rule in nodes.items()
        },
        master_port=port,
        show="none",
    )
    assert run.code == 0, run.err
    assert run.result["restarts"] == 1
    first, last = dumps(run, 6), dumps(run, 6, attempt=2)
    assert [found["RANK"] for found in first] == [str(rank) for rank in range(6)]
    assert {found["total"] for found in first} == {21.0}
    sizes = {"one": 1, "two": 2, "three": 3}
    assert sorted(str(found["KIND"]) for found in first) == ["one", "three", "three", "three", "two", "two"]
    assert all(found["LOCAL_WORLD_SIZE"] == str(sizes[str(found["KIND"])]) for found in first)
    assert [found["LOCAL_RANK"] for found in first] == _local_ranks(first)
    assert {str(found["KIND"]): found["OMP_NUM_THREADS"] for found in first} == {"one": None, "two": "1", "three": "1"}
    assert {found["MASTER_PORT"] for found in first} == {str(port)}
    assert {(found["IFNAME"], found["ME"]) for found in first} == {("lo$", first[0]["MASTER_ADDR"])}
    assert all(str(found["PATH"]).startswith("/rule:/") for found in first)
    assert {(found["nice"], found["cwd"], found["blocked"], found["sigint"]) for found in first} == {
        (os.nice(0), str(unequal.folder), 0, True)
    }
    assert last == first


def _literal(text: str) -> str:
    """Escape it for a job file, where `${` begins a reference to another setting."""
    return text.replace("${", "\\${")


def _local_ranks(found: list[dict[str, object]]) -> list[str]:
    seen: dict[object, int] = {}
    ranks = []
    for one in found:
        ranks.append(str(seen.get(one["GROUP_RANK"], 0)))
        seen[one["GROUP_RANK"]] = seen.get(one["GROUP_RANK"], 0) + 1
    return ranks


@pytest.mark.ray
@pytest.mark.own_cluster
@pytest.mark.timeout(300)
def test_the_plan_shows_the_workers_of_each_node(unequal: Launcher):
    """And the rules that match it, and those that match no node."""
    run = unequal.start(
        plan=True,
        entrypoint={"command": "true"},
        nnodes=2,
        nproc_per_node=1,
        placement="spread",
        gpus_per_worker=0,
        nodes={
            "label:kind=three": {"nproc_per_node": 3},
            "label:kind=two": {"nproc_per_node": 2},
            "label:kind=four": {"nproc_per_node": 4},
        },
    ).wait()
    assert run.code == 0, run.err
    lines = run.out.splitlines()
    assert any("2 workers (2 CPUs)" in line and "3 workers (3 CPUs)" in line for line in lines), run.out
    assert "warning  `nodes`: `label:kind=four` matches no node of the cluster" in lines
    assert sorted(line.partition("`")[2] for line in lines if "label:kind=t" in line) == [
        "label:kind=three`",
        "label:kind=two`",
    ]
    assert "would start 5 workers on 2 nodes" in lines


@pytest.mark.ray
@pytest.mark.own_cluster
@pytest.mark.timeout(300)
def test_workers_by_label_run_on_the_node_with_the_label(unequal: Launcher):
    """The two workers are placed by the rule, not on the largest node, where Ray would place them."""
    run = unequal.run(
        entrypoint={"command": "sh", "args": ["-c", "echo $KIND $LOCAL_WORLD_SIZE"]},
        nnodes=3,
        nproc_per_node=1,
        placement="spread",
        gpus_per_worker=0,
        nodes={
            "*": {"env": {"KIND": "other"}},
            "label:kind=two": {"nproc_per_node": 2, "env": {"KIND": "two"}},
        },
        show="none",
    )
    assert run.code == 0, run.err
    assert sorted(run.log(rank) for rank in range(4)) == ["other 1\n", "other 1\n", "two 2\n", "two 2\n"]


@pytest.mark.ray
@pytest.mark.own_cluster
@pytest.mark.timeout(300)
def test_workers_by_label_see_all_gpus_of_their_bundle(unequal: Launcher):
    """2 workers with a GPU each on the node with the label. A single node may use `localhost`. Scripts find Ray."""
    script = """
        import os, ray
        print(os.environ["RANK"], os.environ["MASTER_ADDR"], os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
        if os.environ["RANK"] == "0":
            ray.init(log_to_driver=False, logging_level="ERROR")
            print(len(ray.nodes()))
    """
    run = unequal.run(
        entrypoint={"script": unequal.script(script)},
        nnodes=1,
        nproc_per_node=1,
        gpus_per_worker=1,
        placement="spread",
        nodes={"label:kind=three": {"nproc_per_node": 2}, "label:kind=five": {}},
        master_addr="localhost",
        show="none",
    )
    assert run.code == 0, run.err
    assert (run.log(0), run.log(1)) == ("0 localhost 0,1\n3\n", "1 localhost 0,1\n")
    assert run.err.count("`nodes`: `label:kind=five` matches no node of the cluster") == 1


@pytest.mark.ray
@pytest.mark.own_cluster
@pytest.mark.timeout(300)
def test_a_number_of_workers_in_total(unequal: Launcher):
    """5 workers run on the two largest nodes. A `master_addr` that is not theirs is not used, and the user is told."""
    run = unequal.run(
        entrypoint={"script": unequal.script(FIND + TELL)},
        nnodes=1,
        nproc_per_node=1,
        nprocs=5,
        gpus_per_worker=0,
        placement="spread",
        env={"CUDA_VISIBLE_DEVICES": "7"},  # of the machine where the job is submitted
        master_addr="localhost",
        show="none",
    )
    assert run.code == 0, run.err
    found = dumps(run, 5)
    assert sorted(str(one["LOCAL_WORLD_SIZE"]) for one in found) == ["2", "2", "3", "3", "3"]
    assert [one["RANK"] for one in found] == [str(rank) for rank in range(5)]
    assert {one["CUDA_VISIBLE_DEVICES"] for one in found} == {None}
    assert "localhost" not in {one["MASTER_ADDR"] for one in found}
    assert run.err.count("`master_addr: localhost` means another machine on each node") == 1


@pytest.mark.ray
@pytest.mark.own_cluster
@pytest.mark.timeout(300)
def test_a_port_in_use(unequal: Launcher):
    """Exit code 3 at the first attempt, with the port and the node."""
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        run = unequal.run(entrypoint={"command": "true"}, nnodes=1, nproc_per_node=1, master_port=port)
    assert run.code == 3, run.err
    assert f"error: port {port} of node-1 (" in run.err
    assert "cannot be used as `master_port`: Address already in use" in run.err
    assert "Traceback" not in run.err
