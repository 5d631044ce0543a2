"""The schema of a job: the type of each setting, and the OmegaConf config that checks the values put into it.

A setting is named by its path, such as `("entrypoint", "script")`, since names of nodes and of variables may contain
dots; `()` is the job itself.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import ConfigValueError, ValidationError

from raylaunch.core.job.job import Job, NodeRule

Path = tuple[str, ...]
_Types = dict[Path, Any]
"""Type hints by the path of the setting or section."""

_NOT_IN_KEYS = re.compile(r"[].=[]")


def _all_settings(hint: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    yield path, hint
    if is_dataclass(hint):
        for name, inner in get_type_hints(hint).items():
            yield from _all_settings(inner, (*path, name))


SETTINGS: _Types = dict(_all_settings(Job))
NODE_RULE: dict[str, Any] = get_type_hints(NodeRule)
"""Type hints of the settings that a rule in `nodes` may contain."""


def type_of(path: Path, types: _Types) -> Any:
    """Return the type hint of a setting, or of an item in a list or dict; None if there is no such setting."""
    if path in types or not path:
        return types.get(path)
    outer = type_of(path[:-1], types)
    if is_dataclass(outer):
        return NODE_RULE.get(path[-1])
    outer = _collection(outer)
    return get_args(outer)[-1] if outer is not None else None


def path_of(key: str) -> Path:
    """Return the path of a key such as `ray.address`. Names of nodes and of variables may contain dots."""
    if match := re.fullmatch(rf"(nodes)\.(.+?)(?:\.({'|'.join(NODE_RULE)})(?:\.(.+))?)?", key, re.DOTALL):
        return tuple(filter(None, match.groups()))
    section, dot, name = key.partition(".")
    return (section, name) if dot and get_origin(SETTINGS.get((section,))) is dict else tuple(key.split("."))


def put(config: Any, path: Path, value: Any) -> None:
    """Set the value at a path; OmegaConf checks its type.

    `OmegaConf.update` converts it too, but takes a key whose names contain dots only since OmegaConf 2.4. The names of
    nodes and variables may contain dots; their values are text.
    """
    *above, name = path
    section = _section(config, above)
    if _NOT_IN_KEYS.search(name):
        section[name] = value
    else:
        OmegaConf.update(section, name, value, merge=False)


def get(config: Any, path: Path) -> Any:
    """Return the value at a path with its references replaced; None if there is none in a list.

    Raises an error of OmegaConf's if the value is missing, or a reference is wrong.
    """
    *above, name = path
    section = _section(config, above)
    return section[name] if _NOT_IN_KEYS.search(name) else OmegaConf.select(section, name, throw_on_missing=True)


def _section(config: Any, path: Iterable[str]) -> Any:
    for name in path:
        key = int(name) if OmegaConf.is_list(config) else name
        if OmegaConf.is_missing(config, key) or not OmegaConf.is_config(config[key]):
            config[key] = {}  # which is refused, unless there may be a section
        config = config[key]
    return config


def container(path: Path) -> type | None:
    """Return `dict` for a section, `list` for a list, None for a single value."""
    hint = type_of(path, SETTINGS)
    return dict if is_dataclass(hint) else get_origin(_collection(hint))


def _collection(hint: Any) -> Any:
    """Return the list or dict type in a union, None if there is none."""
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return next((option for option in options if get_origin(option) in (list, dict)), None)


def near_miss(key: str) -> str:
    """Return the key that was probably meant, "" if no setting has a similar name."""
    *section, name = key.split(".")
    name = name.strip("-").replace("-", "_").lower()
    # Where two sections contain the same name, the section that was given is preferred.
    known = sorted(filter(None, SETTINGS), key=lambda path: list(path[:-1]) != section)
    names = [path[-1] for path in known]
    # Two letters, such as the end of `train.py`, are near to any short name.
    close = get_close_matches(name, names, n=1, cutoff=0.75 if len(name) > 2 else 1.0)  # noqa: PLR2004
    return ".".join(known[names.index(close[0])]) if close else ""


def defaults() -> Any:
    """Return the config of a job in which every setting has its default."""
    return pickle.loads(_pickled_defaults())  # noqa: S301


@cache
def _pickled_defaults() -> bytes:
    """Return the config, pickled: OmegaConf takes 10 ms to make it, and pickle 0.4. A command needs several."""
    try:
        config = OmegaConf.structured(Job)
    except ConfigValueError:
        config = OmegaConf.structured(_PlainJob)
    for section in (config, config.entrypoint, config.ray):
        OmegaConf.set_readonly(section, False)  # OmegaConf makes frozen dataclasses read-only
    return pickle.dumps(config)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlainJob(Job):
    """The job for OmegaConf 2.3, which has no unions with lists. `load` checks what it is given for them itself."""

    preload: Any = "auto"


def to_job(config: Any) -> Job:
    """Return the job that a config describes."""
    found: Any = OmegaConf.to_object(config)
    values = {one.name: getattr(found, one.name) for one in fields(Job)}
    if not isinstance(found.preload, list):
        values["preload"] = str(found.preload)
    return Job(**values)


def check_union(hint: Any, value: Any) -> None:
    """Raise ValidationError unless a value is of a type in a union that also has a list type."""
    if isinstance(hint, UnionType) and _collection(hint) and not isinstance(value, get_args(hint)[1:]):
        msg = f"{type(value).__name__} is not in {hint}"
        raise ValidationError(msg)


def add_rule(config: Any, path: Path) -> None:
    """Add an empty rule for a node: OmegaConf sets values only in a rule that exists."""
    put(config, path, NodeRule())
    OmegaConf.set_readonly(get(config, path), False)
