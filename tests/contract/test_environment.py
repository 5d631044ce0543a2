"""The environment variables of a worker, their values, and what the ranks can do with them."""

from __future__ import annotations

import os

import pytest

from tests.contract.launchers import Launcher, Run
from tests.contract.shared import envs

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

ALWAYS = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
}


@pytest.mark.parametrize("name", ["static", "standalone", "command", "module", "elastic", "two_nodes"])
def test_every_variable_is_there(runs: dict[str, Run], name: str) -> None:
    assert [ALWAYS - env.keys() for env in envs(runs[name]).values() if not env.keys() >= ALWAYS] == []


def test_values_of_a_single_node(runs: dict[str, Run]) -> None:
    for rank, env in envs(runs["static"]).items():
        number = str(rank)
        expected = {
            "RANK": number,
            "LOCAL_RANK": number,
            "ROLE_RANK": number,
            "GROUP_RANK": "0",
            "ROLE_NAME": "trainer",
        }
        expected |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "ROLE_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}
        expected |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "2"}
        expected |= {"TORCHELASTIC_RUN_ID": "contract", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        assert {name: env[name] for name in expected} == expected


def test_values_of_two_nodes(runs: dict[str, Run]) -> None:
    """Ranks 0 to 7 are consecutive on each node, and all workers get the same store address."""
    found = envs(runs["two_nodes"])
    assert sorted(found) == list(range(8)), runs["two_nodes"].said
    for rank, env in found.items():
        expected = {"LOCAL_RANK": str(rank % 4), "GROUP_RANK": str(rank // 4), "ROLE_RANK": str(rank)}
        expected |= {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "ROLE_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}
        assert {name: env[name] for name in expected} == expected
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in found.values()}) == 1


def test_unequal_nodes() -> None:
    pytest.skip("covered in tests/cluster")


def test_the_parents_variables_are_inherited(runs: dict[str, Run]) -> None:
    assert {env["FROM_PARENT"] for env in envs(runs["static"]).values()} == {"inherited"}


def test_a_given_master_address_and_port_are_taken(runs: dict[str, Run]) -> None:
    """Each worker has connected to them."""
    for env in envs(runs["static"]).values():
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["MASTER_PORT"] == env["GIVEN_PORT"]


def test_nccl_async_error_handling_is_on_unless_said_otherwise(runs: dict[str, Run]) -> None:
    assert {env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] for env in envs(runs["static"]).values()} == {"0"}
    assert {env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] for env in envs(runs["standalone"]).values()} == {"1"}


def test_a_health_check_port_is_visible_if_it_was_set(runs: dict[str, Run]) -> None:
    assert {env["TORCHELASTIC_HEALTH_CHECK_PORT"] for env in envs(runs["static"]).values()} == {"18080"}
    assert all("TORCHELASTIC_HEALTH_CHECK_PORT" not in env for env in envs(runs["standalone"]).values())


def test_a_timer_file_is_visible_if_timers_are_enabled(runs: dict[str, Run]) -> None:
    """All workers of a node share one, named by the launcher or by the user; otherwise there is none."""
    (name,) = {env.get("TORCHELASTIC_TIMER_FILE") for env in envs(runs["module"]).values()}
    assert name
    assert {env.get("TORCHELASTIC_TIMER_FILE") for env in envs(runs["command"]).values()} == {"/tmp/given-timer"}
    assert {env.get("TORCHELASTIC_TIMER_FILE") for env in envs(runs["standalone"]).values()} == {None}


def test_one_thread_for_each_of_several_workers(runs: dict[str, Run]) -> None:
    """OMP_NUM_THREADS keeps its value; if it was not set, it is 1."""
    assert {env["OMP_NUM_THREADS"] for env in envs(runs["static"]).values()} == {"1"}
    assert {env["OMP_NUM_THREADS"] for env in envs(runs["module"]).values()} == {"3"}


@pytest.mark.torchrun_has("--signals-to-handle")
def test_signals_to_handle_are_told(runs: dict[str, Run]) -> None:
    default = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    assert {env["TORCHELASTIC_SIGNALS_TO_HANDLE"] for env in envs(runs["static"]).values()} == {default}
    told = {env["TORCHELASTIC_SIGNALS_TO_HANDLE"] for env in envs(runs["module"]).values()}
    assert told == {"SIGTERM,SIGINT,SIGUSR1,SIGNOPE"}


@pytest.mark.torchrun_has("--virtual-local-rank")
def test_a_virtual_local_rank_is_0(runs: dict[str, Run]) -> None:
    """LOCAL_RANK is 0 for all workers, and each sees only its own device."""
    for rank, env in envs(runs["elastic"]).items():
        assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == ("0", str(rank))


def test_a_run_id_is_taken(launcher: Launcher, runs: dict[str, Run]) -> None:
    """With `--standalone` torchrun makes up a run id; raylaunch keeps the one that was given."""
    assert {env["TORCHELASTIC_RUN_ID"] for env in envs(runs["command"]).values()} == {"from-pet"}
    assert {env["TORCHELASTIC_RUN_ID"] for env in envs(runs["elastic"]).values()} == {"grows"}
    (found,) = {env["TORCHELASTIC_RUN_ID"] for env in envs(runs["standalone"]).values()}
    assert (found == "ignored") is launcher.ours


def test_torch_knows_that_it_was_launched(runs: dict[str, Run]) -> None:
    assert [answer["launched"] for answer in runs["sum_over_two_nodes"].answers().values()] == [True] * 2


@pytest.mark.parametrize(
    ("name", "total"),
    [
        pytest.param("standalone", 1.0, id="tcp"),
        pytest.param("sum_over_two_nodes", 1.0, id="env"),
    ],
)
def test_all_ranks_sum_up(runs: dict[str, Run], name: str, total: float) -> None:
    """`env://`, here on two nodes, and `tcp://localhost:$MASTER_PORT` connect to the store that the launcher started."""
    run = runs[name]
    assert run.code == 0, run.said
    assert {answer["sum"] for answer in run.answers().values()} == {total}


def test_workers_call_each_other(runs: dict[str, Run]) -> None:
    """Workers can use torch.distributed.rpc."""
    assert [answer["doubled"] for answer in runs["sum_over_two_nodes"].answers().values()] == [0, 2]


def test_workers_are_where_the_launcher_was_started(runs: dict[str, Run]) -> None:
    for name in ("static", "standalone", "module"):
        folders = {answer["cwd"] for answer in runs[name].answers().values()}
        assert folders == {os.path.realpath(runs[name].folder)}, name
