"""How messages between driver and agents become bytes: the first one with the versions of raylaunch, Python and Ray.

They are pickles of plain values, which must only be read from somebody who may run code here anyway. They travel in the
calls of Ray, which runs code for whoever may make calls; docs/security.md says who that is.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache
from importlib import metadata
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from raylaunch.cluster.agent.agent import AgentReport
from raylaunch.core.decoding import prepare
from raylaunch.node.logs.log_files import LogAnswer, LogQuery, LogRead
from raylaunch.node.protocol.node_goal import NodeGoal, Order
from raylaunch.node.protocol.node_spec import AgentSpec

_Message = TypeVar("_Message")
_ORDERS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Order)}
prepare(AgentSpec, AgentReport, *_ORDERS.values())
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
def _protocol(*others: type) -> str:
    """Return a hash of the fields of all that driver and agents send to each other: their names, types and places.

    The version tells none of it, since code may change between two releases. `others`: messages that other processes
    exchange, as pickles, which have the place of a class.
    """
    found: dict[str, list[tuple[str, Any]]] = {}
    for hint in (AgentSpec | AgentReport | NodeGoal | LogQuery | LogRead | LogAnswer, *others):
        _add_fields(hint, found)
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:8]


def _add_fields(hint: Any, found: dict[str, list[tuple[str, Any]]]) -> None:
    """Add the fields of all dataclasses in a type, and in the types of their fields. `found`: by place of the class."""
    for part in get_args(hint):
        _add_fields(part, found)
    if (
        is_dataclass(hint)
        and isinstance(hint, type)
        and (place := f"{hint.__module__}.{hint.__qualname__}") not in found
    ):
        found[place] = [(one.name, one.type) for one in fields(hint)]
        for part in get_type_hints(hint).values():
            _add_fields(part, found)


def dump_spec(spec: AgentSpec) -> bytes:
    """Return the first message to an agent: the driver's versions in a line of text, then the pickle."""
    return _first_line() + pickle.dumps((_plain(replace(spec, parts={})), spec.parts))


def load_spec(message: bytes) -> AgentSpec:
    """Read the first message. Raises VersionMismatchError before anything is unpickled, and UnreadableError."""
    found = _FIRST_LINE.match(message)
    if found is None or found[0] != _first_line():
        msg = f"has {versions()}, and the driver has {found[1].decode() if found else 'another version'}"
        raise VersionMismatchError(msg)
    return _load(message[found.end() :], "the driver's first message", _spec)


def _spec(found: Any) -> AgentSpec:
    spec, parts = found
    return replace(msgspec.convert(spec, AgentSpec), parts=msgspec.convert(parts, dict[str, Any]))


def _first_line() -> bytes:
    return f"{versions()}\n".encode()


def versions(*others: type) -> str:
    """Return what must be equal in driver and agents. Ray is imported in both, if there is one.

    `others`: as in `_protocol`.
    """
    python = ".".join(map(str, sys.version_info[:2]))
    ray = getattr(sys.modules.get("ray"), "__version__", "none")
    return f"raylaunch {version()} (protocol {_protocol(*others)}, Python {python}, Ray {ray})"


def dump_goal(goal: NodeGoal) -> bytes:
    """Return a goal as bytes."""
    orders = [(number, type(order).__name__, _plain(order)) for number, order in goal.orders]
    return pickle.dumps((goal.generation, orders))


def load_goal(message: bytes) -> NodeGoal:
    """Read a goal of the driver. Raises UnreadableError."""
    return _load(message, "a goal", _goal)


def _goal(found: Any) -> NodeGoal:
    generation, rows = msgspec.convert(found, tuple[int, list[tuple[int, str, dict[str, Any]]]])
    orders = ((number, msgspec.convert(body, _ORDERS[name])) for number, name, body in rows)
    return NodeGoal(generation=generation, orders=tuple(orders))


def dump_report(report: AgentReport) -> bytes:
    """Return a report as bytes. Ray's own serialization costs a driver of 1,000 nodes far more."""
    return pickle.dumps(_plain(report))


def load_report(message: bytes) -> AgentReport:
    """Read a report of an agent. Raises UnreadableError."""
    return _load(message, "its report", lambda report: msgspec.convert(report, AgentReport))


def _plain(message: Any) -> Any:
    """Return a message as dicts and lists. As such it is pickled in a third of the time."""
    return msgspec.to_builtins(message, builtin_types=(bytes,))


def _load(message: bytes, whose: str, read: Callable[[Any], _Message]) -> _Message:
    try:
        return read(pickle.loads(message))  # noqa: S301
    except Exception as error:  # noqa: BLE001
        msg = f"{whose} cannot be read: {type(error).__name__}: {error}"
        raise UnreadableError(msg) from None
