"""What agents keep of a driver's state can be read with the key of the run alone."""

from __future__ import annotations

import pytest
from cryptography.exceptions import InvalidTag

from raylaunch.cluster import ray_internals
from raylaunch.cluster.takeover.state_key import StateKey


@pytest.fixture
def head(monkeypatch) -> dict[bytes, bytes]:
    """What the head keeps."""
    kept: dict[bytes, bytes] = {}

    def keep(key, value, namespace, seconds):
        kept.update({key: value}) if value is not None else kept.pop(key)

    monkeypatch.setattr(ray_internals, "keep_in_head", keep)
    monkeypatch.setattr(ray_internals, "ask_head", lambda address, key, namespace, seconds: kept.get(key, b""))
    monkeypatch.setattr("ray.get_runtime_context", lambda: type("Context", (), {"gcs_address": ""}))
    return kept


def test_a_state_can_be_read_with_the_key_that_the_head_keeps(head):
    """Each copy looks different, and none has a part of the state. The head has none of it."""
    assert StateKey.find("run") is None
    sealed = [StateKey.make("run").seal(b"hunter2 " * 4), StateKey.find("run").seal(b"hunter2 " * 4)]
    assert sealed[0] != sealed[1]
    assert not [each for each in sealed if b"hunter2" in each]
    assert StateKey.find("run").open(sealed[1]) == b"hunter2 " * 4
    assert b"hunter2" not in head[b"run"]


def test_what_was_changed_or_is_of_another_run_is_refused(head):
    """It is a pickle, which must not be read unless a driver of the run has written it."""
    sealed = StateKey.make("run").seal(b"state")
    with pytest.raises(InvalidTag):
        StateKey.find("run").open(sealed[:-1] + bytes([sealed[-1] ^ 1]))
    with pytest.raises(InvalidTag):
        StateKey.make("another").open(sealed)
