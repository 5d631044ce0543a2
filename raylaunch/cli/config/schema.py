"""The schema of a job: the type of each setting, and the OmegaConf config that checks the values put into it.

A setting is named by its path, such as `("entrypoint", "script")`, since names of nodes and of variables may contain
dots; `()` is the job itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from raylaunch.core.job.job import Job, NodeRule

Path = tuple[str, ...]
Types = dict[Path, Any]
"""Type hints by the path of the setting or section."""


def _all_settings(hint: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    yield path, hint
    if is_dataclass(hint):
        for name, inner in get_type_hints(hint).items():
            yield from _all_settings(inner, (*path, name))


SETTINGS: Types = dict(_all_settings(Job))
NODE_RULE: dict[str, Any] = get_type_hints(NodeRule)
"""Type hints of the settings that a rule in `nodes` may contain."""


def type_of(path: Path, types: Types) -> Any:
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


def key_of(path: Path) -> str:
    """Return the key of a path in OmegaConf's syntax, with the dots in names escaped."""
    return ".".join(re.sub(r"([].=[])", r"\\\1", name) for name in path)


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
    close = get_close_matches(name, names, n=1, cutoff=0.75)
    return ".".join(known[names.index(close[0])]) if close else ""


def defaults() -> Any:
    """Return the config of a job in which every setting has its default."""
    config = OmegaConf.structured(Job)
    for section in (config, config.entrypoint, config.ray):
        OmegaConf.set_readonly(section, False)  # OmegaConf makes frozen dataclasses read-only
    return config


def add_rule(config: Any, key: str) -> None:
    """Add an empty rule for a node: OmegaConf sets values only in a rule that exists."""
    OmegaConf.update(config, key, NodeRule(), merge=False)
    OmegaConf.set_readonly(OmegaConf.select(config, key), False)
