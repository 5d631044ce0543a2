"""Ranks, and the environment variables that tell them, compared with torchrun's own source."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylaunch.core.placement.environment import (
    Assignment,
    Member,
    Rendezvous,
    assign,
    natural_key,
    omp_env,
    order,
    worker_env,
)
from tests.profiles import examples

MEETING = Rendezvous(
    master_addr="10.0.0.1",
    master_port=29512,
    run_id="night",
    max_restarts=3,
    restart_count=1,
    signals_to_handle=("SIGTERM", "SIGINT"),
)


def member(node: str, nproc: int = 2, address: str = "10.0.0.1") -> Member:
    return Member(node=node, address=address, nproc=nproc)


def env_of(part: Assignment, local_rank: int = 0, **given_env: str) -> dict[str, str]:
    return worker_env(part, local_rank, MEETING, error_file="/job/error.json", given=given_env)


# Order.


def test_natural_order_of_names():
    """Digits compare as numbers: 9 before 10."""
    names = ["10.0.0.10", "node-10", "10.0.0.9", "node-2", "node", "10.0.0.9a"]
    assert sorted(names, key=natural_key) == ["10.0.0.9", "10.0.0.9a", "10.0.0.10", "node", "node-2", "node-10"]


@examples(50)
@given(st.lists(st.text(), max_size=6))
def test_natural_order_of_any_names(names):
    """Even with characters that only look like digits."""
    sorted([*names, "²", "1²", "٣"], key=natural_key)


def test_new_nodes_are_in_natural_order():
    """By address first, then by name."""
    members = [member("node-10"), member("node-9"), member("x", address="10.0.0.10"), member("y", address="10.0.0.9")]
    assert [m.node for m in order(members, ())] == ["node-9", "node-10", "y", "x"]


def test_remaining_nodes_come_first_in_their_order():
    members = [member(node) for node in "abcde"]
    assert [m.node for m in order(members, ("d", "gone", "b"))] == ["d", "b", "a", "c", "e"]


# Ranks.


def test_ranks_of_equal_nodes():
    """RANK = node_rank * nproc + local_rank."""
    first, second = assign(3, [member("a", 4), member("b", 4)])
    assert list(second.ranks) == [4, 5, 6, 7]
    assert second == Assignment(attempt=3, node="b", node_rank=1, nnodes=2, base_rank=4, nproc=4, world_size=8)
    assert (first.base_rank, first.world_size) == (0, 8)


def test_ranks_of_unequal_nodes():
    """The first rank of a node is the number of workers on the nodes before."""
    parts = assign(1, [member("a", 1), member("b", 3), member("c", 2)])
    assert [list(part.ranks) for part in parts] == [[0], [1, 2, 3], [4, 5]]


def test_the_hosts_of_a_world():
    """Several nodes may share one."""
    hosts = [("a", "1"), ("b", "1"), ("c", "2")]
    parts = assign(1, [Member(node=node, address="10.0.0.1", nproc=1, host=host) for node, host in hosts])
    assert [part.nhosts for part in parts] == [2, 2, 2]
    assert assign(1, [member("a", 1)])[0].nhosts == 1


@examples(50)
@given(st.lists(st.integers(1, 8), max_size=8))
def test_ranks_cover_the_world_size(sizes):
    """Each rank from 0 to the world size belongs to exactly one worker."""
    parts = assign(1, [member(str(index), nproc) for index, nproc in enumerate(sizes)])
    assert [rank for part in parts for rank in part.ranks] == list(range(sum(sizes)))
    assert {part.world_size for part in parts} <= {sum(sizes)}


# The environment.


def test_environment_of_a_worker():
    """All variables of local rank 1 on the second of two unequal nodes, after one restart."""
    part = assign(2, [member("a", 1), member("b", 3)])[1]
    assert env_of(part, 1) == {
        "RANK": "2",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_NAME": "default",
        "ROLE_RANK": "2",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29512",
        "TORCHELASTIC_RUN_ID": "night",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/job/error.json",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1",
    }


def torchrun_names() -> set[str]:
    """Return the names in the table of the installed torchrun, from its source: importing it takes seconds."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    agent = Path(spec.origin).parent / "distributed/elastic/agent/server/local_elastic_agent.py"
    for node in ast.walk(ast.parse(agent.read_text(encoding="utf-8"))):
        match node:
            case ast.Assign(targets=[ast.Name(id="worker_env")], value=ast.Dict(keys=keys)):
                return {key.value for key in keys if isinstance(key, ast.Constant)}
    pytest.fail("torchrun's table of variables has moved")


def test_variables_are_those_of_torchrun():
    """All in torchrun's table and those it sets elsewhere; no others."""
    elsewhere = {"LOCAL_RANK", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "OMP_NUM_THREADS"}
    assert set(env_of(assign(1, [member("a", 2)])[0])) == torchrun_names() | elsewhere


def test_variables_set_by_the_user_are_kept():
    """torchrun sets these two only if they are not set."""
    part = assign(1, [member("a", 2)])[0]
    found = env_of(part, TORCH_NCCL_ASYNC_ERROR_HANDLING="0", OMP_NUM_THREADS="8")
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert "OMP_NUM_THREADS" not in found


def test_role_of_the_job():
    """There is only one role, so its ranks are the global ranks."""
    part = assign(1, [member("a", 2)])[0]
    found = worker_env(part, 1, replace(MEETING, role="trainer"), error_file="", given={})
    assert (found["ROLE_NAME"], found["ROLE_RANK"], found["ROLE_WORLD_SIZE"]) == ("trainer", "1", "2")


@pytest.mark.parametrize(
    ("workers", "cpus", "given_env", "found"),
    [
        (1, 1.0, {}, {}),
        (2, 1.0, {}, {"OMP_NUM_THREADS": "1"}),
        (2, 1.0, {"OMP_NUM_THREADS": "8"}, {}),
        (2, 1.0, {"OMP_NUM_THREADS": ""}, {}),
        (1, 1.0, {"OMP_NUM_THREADS": "8"}, {}),
        (1, 4.0, {}, {"OMP_NUM_THREADS": "4"}),
        (2, 4.5, {}, {"OMP_NUM_THREADS": "4"}),
        (2, 4.0, {"OMP_NUM_THREADS": "8"}, {}),
        (1, 1.5, {}, {}),
        (2, 0.5, {}, {"OMP_NUM_THREADS": "1"}),
        (2, 0.0, {}, {"OMP_NUM_THREADS": "1"}),
    ],
)
def test_openmp_threads(workers, cpus, given_env, found):
    """torchrun's rule for workers that share a node is for those that share a host, unless each has several CPUs."""
    assert omp_env(workers, cpus, given_env) == found


def test_one_openmp_thread_if_nodes_share_a_host():
    """Nodes of which the host is not known share none. The number may differ from attempt to attempt."""
    one, two, apart = (Member(node=node, address="10.0.0.1", nproc=1, host=host) for node, host in ("ax", "bx", "cy"))
    threads = [env_of(part).get("OMP_NUM_THREADS") for part in assign(1, (one, two, apart))]
    assert threads == ["1", "1", None]
    unknown = (member("a", 1), member("b", 1))
    for roster in ((one, apart), unknown):
        assert [env_of(part).get("OMP_NUM_THREADS") for part in assign(2, roster)] == [None, None]
