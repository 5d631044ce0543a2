"""How messages between driver and agents become bytes: the first one with the versions of raylaunch, Python and Ray.

They are pickles, which must only be read from somebody who may run code here anyway. They travel in the calls of Ray,
which runs code for whoever may make calls; docs/security.md says who that is.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import sys
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import metadata
from typing import Any, get_args, get_type_hints

from raylaunch.cluster.agent.agent import AgentReport, AgentSpec
from raylaunch.core.field_types import checker
from raylaunch.node.logs.log_files import LogAnswer, LogQuery, LogRead
from raylaunch.node.protocol.node_goal import NodeGoal

_FIRST_LINE = re.compile(rb"(raylaunch [ -~]{1,300})\n")


class VersionMismatchError(Exception):
    """The driver has another raylaunch than the agent. The text names both: `has ..., and the driver has ...`."""


class UnreadableError(Exception):
    """A message cannot be read. The text says whose it is, and why."""


@cache
def version() -> str:
    """Return the version of the installed raylaunch."""
    try:
        return metadata.version("raylaunch")
    except metadata.PackageNotFoundError:  # it is imported from a folder of source code
        return "unknown"


@cache
def protocol() -> str:
    """Return a hash of the names and types of all fields that driver and agents send to each other.

    The pickle of a dataclass with slots has only the values: if a field is added, it would be read as another one.
    The version does not tell that, since code may change between two releases.
    """
    found: dict[str, list[tuple[str, Any]]] = {}
    _add_fields(AgentSpec | AgentReport | NodeGoal | LogQuery | LogRead | LogAnswer, found)
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:8]


def _add_fields(hint: Any, found: dict[str, list[tuple[str, Any]]]) -> None:
    """Add the fields of all dataclasses in a type, and in the types of their fields. `found`: by class name."""
    for part in get_args(hint):
        _add_fields(part, found)
    if is_dataclass(hint) and isinstance(hint, type) and hint.__qualname__ not in found:
        found[hint.__qualname__] = [(one.name, one.type) for one in fields(hint)]
        for part in get_type_hints(hint).values():
            _add_fields(part, found)


def dump_spec(spec: AgentSpec) -> bytes:
    """Return the first message to an agent: the driver's versions in a line of text, then the pickle."""
    return _first_line() + pickle.dumps(spec)


def load_spec(message: bytes) -> AgentSpec:
    """Read the first message. Raises VersionMismatchError before anything is unpickled, and UnreadableError."""
    found = _FIRST_LINE.match(message)
    if found is None or found[0] != _first_line():
        msg = f"has {_versions()}, and the driver has {found[1].decode() if found else 'another version'}"
        raise VersionMismatchError(msg)
    spec: AgentSpec = _load(message[found.end() :], AgentSpec, "the driver's first message")
    return spec


def _first_line() -> bytes:
    return f"{_versions()}\n".encode()


def _versions() -> str:
    """Return what must be equal in driver and agents. Ray is imported in both, if there is one."""
    python = ".".join(map(str, sys.version_info[:2]))
    ray = getattr(sys.modules.get("ray"), "__version__", "none")
    return f"raylaunch {version()} (protocol {protocol()}, Python {python}, Ray {ray})"


def dump_goal(goal: NodeGoal) -> bytes:
    """Return a goal as bytes."""
    return pickle.dumps(goal)


def load_goal(message: bytes) -> NodeGoal:
    """Read a goal of the driver. Raises UnreadableError."""
    goal: NodeGoal = _load(message, NodeGoal, "a goal")
    return goal


def dump_report(report: AgentReport) -> bytes:
    """Return a report as bytes. Ray's own serialization costs a driver of 1,000 nodes far more."""
    return pickle.dumps(report)


def load_report(message: bytes) -> AgentReport:
    """Read a report of an agent. Raises UnreadableError."""
    report: AgentReport = _load(message, AgentReport, "its report")
    return report


def dump_log_request(asked: LogQuery | LogRead) -> bytes:
    """Return what is asked of log files as bytes."""
    return pickle.dumps(asked)


def load_log_request(message: bytes) -> LogQuery | LogRead:
    """Read what is asked of log files. Raises UnreadableError."""
    asked: LogQuery | LogRead = _load(message, LogQuery | LogRead, "a request for logs")
    return asked


def dump_log_answer(answer: LogAnswer) -> bytes:
    """Return what log files have as bytes."""
    return pickle.dumps(answer)


def load_log_answer(message: bytes) -> LogAnswer:
    """Read what log files have. Raises UnreadableError."""
    answer: LogAnswer = _load(message, LogAnswer, "its logs")
    return answer


def _load(message: bytes, kind: Any, whose: str) -> Any:
    try:
        found = pickle.loads(message)  # noqa: S301
    except Exception as error:  # noqa: BLE001
        msg = f"{whose} cannot be read: {type(error).__name__}: {error}"
        raise UnreadableError(msg) from None
    if not isinstance(found, kind):
        msg = f"{whose} cannot be read: it is of type {type(found).__name__}"
        raise UnreadableError(msg)
    if not checker(kind)(found):
        msg = f"{whose} cannot be read: fields of its {type(found).__name__} have other types"
        raise UnreadableError(msg)
    return found
