"""What was seen and done, as lines of JSON that give the same decisions when they are played again.

`events.jsonl`: the first line is `{"job": ..., "began": ..., "clock": ...}`; the second
`{"event": null, "actions": [...]}`, what the machine asked for before any event; every further one
`{"event": {...}, "actions": [...]}`, in the order in which the machine saw them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args

from raylaunch.core.actions import Action
from raylaunch.core.events import Event, Turnover
from raylaunch.core.failure import Failure, WorkerError
from raylaunch.core.job import Entrypoint, Job, NodeRule, RayOptions
from raylaunch.core.machine import Machine
from raylaunch.core.stacks import StackGroup

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *get_args(Action),
        *get_args(Event),
        *(Turnover, Failure, WorkerError, StackGroup, Job, Entrypoint, NodeRule, RayOptions),
    )
}

_KIND = "is"
"""The key that names the class. No field has this name: `type` is one of `WorkerError`."""

_AS_WRITTEN = frozenset(
    (
        *("args", "kwargs", "env", "preload", "signals_to_handle", "signals_to_forward"),
        *("duplicate_stdout_filters", "duplicate_stderr_filters"),
    )
)
"""Lists and sections of a job: what a person wrote, even where it looks like an object of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One step of the machine. `event` is None for the orders it gave before any event."""

    event: Event | None
    actions: tuple[Action, ...]


def header(job: Job, began: str, clock: float = 0.0) -> str:
    """The first line. `began` is the wall-clock time that `at` counts from, ISO 8601; `clock` the driver's own then."""
    return json.dumps({"job": encode(job), "began": began, "clock": clock})


def line(entry: Entry) -> str:
    """One entry as a line of JSON, without its newline."""
    return json.dumps({"event": encode(entry.event), "actions": encode(entry.actions)})


def read(lines: Iterable[str]) -> tuple[Job, list[Entry]]:
    """The job and the entries. A last line that was cut off (a full disk, a kill) is left out."""
    rows = list(_rows(lines))
    if not rows or "job" not in rows[0]:
        msg = "not an event log: the first line names no job"
        raise ValueError(msg)
    entries = [Entry(event=decode(row["event"]), actions=decode(row["actions"])) for row in rows[1:]]
    return decode(rows[0]["job"]), entries


def _rows(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for text in lines:
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            return


def replay(job: Job, seen: Iterable[Event]) -> list[Entry]:
    """What a machine does with these events."""
    machine = Machine(job)
    entries = [Entry(event=None, actions=tuple(machine.start()))]
    entries.extend(Entry(event=event, actions=tuple(machine.handle(event))) for event in seen)
    return entries


def encode(value: Any) -> Any:
    """Dataclasses as objects that say what they are; tuples as lists."""
    if is_dataclass(value) and not isinstance(value, type):
        body = {field.name: encode(getattr(value, field.name)) for field in fields(value)}
        return {_KIND: type(value).__name__, **body}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {name: encode(item) for name, item in value.items()}
    return value


def decode(value: Any) -> Any:
    """The other way. Lists become tuples; what a person wrote in a job stays as it is."""
    if isinstance(value, dict) and value.get(_KIND) in _KINDS:
        kind = _KINDS[value[_KIND]]
        body = {name: item for name, item in value.items() if name != _KIND}
        return kind(**{name: item if name in _AS_WRITTEN else decode(item) for name, item in body.items()})
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if isinstance(value, dict):
        return {name: decode(item) for name, item in value.items()}
    return value
