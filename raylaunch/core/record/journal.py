"""The journal of a run: each event with the actions that followed. Replaying the events gives the same actions.

`events.jsonl` is JSON lines. The first is `{"job": ..., "began": ..., "clock": ..., "versions": ..., "epoch": ...}`,
the second `{"event": null, "actions": [...]}` with the actions before any event, and each further line
`{"event": {...}, "actions": [...]}`, in the order in which the machine handled the events. Another driver that takes a
detached run over makes the file anew, with a higher epoch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_args

from raylaunch.core.failures.failure import Failure, WorkerError
from raylaunch.core.failures.stacks import StackGroup
from raylaunch.core.field_types import checker
from raylaunch.core.job.job import Entrypoint, Job, NodeRule, RayOptions
from raylaunch.core.machine.commits import Commit, CommitRate, HeldCommit, NodeMemory, PartFetch
from raylaunch.core.machine.events_and_actions import Action, Event, RestartTimings, UnreachablePeer
from raylaunch.core.machine.machine import Machine

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *get_args(Action),
        *get_args(Event),
        *(RestartTimings, UnreachablePeer, Failure, WorkerError, StackGroup, Job, Entrypoint, NodeRule, RayOptions),
        *(Commit, CommitRate, HeldCommit, NodeMemory, PartFetch),
    )
}

_FORMER_NAMES = {
    "AskCheckpoint": "RequestCheckpoint",
    "Forward": "ForwardSignal",
    "ForwardAsked": "ForwardRequested",
    "Readmit": "Uncordon",
    "Shun": "Cordon",
    "StopAsked": "StopRequested",
    "Turnover": "RestartTimings",
    "WakeAt": "SetTimer",
}
"""Names that classes have in journals of raylaunch 0.1. Such journals still replay."""

_FORMER_FIELDS = {"turnover": "timings"}
"""Names that fields have in such journals."""

_KINDS |= {former: _KINDS[name] for former, name in _FORMER_NAMES.items()}

_MOST_DIGITS = 300
"""Digits of a whole number. From 309 digits on, no float can hold it (`sys.float_info.max_10_exp`)."""

_KIND = "is"
"""The key that names the class. No field has this name: `type` is one of `WorkerError`."""

_AS_WRITTEN = frozenset(
    (
        *("args", "kwargs", "env", "preload", "signals_to_handle", "signals_to_forward"),
        *("duplicate_stdout_filters", "duplicate_stderr_filters"),
    )
)
"""Fields of a job with lists and dicts of the user, which may look like encoded objects of raylaunch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalHeader:
    """The first line: the job, when the run began (ISO 8601), and the driver's `time.monotonic()` at that time."""

    job: Job
    began: str
    clock: float
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions of raylaunch and what it needs, on the driver's machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """An event and the actions that followed. `event` is None for the actions before any event."""

    event: Event | None
    actions: tuple[Action, ...]


def header(
    job: Job, began: str, clock: float = 0.0, versions: Mapping[str, str] | None = None, *, epoch: int = 1
) -> str:
    """Return the first line.

    `began` is the time that `at` counts from (ISO 8601), `clock` the driver's `time.monotonic()` at that time. `epoch`:
    of the driver.
    """
    known = {"job": encode(job), "began": began, "clock": clock, "versions": dict(versions or {}), "epoch": epoch}
    return json.dumps(known)


def line(entry: JournalEntry) -> str:
    """Return an entry as a line of JSON, without newline."""
    return json.dumps({"event": encode(entry.event), "actions": encode(entry.actions)})


def read(lines: Iterable[str]) -> tuple[Job, list[JournalEntry]]:
    """Return the job and the entries. Omit a last line that was cut off by a full disk or a kill.

    Raise ValueError if it is no journal.
    """
    rows = list(_rows(lines))
    header = _header(rows[0] if rows else None)
    return header.job, [_entry(row) for row in rows[1:]]


def read_header(text: str) -> JournalHeader:
    """Return the content of the first line. Raise ValueError if it is none."""
    return _header(_loads(text))


def read_entry(text: str) -> JournalEntry:
    """Return the content of one of the other lines. Raise ValueError if it is none that this version knows."""
    return _entry(_loads(text))


def _header(row: Any) -> JournalHeader:
    job = _decoded(row["job"]) if isinstance(row, dict) and "job" in row else None
    if not isinstance(job, Job) or not checker(Job)(job):
        msg = "not an event log: the first line names no job"
        raise ValueError(msg)
    versions = row.get("versions")
    return JournalHeader(
        job=job,
        began=str(row.get("began", "")),
        clock=row.get("clock", 0.0),
        versions={str(name): str(value) for name, value in versions.items()} if isinstance(versions, dict) else {},
    )


def _entry(row: Any) -> JournalEntry:
    body = row if isinstance(row, dict) else {}
    event, actions = _decoded(body.get("event", "")), _decoded(body.get("actions"))
    entry = JournalEntry(event=event, actions=actions)
    if not checker(JournalEntry)(entry) or not (entry.event is None or math.isfinite(entry.event.at)):
        msg = "neither an event nor its actions"
        raise ValueError(msg)
    return entry


def _decoded(value: Any) -> Any:
    """Return the decoded value. Raise ValueError if it has fields that this version does not know, or lacks some."""
    try:
        return decode(value)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _rows(lines: Iterable[str]) -> Iterator[Any]:
    for text in lines:
        try:
            yield _loads(text)
        except json.JSONDecodeError:
            return


def _loads(text: str) -> Any:
    return json.loads(text, parse_int=_int)


def _int(text: str) -> int:
    """Return a whole number that a float can hold too. Raise ValueError for others: nobody has counted so far."""
    if len(text) > _MOST_DIGITS:
        msg = f"a whole number has {len(text)} digits"
        raise ValueError(msg)
    return int(text)


def replay(job: Job, events: Iterable[Event]) -> list[JournalEntry]:
    """Return what a new machine does with these events."""
    machine = Machine(job)
    entries = [JournalEntry(event=None, actions=tuple(machine.start()))]
    entries.extend(JournalEntry(event=event, actions=tuple(machine.handle(event))) for event in events)
    return entries


def encode(value: Any) -> Any:
    """Return a value as JSON has it: dataclasses as objects with their class name, tuples as lists."""
    if is_dataclass(value) and not isinstance(value, type):
        body = {field.name: encode(getattr(value, field.name)) for field in fields(value)}
        return {_KIND: type(value).__name__, **body}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {name: encode(item) for name, item in value.items()}
    return value


def decode(value: Any) -> Any:
    """Return the value that `encode` was given. Lists become tuples, except values of the user in a job."""
    if isinstance(value, dict) and value.get(_KIND) in _KINDS:
        kind = _KINDS[value[_KIND]]
        body = {str(_FORMER_FIELDS.get(name, name)): item for name, item in value.items() if name != _KIND}
        return kind(**{name: item if name in _AS_WRITTEN else decode(item) for name, item in body.items()})
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if isinstance(value, dict):
        return {name: decode(item) for name, item in value.items()}
    return value
