"""Whether the head of the cluster is there, and what a run makes of it when it is not. No Ray."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import AuthenticationError, RpcError

from raylaunch.cluster import head
from raylaunch.cluster.head import HeadWatch


class Head:
    """Answers, until it is told otherwise. Each answer takes so many seconds of the clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.takes = 0.0
        self.session = "ours"
        self.counts_us = True
        self.error: Exception | None = None

    def monotonic(self) -> float:
        return self.now

    def internal_kv_get(self, key: bytes, *, namespace: bytes, timeout: int) -> bytes:
        assert (key, namespace) == (b"session_name", b"session")
        self.now += self.takes
        if self.error is not None:
            raise self.error
        return self.session.encode()

    def check_alive(self, nodes: list[str], timeout: int) -> list[bool]:
        assert nodes == ["this machine"]
        return [self.counts_us]


@pytest.fixture
def there(monkeypatch):
    found = Head()
    monkeypatch.delenv("RAY_gcs_rpc_server_reconnect_timeout_s", raising=False)
    monkeypatch.setattr(head, "time", found)
    ours = SimpleNamespace(session_name="ours")
    worker = SimpleNamespace(gcs_client=found, current_node_id="this machine")
    monkeypatch.setattr(head, "ray_worker", SimpleNamespace(global_worker=worker, _global_node=ours))
    return found


@pytest.fixture
def watch():
    """With a count of its answers."""
    answers: list[bool] = []
    made = HeadWatch(lambda: answers.append(True), pytest.fail)
    made.answers = answers
    return made


def test_more_is_asked_of_a_head_that_answers_and_of_no_other(there, watch):
    assert watch._look() is None
    there.error = RpcError("Deadline Exceeded")
    assert watch._look() is None
    assert len(watch.answers) == 1


def test_half_of_the_time_after_which_ray_ends_everything_is_borne(there, watch):
    """And not a second of it is kept in mind where it came back."""
    there.error = RpcError("Deadline Exceeded")
    assert watch._look() is None
    there.now += 29.0
    assert watch._look() is None
    there.error = None
    assert watch._look() is None
    there.error = RpcError("Deadline Exceeded")
    assert watch._look() is None
    there.now += 29.0
    assert watch._look() is None
    there.now += 1.0
    assert watch._look().message == "the head of the Ray cluster is gone: it does not answer for 30 s"


def test_where_ray_waits_for_longer_we_do_too(monkeypatch):
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    assert head.patience() == 300.0
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "soon")
    assert head.patience() == 30.0


def test_a_driver_that_stood_still_gives_the_head_another_chance(there, watch):
    """Its question failed since nobody here could hear the answer."""
    there.takes, there.error = 1000.0, RpcError("Deadline Exceeded")
    assert watch._look() is None
    there.takes, there.error = 0.0, None
    assert watch._look() is None
    assert len(watch.answers) == 1


@pytest.mark.parametrize("error", [None, AuthenticationError("WrongClusterID")], ids=["empty", "refuses us"])
def test_one_that_was_started_anew_is_not_the_one_we_know(there, watch, error):
    """Ray ends a process that asks it for anything of the old cluster's."""
    there.session, there.error = "", error
    assert "it was started anew" in watch._look().message
    assert watch.answers == []


def test_what_ray_takes_for_dead_gets_nothing_more(there, watch):
    """A driver whose raylet was killed goes on, and its agents end: it would wait for others that never come."""
    there.counts_us = False
    assert watch._look().message == "Ray on this machine is gone, and with it all that was started from here"
    assert watch.answers == []


def test_the_run_is_told_once(there):
    there.session = "another"
    told = []
    HeadWatch(pytest.fail, told.append)._run()
    (error,) = told
    assert error.exit_code == 3
    assert error.message == (
        "the head of the Ray cluster is gone: it was started anew, and knows nothing of what ran before"
    )
    assert "from its last checkpoint" in error.hint
