"""The self-check, under torchrun where all is well, and with ranks that were told to fail."""

import json
import os
import subprocess
import sys
import threading
from datetime import timedelta

import pytest

from raylaunch.worker.selfcheck import program
from raylaunch.worker.selfcheck.findings import CheckStatus, gpu_sharing_text
from tests.worker.alone import environment

_OPERATIONS = {
    "init env://",
    "broadcast",
    "reduce",
    "all_reduce",
    "gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "barrier",
    "DDP step",
    "FSDP2 step",
    "init tcp://",
}
_PAIRS = {"send, recv", "batch_isend_irecv"}


def run(warm_torch, folder, module, *args, cwd, env=None):
    """Run a module where torch is imported already; return its exit code, stdout and stderr."""
    names = [folder / f"{module}.{end}" for end in ("out", "err")]
    with open(os.devnull) as nothing, names[0].open("w") as out, names[1].open("w") as err:
        env = environment(env or {})
        process = warm_torch.start(module, args, env=env, cwd=cwd, files=(nothing, out, err))
    return process.wait(250), *(name.read_text() for name in names)


@pytest.fixture(scope="module")
def without():
    """The statuses of what torch does not have on CPUs: 2.6 has no such FSDP2."""
    import torch

    return {} if hasattr(torch.cpu.Stream, "record_event") else {"FSDP2 step": "skipped"}


def _statuses(rows):
    return {row["name"]: row["status"] for row in rows if row["part"] == "gloo"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_all_is_well_every_row_is_ok(ranks, warm_torch, tmp_path, without):
    """One rank by itself, and two under torchrun."""
    folder = tmp_path / "empty"
    folder.mkdir()
    found = folder / "rows.json"
    module, args, ranked = "raylaunch.worker.selfcheck", ("--json", str(found), "--backends", "gloo"), {}
    if ranks == 1:
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK")
        ranked = dict.fromkeys(names, "0") | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        ranked |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    else:
        args = ("--standalone", f"--nproc-per-node={ranks}", "-m", module, *args)
        module, ranked = "torch.distributed.run", {"PYTHON_EXEC": str(warm_torch.executable())}
    code, out, err = run(warm_torch, tmp_path, module, *args, cwd=folder, env=ranked)
    assert code == 0, out + err
    rows = json.loads(found.read_text())
    wanted = dict.fromkeys(_OPERATIONS, "ok") | without
    wanted |= dict.fromkeys(_PAIRS, "skipped" if ranks == 1 else "ok")
    wanted["init_device_mesh, 2-D"] = "skipped"  # tests/cluster has four ranks
    wanted["all_reduce speed"] = "skipped" if ranks == 1 else "info"
    assert _statuses(rows) == wanted
    assert [row["lines"][0].split(", ")[-1] for row in rows if row["part"] == "nodes"] == [
        "rank 0" if ranks == 1 else f"ranks 0-{ranks - 1}"
    ]
    lines = err.splitlines()
    before = lines.index("gloo: broadcast ...")
    assert lines[before + 1].startswith("gloo: broadcast: ok, ")


@pytest.fixture(scope="module")
def failing(warm_torch, tmp_path_factory):
    """Two checks at a time: one whose rank 1 does not come back, one in which many things go wrong; their folder and exit codes."""
    folder = tmp_path_factory.mktemp("failing")
    code, out, err = run(warm_torch, folder, "tests.worker.failing_ranks", cwd=folder)
    assert code == 0, err
    return folder, json.loads(out)


@pytest.fixture
def sabotaged(failing):
    """The check in which many things go wrong: its rows by name."""
    rows = json.loads((failing[0] / "wrong_in_many_ways" / "rows.json").read_text())
    return {row["name"]: row for row in rows}


def test_all_ranks_fail_if_anything_is_wrong(failing):
    assert failing[1][1:] == [1, 1]


def test_a_wrong_value_is_shown_beside_the_expected_one(sabotaged):
    row = sabotaged["all_reduce"]
    assert row["status"] == "wrong"
    assert "rank 1: expected [1000.0, 1.0, 0.0], got [1001.0, 2.0, 1.0]" in row["lines"]


def test_a_message_of_another_rank_than_the_expected_is_noticed(sabotaged):
    row = sabotaged["all_gather_object"]
    assert row["status"] == "wrong"
    assert "rank 1: expected [{'from': 0}, {'from': 1}], got [{'from': 1}, {'from': 0}]" in row["lines"]


def test_a_barrier_that_does_not_wait_is_noticed(sabotaged):
    row = sabotaged["barrier"]
    assert row["status"] == "wrong"
    assert "rank 0: expected all 2 ranks to have come, but 1 had" in row["lines"]


def test_an_exception_of_one_rank_comes_before_the_timeouts_it_causes(sabotaged):
    row = sabotaged["batch_isend_irecv"]
    assert row["status"] == "wrong"
    assert row["lines"][0] == "rank 1: ValueError: no cable"
    assert row["lines"][1].startswith("rank 0: RuntimeError: ")
    assert "GLOO_SOCKET_IFNAME" in row["hint"]


def test_what_the_backend_lacks_on_all_ranks_is_not_wrong(sabotaged):
    row = sabotaged["all_to_all_single"]
    assert row["status"] == "not supported"
    assert row["lines"] == ["Backend gloo does not implement startCoalescing"]


def test_what_comes_after_a_wrong_value_is_checked_too(sabotaged):
    good = {"init env://", "broadcast", "gather", "scatter", "reduce_scatter_tensor", "send, recv"}
    assert {name: sabotaged[name]["status"] for name in good} == dict.fromkeys(good, "ok")


def test_what_comes_after_an_error_is_skipped(sabotaged, failing):
    """The process group may be of no use any more."""
    row = sabotaged["all others"]
    assert row["status"] == "skipped"
    assert row["lines"] == ["no process group can be used after batch_isend_irecv has failed"]
    assert "DDP step" not in sabotaged
    said = (failing[0] / "wrong_in_many_ways" / "said-0.txt").read_text().splitlines()
    assert said.index("gloo: barrier ...") < said.index("gloo: barrier: wrong")


def test_another_torch_is_wrong_and_another_numpy_a_warning(sabotaged):
    rows = sabotaged
    assert rows["torch"]["status"] == "wrong"
    assert rows["torch"]["lines"][1].startswith("1.0 on node 1 ")
    assert rows["torch"]["lines"][1].endswith(": rank 1")
    assert rows["numpy"]["status"] == "warning"
    assert "python" not in rows


def test_variables_that_name_interfaces_may_differ_between_nodes(sabotaged):
    assert sabotaged["NCCL_SOCKET_IFNAME"]["status"] == "info"
    assert sabotaged["NCCL_DEBUG"]["status"] == "warning"


def test_a_rank_that_does_not_come_back_is_named_and_ends_the_check(failing):
    """It prints its stack."""
    folder = failing[0] / "one_stuck"
    said = (folder / "said-0.txt").read_text()
    assert failing[1][0] == 1
    assert "did not arrive: rank 1" in said
    assert said.splitlines()[-1] == "wrong: gloo: reduce"
    assert "in sleeping" in (folder / "said-1.txt").read_text()


def test_a_path_that_cannot_be_written_is_said_at_the_end(alone, capsys):
    assert program.report(alone, "/dev/null/rows.json") == 1
    assert "error: cannot write `/dev/null/rows.json`: Not a directory" in capsys.readouterr().err


def test_the_check_can_be_imported_where_there_is_no_torch():
    code = "import sys, raylaunch.worker.selfcheck.program; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_outside_of_a_job_the_check_says_how_to_run_it(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert program.main([]) == 2
    assert "hint: run it by `raylaunch check`" in capsys.readouterr().err


def outcome(error):
    """Return what becomes of a check that raises this, on one rank without a process group."""
    from raylaunch.worker.selfcheck import checks

    def fail(_):
        raise error

    return checks.run(fail, context(checks.CheckContext))


def context(kind):
    return kind(backend="gloo", rank=0, size=1, device=None, timeout=timedelta(seconds=100), store=None)


def free_port():
    from raylaunch.worker.selfcheck import checks

    return checks.free_port()


def test_a_check_that_raises_becomes_an_outcome():
    from raylaunch.worker.selfcheck.checks import CheckSkippedError, WrongResultError

    assert outcome(WrongResultError("3, not 4")).text == "3, not 4"
    assert not outcome(WrongResultError("3, not 4")).raised
    assert outcome(CheckSkippedError("alone")).status is CheckStatus.SKIPPED
    assert outcome(SystemExit(3)).text == "SystemExit: 3"
    assert outcome(SystemExit(3)).raised
    assert outcome(RuntimeError("Timed out waiting 5000ms\nstack")).late
    assert outcome(RuntimeError("Timed out waiting 5000ms\nstack")).text == "RuntimeError: Timed out waiting 5000ms"
    assert not outcome(RuntimeError("Connection reset")).late


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Backend gloo does not support reduce_scatter"),
        NotImplementedError("Could not run 'c10d::alltoall_' with arguments from the 'CUDA' backend"),
        RuntimeError("No backend type associated with device type cuda"),
    ],
)
def test_what_torch_says_of_missing_operations_is_understood(error):
    assert outcome(error).status is CheckStatus.UNSUPPORTED


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Connection closed by peer; this transport does not support retries"),
        ValueError("Backend gloo does not support reduce_scatter"),
        RuntimeError("Timed out waiting 5000ms for recv operation to complete"),
    ],
)
def test_a_real_failure_is_not_called_unsupported(error):
    assert outcome(error).status is CheckStatus.WRONG


def test_gloo_itself_words_a_missing_operation_so():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError) as caught:
            dist.group.WORLD._get_backend(torch.device("cpu"))._start_coalescing()  # noqa: SLF001
    finally:
        dist.destroy_process_group()
    assert outcome(caught.value).status is CheckStatus.UNSUPPORTED


def _checks(size):
    """Return the check of each rank, without a launcher."""
    import torch.distributed as dist

    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=100))
    return [program.SelfCheck(store=store, rank=rank, size=size, timeout=3.0) for rank in range(size)]


@pytest.fixture
def alone(monkeypatch):
    """A check of one rank in this process, without a launcher."""
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
        monkeypatch.setenv(name, "")  # the check sets them; that is undone
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    (check,) = _checks(1)
    return check


def test_a_backend_is_not_checked_after_another_has_failed(alone, monkeypatch):
    """The hint says how to check it."""
    from raylaunch.worker.selfcheck import checks

    def fail(_):
        raise OSError("no route to host")

    monkeypatch.setattr(checks, "CHECKS", [("init env://", fail), ("broadcast", fail)])
    monkeypatch.setattr(program.versions, "backend_problems", lambda: {"gloo": "", "ucc": ""})
    alone.run(None)
    rows = {(row.part, row.name): row.result for row in alone.rows}
    assert rows["gloo", "init env://"] == "wrong"
    assert rows["gloo", "all others"] == "skipped: no process group can be used after init env:// has failed"
    assert rows["ucc", "all checks"] == "skipped: init env:// of gloo failed; check this alone with `--backends ucc`"


def test_a_backend_that_was_asked_for_must_be_there(alone):
    alone.run(["mpi", "carrier-pigeon"])
    rows = {row.part: row for row in alone.rows}
    assert rows["mpi"].lines == ("rank 0: only `mpirun` can start its ranks",)
    assert rows["carrier-pigeon"].lines == ("rank 0: torch knows no such backend",)


def test_ranks_that_share_a_gpu_are_found():
    assert gpu_sharing_text(["a 1", "a 2", "b 1", "a 2"]) == "ranks 1, 3 share GPUs, which NCCL does not take"
    assert gpu_sharing_text(["a 1", "a 2"]) == ""


def test_all_ranks_get_the_decision_of_rank_0():
    got = {}

    def take_part(check):
        got[check.rank] = check.decide(check.rank, lambda values: sum(values.values()), timeout=100)

    threads = [threading.Thread(target=take_part, args=(check,)) for check in _checks(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {0: 3, 1: 3, 2: 3}


def test_rank_0_names_who_stays_away_and_tells_the_others(monkeypatch):
    monkeypatch.setattr(program, "_MARGIN", 0.1)
    first, second, _, _ = _checks(4)
    second.store.set("1/1", "null")
    for check in (first, second):
        with pytest.raises(program.AbsentError):
            check.decide(None, dict, timeout=0)
        assert check.absent == [2, 3]


def test_a_silent_rank_0_is_noticed(monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(program, "_MARGIN", 0.05)
    _, second = _checks(2)
    with pytest.raises(dist.DistError):
        second.decide(None, dict, timeout=0)


def test_the_others_wait_until_rank_0_has_reported_and_rank_0_goes_last():
    first, second, absent = _checks(3)
    first.absent = second.absent = [absent.rank]
    gone = []
    threads = [
        threading.Thread(target=lambda check=check: gone.append((check.rank, check.leave(3 - check.rank))))
        for check in (second, first)
    ]
    threads[0].start()
    threads[0].join(0.1)
    assert not gone
    threads[1].start()
    for thread in threads:
        thread.join()
    assert sorted(gone) == [(0, 3), (1, 3)]


def test_rank_0_goes_last():
    first, second = _checks(2)
    gone = threading.Event()
    thread = threading.Thread(target=lambda: (first.leave(0), gone.set()))
    thread.start()
    assert not gone.wait(0.1)
    second.leave(0)
    thread.join()
    assert gone.is_set()
