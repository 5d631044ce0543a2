"""The journal of a run: each event with the actions that followed. Replaying the events gives the same actions.

`events.jsonl` is JSON lines. The first is `{"job": ..., "began": ..., "clock": ..., "versions": ..., "epoch": ...}`,
the second `{"event": null, "actions": [...]}` with the actions before any event, and each further line
`{"event": {...}, "actions": [...]}`, in the order in which the machine handled the events. Another driver that takes a
detached run over makes the file anew, with a higher epoch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import msgspec

from raylaunch.core.decoding import prepare
from raylaunch.core.job.job import Job
from raylaunch.core.machine.events_and_actions import Action, Event
from raylaunch.core.machine.machine import Machine

_KIND = "is"
"""The key that names the class of an event or action. No field has this name: `type` is one of `WorkerError`."""
_EVENTS = {kind.__name__: kind for kind in get_args(Event)}
_ACTIONS = {kind.__name__: kind for kind in get_args(Action)}

_FORMER_NAMES = {
    "AskCheckpoint": "RequestCheckpoint",
    "Forward": "ForwardSignal",
    "ForwardAsked": "ForwardRequested",
    "Readmit": "Uncordon",
    "Shun": "Cordon",
    "StopAsked": "StopRequested",
    "WakeAt": "SetTimer",
    "turnover": "timings",
}
"""Names that events, actions and fields of them have in journals of raylaunch 0.1. Such journals still replay."""
_FORMER_ACTIONS = {"RestoreCommit"}
"""What no driver does any more is left out of them."""

_MOST_DIGITS = 300
"""Digits of a whole number. From 309 digits on, no float can hold it (`sys.float_info.max_10_exp`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalHeader:
    """The first line: the job, when the run began (ISO 8601), and the driver's `time.monotonic()` at that time."""

    job: Job
    began: str = ""
    """The time that `at` counts from."""
    clock: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions of raylaunch and what it needs, on the driver's machine."""
    epoch: int = 1
    """Which driver of the run has made the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """An event and the actions that followed. `event` is None for the actions before any event."""

    event: Event | None
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """An entry whose event and actions are still objects of JSON."""

    event: dict[str, Any] | None
    actions: list[dict[str, Any]]


prepare(JournalHeader, _Row, *_EVENTS.values(), *_ACTIONS.values())


def header(
    job: Job, began: str, clock: float = 0.0, versions: Mapping[str, str] | None = None, *, epoch: int = 1
) -> str:
    """Return the first line, of the fields of a `JournalHeader`."""
    return json.dumps(
        msgspec.to_builtins(JournalHeader(job=job, began=began, clock=clock, versions=versions or {}, epoch=epoch))
    )


def line(entry: JournalEntry) -> str:
    """Return an entry as a line of JSON, without newline."""
    event = None if entry.event is None else _named(entry.event)
    return json.dumps({"event": event, "actions": [*map(_named, entry.actions)]})


def _named(value: Event | Action) -> dict[str, Any]:
    return {_KIND: type(value).__name__, **msgspec.to_builtins(value)}


def read(lines: Iterable[str]) -> tuple[Job, list[JournalEntry]]:
    """Return the job and the entries. Omit a last line that was cut off by a full disk or a kill.

    Raise ValueError if it is no journal.
    """
    first, *rest = [*lines] or [""]
    job, entries = read_header(first).job, []
    for text in rest:
        try:
            entries.append(read_entry(text))
        except json.JSONDecodeError:
            break
    return job, entries


def read_header(text: str) -> JournalHeader:
    """Return the content of the first line. Raise ValueError if it is none."""
    try:
        return msgspec.convert(_loads(text), JournalHeader)
    except ValueError as error:
        msg = f"not an event log: the first line names no job: {error}"
        raise ValueError(msg) from None


def read_entry(text: str) -> JournalEntry:
    """Return the content of one of the other lines. Raise ValueError if it is none that this version knows."""
    row = msgspec.convert(_loads(text), _Row)
    event = None if row.event is None else _read(row.event, _EVENTS)
    if event is not None and not math.isfinite(event.at):
        msg = f"an event at {event.at}"
        raise ValueError(msg)
    actions = tuple(_read(action, _ACTIONS) for action in row.actions if action.get(_KIND) not in _FORMER_ACTIONS)
    return JournalEntry(event=event, actions=actions)


def _read(body: dict[str, Any], kinds: Mapping[str, type[Any]]) -> Any:
    """Return the event or action of one of these kinds. Fields that this version does not know are left out."""
    known = {_FORMER_NAMES.get(name, name): value for name, value in body.items()}
    name = str(known.get(_KIND))
    kind = kinds.get(_FORMER_NAMES.get(name, name))
    if kind is None:
        msg = f"neither an event nor an action of this version: {name}"
        raise ValueError(msg)
    return msgspec.convert(known, kind)


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
