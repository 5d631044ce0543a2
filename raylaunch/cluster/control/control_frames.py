"""How control messages travel: a line of JSON each, and after it the bytes of the field `data`, if there is one.

Nothing is unpickled, so whoever sends a message cannot run code by it. Fields that this version does not know are left
out, and those that a message lacks have their defaults.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, BinaryIO, Union, get_args, get_origin, get_type_hints

from raylaunch.cluster.control.control_messages import ControlAnswer, ControlRequest
from raylaunch.core.field_types import checker

MOST_BYTES = 64 * 1024 * 1024
"""The longest line. The status of a run of 1,000 nodes with 100 attempts has about a tenth of that."""
MOST_CLIENTS = 64
"""So many are served at a time; further ones get `BUSY` in the place of a `+`, and are closed."""
BUSY = b"-"
_KIND = "is"
_DATA = "data"
_END = b"\n"
"""An empty line: all that was asked is answered."""


def dump(message: ControlRequest | ControlAnswer) -> bytes:
    """Return a message as bytes."""
    row: dict[str, Any] = {_KIND: type(message).__name__, **asdict(message)}
    data: bytes = row.get(_DATA, b"")
    if _DATA in row:
        row[_DATA] = len(data)
    return json.dumps(row).encode() + b"\n" + data


def dump_end() -> bytes:
    """Return what follows the last answer."""
    return _END


def load_request(file: BinaryIO) -> ControlRequest | None:
    """Read a request; None: there is no more. Raises ValueError, and the errors of the file."""
    found: ControlRequest | None = _load(file, ControlRequest)
    return found


def load_answer(file: BinaryIO) -> ControlAnswer | None:
    """Read an answer; None: that was all. Raises ValueError, EOFError, and the errors of the file."""
    found: ControlAnswer | None = _load(file, ControlAnswer)
    return found


def _load(file: BinaryIO, union: Any) -> Any:
    line = file.readline(MOST_BYTES)
    if line == _END or (not line and union is ControlRequest):
        return None
    if not line.endswith(b"\n"):
        if len(line) < MOST_BYTES:
            raise EOFError
        msg = "a message is too long"
        raise ValueError(msg)
    try:
        row = json.loads(line)
        kind: Any = _kinds(union)[row.pop(_KIND)]
        if isinstance(length := row.get(_DATA), int):
            row[_DATA] = file.read(max(0, min(length, MOST_BYTES)))
            if len(row[_DATA]) < length:
                raise EOFError
        found = _made(kind, row)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        msg = f"a message cannot be read: {type(error).__name__}: {error}"
        raise ValueError(msg) from None
    if not checker(kind)(found):
        msg = f"fields of {kind.__name__} have other types"
        raise ValueError(msg)
    return found


@cache
def _kinds(union: Any) -> Mapping[str, type[Any]]:
    return {kind.__name__: kind for kind in get_args(union)}


def _made(hint: Any, value: Any) -> Any:
    """Return what `asdict` and JSON made this value of, which should have this type."""
    return _maker(hint)(value)


@cache
def _maker(hint: Any) -> Callable[[Any], Any]:
    hint = getattr(hint, "__supertype__", hint)  # NewType
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [arg for arg in args if arg is not type(None)]
        return _optional(kinds[0]) if len(kinds) == 1 else _same
    if origin is tuple:
        return _tuple(args)
    if origin is dict:
        return lambda value: {name: _made(args[1], item) for name, item in value.items()}
    if is_dataclass(hint):
        return _dataclass(hint)
    return hint if isinstance(hint, type) and issubclass(hint, Enum) else _same


def _same(value: Any) -> Any:
    return value


def _optional(kind: Any) -> Callable[[Any], Any]:
    return lambda value: None if value is None else _made(kind, value)


def _tuple(args: tuple[Any, ...]) -> Callable[[Any], Any]:
    if args[-1] is Ellipsis:
        return lambda value: tuple(_made(args[0], item) for item in value)
    return lambda value: tuple(_made(arg, item) for arg, item in zip(args, value, strict=True))


def _dataclass(kind: Any) -> Callable[[Any], Any]:
    hints = get_type_hints(kind)
    names = {field.name for field in fields(kind)}
    return lambda row: kind(**{name: _made(hints[name], item) for name, item in row.items() if name in names})
