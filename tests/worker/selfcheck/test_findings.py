"""Outcomes and environments of all ranks become rows, and rows a table and an exit code."""

from raylaunch.worker.selfcheck.findings import (
    CheckOutcome,
    CheckRow,
    CheckStatus,
    RankEnvironment,
    _duration,
    _ranks_text,
    absent_row,
    env_rows,
    exit_code,
    merge_outcomes,
    node_rows,
    table,
    version_rows,
)

_OK = CheckOutcome(status=CheckStatus.OK, seconds=0.002)


def _wrong(text, seconds=0.1, *, late=False):
    return CheckOutcome(status=CheckStatus.WRONG, text=text, seconds=seconds, late=late)


def test_what_went_well_on_all_ranks_took_as_long_as_the_slowest():
    row = merge_outcomes("gloo", "reduce", {0: _OK, 1: CheckOutcome(status=CheckStatus.OK, seconds=0.25)})
    assert row.status is CheckStatus.OK
    assert row.result == "ok, 250 ms"
    assert exit_code([row]) == 0


def test_what_all_ranks_lack_is_not_wrong():
    lacking = CheckOutcome(status=CheckStatus.UNSUPPORTED, text="Backend gloo does not support reduce")
    row = merge_outcomes("gloo", "reduce", {0: lacking, 1: lacking})
    assert row.result == "not supported: Backend gloo does not support reduce"
    assert exit_code([row]) == 0


def test_what_only_some_ranks_lack_is_wrong():
    row = merge_outcomes("gloo", "reduce", {0: _OK, 1: CheckOutcome(status=CheckStatus.UNSUPPORTED, text="no"), 2: _OK})
    assert row.status is CheckStatus.WRONG
    assert row.lines == ("rank 1: not supported: no", "ranks 0, 2: ok")
    assert exit_code([row]) == 1


def test_the_first_failure_comes_before_the_timeouts_that_it_caused():
    late = [_wrong("RuntimeError: timed out", 30 - rank, late=True) for rank in range(3)]
    row = merge_outcomes(
        "gloo", "reduce", {0: late[0], 1: late[1], 2: late[2], 3: _wrong("ValueError: no cable", 31), 4: _OK}
    )
    assert row.lines == ("rank 3: ValueError: no cable", "ranks 0-2: RuntimeError: timed out", "rank 4: ok")
    assert row.result == "wrong"
    assert row.hint.endswith("GLOO_SOCKET_IFNAME")


def test_many_different_accounts_are_cut():
    row = merge_outcomes("gloo", "reduce", {rank: _wrong(f"got {rank}", rank) for rank in range(20)})
    assert len(row.lines) == 7
    assert row.lines[0] == "rank 0: got 0"
    assert row.lines[-1] == "ranks 6-19: other accounts of it"


def test_a_check_that_has_something_to_tell_is_information():
    row = merge_outcomes("gloo", "speed", {0: CheckOutcome(status=CheckStatus.OK, text="1 GB/s"), 1: _OK})
    assert (row.status, row.result, row.details) == (CheckStatus.INFO, "1 GB/s", ())


def test_a_wrong_row_says_what_to_look_at():
    def hint(part, name, *, late=False):
        return merge_outcomes(part, name, {0: _wrong("x", late=late)}).hint

    assert hint("gloo", "reduce") == ""
    assert "any port" in hint("gloo", "init tcp://")
    assert hint("gloo", "init tcp://").endswith("GLOO_SOCKET_IFNAME")
    assert "GLOO_SOCKET_IFNAME" in hint("gloo", "init env://")
    assert hint("nccl", "reduce", late=True).endswith(
        "with NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO shows which way NCCL goes"
    )
    assert hint("ucc", "reduce", late=True).endswith("look at the nodes' network")


def test_ranks_that_did_not_arrive_are_named():
    row = absent_row("gloo", "reduce", [1, 2, 3])
    assert row.status is CheckStatus.WRONG
    assert row.lines == ("did not arrive: ranks 1-3",)


def test_the_table_has_a_block_for_each_part_and_a_verdict():
    rows = [
        CheckRow(part="nodes", name="node 0", status=CheckStatus.INFO, lines=("alpha, 10.0.0.1, ranks 0-1",)),
        CheckRow(part="versions", name="numpy", status=CheckStatus.WARNING, lines=("2.0 on node 0", "2.1 on node 1")),
        CheckRow(part="versions", name="kernel", status=CheckStatus.WARNING, lines=("6 on node 0", "7 on node 1")),
        CheckRow(part="gloo", name="init env://", status=CheckStatus.OK, seconds=0.0121),
        CheckRow(part="gloo", name="all others", status=CheckStatus.SKIPPED, lines=("no process group can be used",)),
        merge_outcomes("gloo", "init tcp://", {0: _wrong("timed out", 30, late=True)}),
        CheckRow(
            part="environment",
            name="NCCL_SOCKET_IFNAME",
            status=CheckStatus.INFO,
            lines=("eth0 on node 0", "no on node 1"),
        ),
    ]
    assert (
        table(rows)
        == """\
nodes
  node 0              alpha, 10.0.0.1, ranks 0-1

versions
  numpy               warning
      2.0 on node 0
      2.1 on node 1
  kernel              warning
      6 on node 0
      7 on node 1

gloo
  init env://         ok, 12.1 ms
  all others          skipped: no process group can be used
  init tcp://         wrong
      rank 0: timed out
      hint: rank 0's node must take connections on any port: look for a firewall between the nodes, or name the interface that joins the nodes with GLOO_SOCKET_IFNAME
environment
  NCCL_SOCKET_IFNAME
      eth0 on node 0
      no on node 1

1 ok, 1 skipped, 1 wrong, 2 warnings
wrong: gloo: init tcp://
""".replace("SOCKET_IFNAME\nenvironment", "SOCKET_IFNAME\n\nenvironment")
    )


def test_an_empty_table_says_so():
    assert table([]) == "nothing to check\n"


def test_times_are_in_the_unit_that_fits():
    assert [_duration(seconds) for seconds in (0.00025, 0.0009996, 0.0021, 0.5, 0.9996, 42.0)] == [
        "250 us",
        "1 ms",
        "2.1 ms",
        "500 ms",
        "1.0 s",
        "42.0 s",
    ]


def test_ranks_are_named_by_their_runs():
    assert _ranks_text([3]) == "rank 3"
    assert _ranks_text([2, 1, 0, 6]) == "ranks 0-2, 6"
    assert _ranks_text(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, ..."


# Rows of nodes, versions and variables.


def _two_nodes(name, first, second, *, kind="versions"):
    """Two ranks on each of two nodes, which differ in one thing."""
    common = {"python": "3.11.7"} if kind == "versions" else {}
    places = {}
    for rank in range(4):
        value = second if rank > 1 else first
        own = {name: value} if value else {}
        host = f"host-{rank // 2}"
        things = {kind: common | own}
        places[rank] = RankEnvironment(node=rank // 2, host=host, address=f"10.0.0.{rank // 2}", **things)
    return places


def test_each_node_has_a_row_with_its_ranks():
    rows = list(node_rows(_two_nodes("torch", "2.13.0", "2.13.0")))
    assert [(row.name, row.result) for row in rows] == [
        ("node 0", "host-0, 10.0.0.0, ranks 0-1"),
        ("node 1", "host-1, 10.0.0.1, ranks 2-3"),
    ]


def test_what_is_the_same_everywhere_takes_one_row():
    (row,) = version_rows(_two_nodes("torch", "2.13.0", "2.13.0"))
    assert row.result == "python 3.11.7, torch 2.13.0"


def test_nodes_with_another_torch_or_nccl_are_wrong():
    for name in ("torch", "nccl"):
        _, row = version_rows(_two_nodes(name, "2.13.0", "2.12.0"))
        assert row.status is CheckStatus.WRONG
        assert row.lines == ("2.13.0 on node 0 host-0: ranks 0-1", "2.12.0 on node 1 host-1: ranks 2-3")
        assert "same torch" in row.hint


def test_nodes_with_another_numpy_or_none_are_warned_of():
    shared, row = version_rows(_two_nodes("numpy", "", "2.4.6"))
    assert shared.result == "python 3.11.7"
    assert row.status is CheckStatus.WARNING
    assert row.lines == ("none on node 0 host-0: ranks 0-1", "2.4.6 on node 1 host-1: ranks 2-3")


def test_interfaces_may_differ_between_nodes_and_other_variables_should_not():
    (row,) = env_rows(_two_nodes("NCCL_SOCKET_IFNAME", "eth0", "ens5", kind="env"))
    assert row.status is CheckStatus.INFO
    assert row.lines == ("eth0 on node 0 host-0: ranks 0-1", "ens5 on node 1 host-1: ranks 2-3")
    (row,) = env_rows(_two_nodes("NCCL_DEBUG", "INFO", "", kind="env"))
    assert row.status is CheckStatus.WARNING
    assert row.lines[1] == "not set on node 1 host-1: ranks 2-3"
    (row,) = env_rows(_two_nodes("NCCL_DEBUG", "INFO", "INFO", kind="env"))
    assert (row.status, row.result) == (CheckStatus.INFO, "INFO")


def test_what_looks_secret_is_only_said_to_be_set():
    (row,) = env_rows(_two_nodes("NCCL_PLUGIN_KEY", "abc", "def", kind="env"))
    assert (row.status, row.result) == (CheckStatus.INFO, "***")
    (row,) = env_rows(_two_nodes("NCCL_PLUGIN_KEY", "abc", "", kind="env"))
    assert row.lines == ("*** on node 0 host-0: ranks 0-1", "not set on node 1 host-1: ranks 2-3")
