"""What survivors and their supervisor tell each other."""

from __future__ import annotations

import pytest

from raylaunch.worker.survivors import survivor_link
from raylaunch.worker.survivors.survivor_link import Rejoin, SurvivorWord

MESSAGES = [
    SurvivorWord(word="ready", attempt=3),
    Rejoin(attempt=4, env={"RANK": "1", "NAME": "\udcff"}, removed=["OLD"], title="rank 1", stdout="/out", stderr=""),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_what_is_said_is_understood(message):
    assert survivor_link.parse(survivor_link.encode(message), type(message)) == message


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"{}", b'{"word": 1, "attempt": "x"}', b'{"word": "ready"}'])
@pytest.mark.parametrize("kind", [SurvivorWord, Rejoin])
def test_anything_else_is_no_message(data, kind):
    assert survivor_link.parse(data, kind) is None


def test_there_is_no_connection_outside_a_launch(monkeypatch):
    monkeypatch.delenv(survivor_link.ADDRESS_VARIABLE, raising=False)
    assert survivor_link.connect() is None
    monkeypatch.setenv(survivor_link.ADDRESS_VARIABLE, "nobody-listens-here")
    assert survivor_link.connect() is None
