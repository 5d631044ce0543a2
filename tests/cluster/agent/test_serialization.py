"""Messages between driver and agents as bytes."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from raylaunch.cluster.agent import serialization
from raylaunch.cluster.agent.agent import AgentReport
from raylaunch.cluster.agent.serialization import UnreadableError, VersionMismatchError
from raylaunch.node.protocol.node_goal import NodeGoal, OpenStore
from tests.cluster.agent.test_ray_actor import SPEC

UNPICKLED: list[str] = []


class Trap:
    """An object whose pickle runs code when it is read."""

    def __reduce__(self):
        return UNPICKLED.append, ("code ran",)


def test_what_is_written_is_read():
    goal, report = NodeGoal().after(OpenStore(attempt=3)), AgentReport(sent_at=1.0)
    assert serialization.load_spec(serialization.dump_spec(SPEC)) == SPEC
    assert serialization.load_goal(serialization.dump_goal(goal)) == goal
    assert serialization.load_report(serialization.dump_report(report)) == report


def test_nothing_of_another_version_is_unpickled():
    """Not even the first message of a driver that does not say which version it has."""
    line = b"raylaunch 9.9 (protocol 0, Python 3.9, Ray 2.9)\n"
    for first, theirs in (
        (line, "raylaunch 9.9 (protocol 0, Python 3.9, Ray 2.9)"),
        (b"", "another version"),
        (line[:-1], "another version"),
    ):
        with pytest.raises(VersionMismatchError) as raised:
            serialization.load_spec(first + pickle.dumps(Trap()))
        assert str(raised.value).endswith(f"and the driver has {theirs}")
    assert UNPICKLED == []


def test_the_python_and_the_ray_of_driver_and_agent_are_compared(monkeypatch):
    """Pickles of functions cannot be read by another Python."""
    message = serialization.dump_spec(SPEC)
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    with pytest.raises(VersionMismatchError, match=r"^has raylaunch \S+ \(protocol \S+, Python 3\.99, Ray \S+\), and "):
        serialization.load_spec(message)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(__version__="2.99.0"))
    with pytest.raises(VersionMismatchError, match=r"Ray 2\.99\.0\), and the driver has raylaunch"):
        serialization.load_spec(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStoreLater:
    """An order to which a field was added."""

    attempt: int
    delay: float


def test_another_field_is_another_protocol(monkeypatch):
    """Code may change while the version does not."""
    before = serialization._protocol()  # noqa: SLF001
    monkeypatch.setattr(serialization, "NodeGoal", OpenStoreLater)
    assert serialization._protocol.__wrapped__() != before  # noqa: SLF001
    assert serialization._protocol() == before  # noqa: SLF001


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"", "EOFError: Ran out of input"),
        (b"!garbage", "UnpicklingError: invalid load key, '!'."),
        (pickle.dumps(7), "ValidationError: Expected `object`, got `int`"),
        (serialization.dump_report(AgentReport(sent_at=0.0))[:-9], "UnpicklingError: pickle data was truncated"),
        (
            serialization.dump_report(AgentReport(sent_at=0.0, status="what")),
            "ValidationError: Expected `object | null`, got `str` - at `$.status`",
        ),
        (b"cno_such_module\nname\n.", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_report_that_cannot_be_read(message, why):
    with pytest.raises(UnreadableError) as raised:
        serialization.load_report(message)
    assert str(raised.value) == f"its report cannot be read: {why}"
