"""Whether a value has the type that it should have, with everything in it. Unpickling checks nothing of that."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_Check = Callable[[Any], bool]
_COLLECTIONS = (list, tuple, set, frozenset)


@cache
def checker(hint: Any) -> Callable[[Any], bool]:
    """Return a function that says whether a value has this type.

    It knows what the fields of messages have: classes, dataclasses, unions, Literal, NewType, Any, and lists, tuples,
    sets and mappings of these. As for mypy, an int is a float too. Any str will do for a StrEnum.
    """
    hint = getattr(hint, "__supertype__", hint)  # NewType
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda _: True
    if origin in (Union, types.UnionType):
        return _any_of([checker(arg) for arg in args])
    if origin is Literal:
        return lambda value: value in args
    if origin is None:
        return _dataclass(hint) if is_dataclass(hint) else _instance(hint)
    if origin in _COLLECTIONS:
        return _collection(origin, args)
    if issubclass(origin, Mapping):
        return _mapping(checker(args[0]), checker(args[1]))
    return _instance(origin)


def _any_of(checks: list[_Check]) -> _Check:
    return lambda value: any(check(value) for check in checks)


def _instance(kind: Any) -> _Check:
    kinds = (float, int) if kind is float else str if issubclass(kind, str) else kind
    return lambda value: isinstance(value, kinds)


def _collection(kind: Any, args: tuple[Any, ...]) -> _Check:
    if kind is tuple and args[-1] is not Ellipsis:
        each = [checker(arg) for arg in args]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(each)
            and all(check(item) for check, item in zip(each, value, strict=True))
        )
    check_item = checker(args[0])
    return lambda value: isinstance(value, kind) and all(map(check_item, value))


def _mapping(check_name: _Check, check_value: _Check) -> _Check:
    return lambda value: (
        isinstance(value, Mapping) and all(check_name(name) and check_value(item) for name, item in value.items())
    )


def _dataclass(kind: Any) -> _Check:
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    checks = [checker(hints[name]) for name in names]
    deep = [(at, check) for at, check in enumerate(checks) if not _is_plain(hints[names[at]])]
    #: Types of all fields that were found to be right. A driver of 1,000 nodes has no time for more.
    known: set[tuple[type, ...]] = set()

    def check(value: Any) -> bool:
        if not isinstance(value, kind):
            return False
        try:
            found = [getattr(value, name) for name in names]
        except AttributeError:
            return False
        kinds = tuple(map(type, found))
        if kinds in known:
            return all(check(found[at]) for at, check in deep)
        is_right = all(check(item) for check, item in zip(checks, found, strict=True))
        if is_right:
            known.add(kinds)
        return is_right

    return check


def _is_plain(hint: Any) -> bool:
    """Return whether the type of a value says all."""
    hint = getattr(hint, "__supertype__", hint)
    if get_origin(hint) in (Union, types.UnionType):
        return all(map(_is_plain, get_args(hint)))
    return get_origin(hint) is None and not is_dataclass(hint)
