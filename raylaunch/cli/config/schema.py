"""The schema of a job: the type of each setting, and the OmegaConf config that checks the values put into it.

Values may refer to other settings; what such references may cost is limited here too.

A setting is named by its path, such as `("entrypoint", "script")`, since names of nodes and of variables may contain
dots; `()` is the job itself.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigValueError, ValidationError

from raylaunch.core.job.job import Job, NodeRule

Path = tuple[str, ...]
Types = dict[Path, Any]
"""Type hints by the path of the setting or section."""

MAX_REFERENCE_DEPTH = 16
"""How many references may lead from one value to the text that it ends with."""
MAX_REFERENCES = 500
"""How many references may be replaced in all. OmegaConf needs half a millisecond for each."""
MAX_REFERENCE_CHARACTERS = 1_000_000
"""The length of all texts together in which references were replaced."""

_PLACEHOLDERS = ("local_rank", "rank", "role_name", "node_address", "interface")
"""Names in `${...}` that are filled in for each worker or node, and are no references."""
_ESCAPED_REFERENCE = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")
_NOT_IN_KEYS = re.compile(r"[].=[]")
_NESTED_REFERENCE = re.compile(r"\$\{[^{}:]*\$\{")
_REFERENCE_NAME = re.compile(r"""\$\{\s*(?:oc\.(?:select|deprecated|dict\.\w+)\s*:)?\s*['"]?([^{}:,'"]*)""")
"""The name of a setting in a reference. The resolvers of OmegaConf that read settings take one as an argument."""


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


def put(config: Any, path: Path, value: Any) -> None:
    """Set the value at a path; OmegaConf checks its type.

    `OmegaConf.update` converts it too, but a key for it can have names with dots in it from OmegaConf 2.4 on only. Such
    names are those of nodes and of variables, whose values are text.
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


# References.


@dataclass(frozen=True, slots=True)
class _ReferenceCost:
    replaced: int
    """The number of references that are replaced, also in the values that references lead to."""
    characters: int
    """The length of the text that results."""
    depth: int = 0
    """The length of the longest path of references."""


class ReferenceLimits:
    """Adds up what the references in some values cost: `${key}` stands for a setting, which may contain references.

    OmegaConf replaces them without a limit: thirty values, each with two references to the next one, stand for a
    billion values. So their cost is added up before OmegaConf reads them.
    """

    def __init__(self, nodes: Mapping[Path, yaml.Node]) -> None:
        """`nodes`: all values that were given, by their paths, without the sections that they are in."""
        texts = {path: "\n".join(_texts(node)) for path, node in nodes.items()}
        self._lengths = {path: len(text) for path, text in texts.items()}
        self._texts = {path: text for path, text in texts.items() if "${" in text}
        self._inside: dict[Path, list[Path]] = {}
        for path in nodes:
            for size in range(len(path) + 1):
                self._inside.setdefault(path[:size], []).append(path)
        self._costs: dict[Path, _ReferenceCost] = {}
        self._total = _ReferenceCost(0, 0)

    def problem(self, path: Path) -> str:
        """Return why a value cannot be read because of its references; "" if it can."""
        text = self._texts.get(path)
        if text is None:
            return ""
        if _NESTED_REFERENCE.search(text):
            return "the name in a reference cannot contain a reference"
        cost = self._cost(path, ())
        if cost.depth > MAX_REFERENCE_DEPTH:
            return f"more than {MAX_REFERENCE_DEPTH} references lead from this value to its text"
        total = _ReferenceCost(self._total.replaced + cost.replaced, self._total.characters + cost.characters)
        if total.replaced > MAX_REFERENCES:
            return f"more than {MAX_REFERENCES:,} references would have to be replaced"
        if total.characters > MAX_REFERENCE_CHARACTERS:
            return (
                f"with its references replaced, the file would have more than {MAX_REFERENCE_CHARACTERS:,} characters"
            )
        self._total = total
        return ""

    def _cost(self, path: Path, above: tuple[Path, ...]) -> _ReferenceCost:
        """Return the cost of one value. `above`: the values whose references led here.

        A loop costs nothing, since OmegaConf refuses it.
        """
        found = self._costs.get(path)
        if found is not None or path not in self._texts or path in above or len(above) > MAX_REFERENCE_DEPTH:
            return found or _ReferenceCost(
                0, self._lengths[path], depth=len(above) if len(above) > MAX_REFERENCE_DEPTH else 0
            )
        names = [name.strip() for name in _REFERENCE_NAME.findall(self._texts[path])]
        names = [name for name in names if name not in _PLACEHOLDERS]
        inner = [self._cost(target, (*above, path)) for name in names for target in self._targets(path, name)]
        found = _ReferenceCost(
            replaced=len(names) + sum(cost.replaced for cost in inner),
            characters=self._lengths[path] + sum(cost.characters for cost in inner),
            depth=1 + max((cost.depth for cost in inner), default=0),
        )
        self._costs[path] = found
        return found

    def _targets(self, path: Path, name: str) -> list[Path]:
        """Return the values that a reference at `path` reads: the one of this name, or all in the section."""
        plain = name.lstrip(".")
        above = path[: len(plain) - len(name)] if plain != name else ()  # `.name` is beside the value, `..name` above
        target = re.sub(r"\[(.*?)\]", r".\1", plain).strip(".")
        return self._inside.get((*above, *(path_of(target) if target else ())), [])


def _texts(node: yaml.Node) -> Iterator[str]:
    """Yield all texts in a value in which OmegaConf looks for references."""
    if isinstance(node, yaml.ScalarNode):
        yield _ESCAPED_REFERENCE.sub("", node.value)
    elif isinstance(node, yaml.CollectionNode):
        for item in node.value:
            yield from _texts(item[1] if isinstance(item, tuple) else item)
