"""The monitor of the cluster's head, with a fake head."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray import NodeID
from ray._private import worker
from ray.exceptions import RpcError

from raylaunch.cluster import ray_internals
from raylaunch.cluster.ray_api import gcs_monitor
from raylaunch.cluster.ray_api.gcs_monitor import GcsMonitor

NODE = "1f" * 28


class Head:
    """A head that answers until `error` is set. Each answer takes `takes` seconds of the fake clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.takes = 0.0
        self.session, self.job = "ours", "01000000"
        self.counts_this_machine = True
        self.error: Exception | None = None

    def monotonic(self) -> float:
        return self.now

    def internal_kv_get(self, key: bytes, *, namespace: bytes, timeout: int) -> bytes:
        assert (key, namespace) == (b"session_name", b"session")
        self.now += self.takes
        if self.error is not None:
            raise self.error
        return self.session.encode()

    def check_alive(self, nodes: list[NodeID], timeout: float) -> list[bool]:
        assert [node.hex() for node in nodes] == [NODE]
        return [self.counts_this_machine]


@pytest.fixture
def head(monkeypatch):
    found = Head()
    monkeypatch.delenv("RAY_gcs_rpc_server_reconnect_timeout_s", raising=False)
    monkeypatch.setattr(gcs_monitor, "time", found)
    context = SimpleNamespace(get_session_name=lambda: "ours", get_node_id=lambda: NODE, get_job_id=lambda: found.job)
    monkeypatch.setattr(ray_internals.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray_internals.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(worker, "global_worker", SimpleNamespace(gcs_client=found))
    return found


@pytest.fixture
def monitor(head):
    """A monitor that counts answers."""
    answers: list[bool] = []
    made = GcsMonitor(lambda: answers.append(True), pytest.fail)
    made.answers = answers
    return made


def test_on_answer_is_called_only_if_the_head_answers(head, monitor):
    assert monitor.check() is None
    head.error = RpcError("Deadline Exceeded")
    assert monitor.check() is None
    assert len(monitor.answers) == 1


def test_a_head_may_be_silent_for_half_of_rays_timeout(head, monitor):
    """An answer in between starts the time anew."""
    head.error = RpcError("Deadline Exceeded")
    assert monitor.check() is None
    head.now += 29.0
    assert monitor.check() is None
    head.error = None
    assert monitor.check() is None
    head.error = RpcError("Deadline Exceeded")
    assert monitor.check() is None
    head.now += 29.0
    assert monitor.check() is None
    head.now += 1.0
    assert monitor.check().message == "the head of the Ray cluster is gone: it does not answer for 30 s"


def test_a_longer_timeout_of_rays_is_respected(monkeypatch):
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    assert gcs_monitor.head_timeout() == 300.0
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "soon")
    assert gcs_monitor.head_timeout() == 30.0


def test_a_driver_that_stood_still_gives_the_head_another_chance(head, monitor):
    """Its question failed because this process did not run, not because the head was gone."""
    head.takes, head.error = 1000.0, RpcError("Deadline Exceeded")
    assert monitor.check() is None
    head.takes, head.error = 0.0, None
    assert monitor.check() is None
    assert len(monitor.answers) == 1


@pytest.mark.parametrize(
    "error", [None, ray_internals.AuthenticationError("WrongClusterID")], ids=["empty", "refuses us"]
)
def test_a_head_that_was_started_anew_ends_the_run(head, monitor, error):
    """Ray ends a process that asks a new head about the old cluster."""
    head.session, head.error = "", error
    assert "it was started anew" in monitor.check().message
    assert monitor.answers == []


def test_a_machine_that_ray_counts_as_dead_ends_the_run(head, monitor):
    """When the raylet is killed the driver lives on but its agents end, and no others would ever start."""
    head.counts_this_machine = False
    assert monitor.check().message == "Ray on this machine is gone, and with it all that was started from here"
    assert monitor.answers == []


def test_a_program_that_has_connected_anew_has_ended_what_it_had_in_ray(head, monitor):
    head.job = "02000000"
    assert monitor.check().message == "this program has closed its connection to Ray, and so ended what it had there"


def test_on_lost_is_called_once(head):
    head.session = "another"
    told = []
    GcsMonitor(pytest.fail, told.append).run()
    (error,) = told
    assert error.exit_code == 3
    assert error.message == (
        "the head of the Ray cluster is gone: it was started anew, and knows nothing of what ran before"
    )
    assert "from its last checkpoint" in error.hint


def test_a_ray_that_cannot_be_asked_for_its_nodes_does_not_end_a_run(head, monitor, monkeypatch):
    """Another version may have another shape: no answer about this machine is none that it is dead."""
    node = {"NodeID": NODE, "NodeManagerAddress": "10.0.0.1", "NodeManagerPort": 7}
    monkeypatch.setattr(ray_internals.ray, "nodes", lambda: [node])
    monkeypatch.setattr(head, "check_alive", None)
    assert monitor.check() is None
    head.now += 3600.0
    assert monitor.check() is None
    assert len(monitor.answers) == 2
