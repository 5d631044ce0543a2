"""Whether a run has a driver, as an agent asks that has heard of none for long. Without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RpcError

from raylaunch.cluster import named_resources

NO_ANSWER = RpcError("no connection")


class Cluster:
    """What the head and the driver answer, one thing after the other; an exception is raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: list[Any] = [b"written at noon"]
        self.drivers: list[Any] = []
        self.answers: list[Any] = []
        self.slept: list[float] = []
        monkeypatch.setattr(named_resources.ray_internals, "own_kept", lambda *_: self._next(self.entries))
        monkeypatch.setattr(named_resources, "actor", lambda _: self._next(self.drivers))
        monkeypatch.setattr(named_resources, "ray", SimpleNamespace(get=lambda *_, **__: self._next(self.answers)))
        clock = SimpleNamespace(sleep=self.slept.append, monotonic=lambda: sum(self.slept))
        monkeypatch.setattr(named_resources, "time", clock)

    @staticmethod
    def _next(answers: list[Any]) -> Any:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return found


DRIVER = SimpleNamespace(is_there=SimpleNamespace(remote=lambda: None))


@pytest.fixture
def cluster(monkeypatch) -> Cluster:
    return Cluster(monkeypatch)


def test_a_driver_that_answers(cluster):
    cluster.drivers, cluster.answers = [DRIVER], [True]
    assert named_resources.has_driver("token") is True
    assert cluster.slept == []


def test_a_run_without_a_driver(cluster):
    """The head answers, and knows none."""
    cluster.drivers = [None]
    assert named_resources.has_driver("token") is False
    assert cluster.slept == []


@pytest.mark.parametrize("error", [NO_ANSWER, GetTimeoutError("5 s"), RuntimeError("failed to look up")])
def test_a_head_that_does_not_answer_says_nothing_of_drivers(cluster, error):
    """This host may be cut off, while the driver and other agents go on. What is asked is asked again."""
    cluster.entries = [*[error] * 50, b"written at noon"]
    cluster.drivers, cluster.answers = [error, DRIVER], [True]
    assert named_resources.has_driver("token") is True
    assert len(cluster.slept) == 51
    assert {*cluster.slept} == {2.0}


@pytest.mark.parametrize("error", [GetTimeoutError("5 s"), ActorUnavailableError("the driver", b"0" * 16)])
def test_a_driver_that_cannot_be_reached_from_here(cluster, error):
    """If it renews the entry of the run, it is there, and others may reach it. Else it stands still, or never started."""
    cluster.drivers, cluster.answers = [DRIVER], [error]
    cluster.entries = [*[b"written at noon"] * 10, b"written later"]
    assert named_resources.has_driver("token") is True
    assert 0.0 < sum(cluster.slept) < 30.0
    cluster.slept.clear()
    cluster.entries = [b"written at noon"]
    assert named_resources.has_driver("token") is False
    assert sum(cluster.slept) == 60.0
    cluster.slept.clear()
    cluster.entries = [b"written at noon", b"written at noon", *[NO_ANSWER] * 50, b"written at noon"]
    assert named_resources.has_driver("token") is False
    assert sum(cluster.slept) == 162.0, "the minute counts from when the head answers again"


def test_a_driver_that_ray_has_given_up_meanwhile(cluster):
    """Or that answers again."""
    cluster.drivers, cluster.answers = [DRIVER, DRIVER, None], [ActorDiedError()]
    assert named_resources.has_driver("token") is False
    assert cluster.slept == [2.0, 2.0]
    cluster.drivers, cluster.answers = [DRIVER], [ActorUnavailableError("the driver", b"0" * 16), True]
    assert named_resources.has_driver("token") is True
