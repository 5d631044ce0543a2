"""Who is where, and in what the nodes differ."""

from raylaunch.core.checkup import Status
from raylaunch.core.surroundings import Surroundings, env_rows, node_rows, version_rows


def _two_nodes(name, first, second, *, kind="versions"):
    """Two ranks on each of two nodes, which differ in one thing."""
    common = {"python": "3.11.7"} if kind == "versions" else {}
    places = {}
    for rank in range(4):
        value = second if rank > 1 else first
        own = {name: value} if value else {}
        host = f"host-{rank // 2}"
        things = {kind: common | own}
        places[rank] = Surroundings(node=rank // 2, host=host, address=f"10.0.0.{rank // 2}", **things)
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
        assert row.status is Status.WRONG
        assert row.lines == ("2.13.0 on node 0 host-0: ranks 0-1", "2.12.0 on node 1 host-1: ranks 2-3")
        assert "same torch" in row.hint


def test_nodes_with_another_numpy_or_none_are_warned_of():
    shared, row = version_rows(_two_nodes("numpy", "", "2.4.6"))
    assert shared.result == "python 3.11.7"
    assert row.status is Status.WARNING
    assert row.lines == ("none on node 0 host-0: ranks 0-1", "2.4.6 on node 1 host-1: ranks 2-3")


def test_interfaces_may_differ_between_nodes_and_other_variables_should_not():
    (row,) = env_rows(_two_nodes("NCCL_SOCKET_IFNAME", "eth0", "ens5", kind="env"))
    assert row.status is Status.INFO
    assert row.lines == ("eth0 on node 0 host-0: ranks 0-1", "ens5 on node 1 host-1: ranks 2-3")
    (row,) = env_rows(_two_nodes("NCCL_DEBUG", "INFO", "", kind="env"))
    assert row.status is Status.WARNING
    assert row.lines[1] == "not set on node 1 host-1: ranks 2-3"
    (row,) = env_rows(_two_nodes("NCCL_DEBUG", "INFO", "INFO", kind="env"))
    assert (row.status, row.result) == (Status.INFO, "INFO")


def test_what_looks_secret_is_only_said_to_be_set():
    (row,) = env_rows(_two_nodes("NCCL_PLUGIN_KEY", "abc", "def", kind="env"))
    assert (row.status, row.result) == (Status.INFO, "***")
    (row,) = env_rows(_two_nodes("NCCL_PLUGIN_KEY", "abc", "", kind="env"))
    assert row.lines == ("*** on node 0 host-0: ranks 0-1", "not set on node 1 host-1: ranks 2-3")
