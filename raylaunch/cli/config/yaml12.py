"""The YAML of job files: scalars as in YAML 1.2, no duplicate keys, limits, and a dump that loads as the same job."""

from __future__ import annotations

import contextlib
import re
from dataclasses import asdict
from typing import Any

import yaml

from raylaunch.core.job.job import Job

MAX_DEPTH = 64
"""How many sections and lists may be inside each other."""
MAX_VALUES = 5_000
"""Keys and values in one file. What an alias stands for is counted once more for each alias."""
_MAX_CHARACTERS = 40
"""Characters of a number. Python refuses to print integers of more than 4,300 digits."""

_Event = yaml.events.Event


class Yaml12Loader(yaml.SafeLoader):
    """Reads scalars as YAML 1.2 does, and refuses what could take minutes, and what PyYAML reads in a surprising way.

    PyYAML has no limits: it raises RecursionError for text that is nested too deep, and a few aliases of aliases stand
    for millions of values. Of duplicate keys it silently takes the last.
    """

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012
    yaml_constructors = {  # noqa: RUF012
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    def __init__(self, text: str) -> None:
        """Take the text of a file. Raises yaml.reader.ReaderError for a character that YAML does not allow."""
        super().__init__(text)
        self._depth = 0
        self._values = 0
        #: The number of keys and values that a complete node stands for, by its id().
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node, and count it."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            known = super().compose_node(parent, index)
            if id(known) not in self._sizes:
                raise _refusal("a recursive alias", event)
            self._count(self._sizes[id(known)], event)
            return known
        before = self._values
        self._count(1, event)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _refusal(f"more than {MAX_DEPTH} sections and lists are inside each other", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._sizes[id(node)] = self._values - before
        return node

    def _count(self, values: int, event: _Event) -> None:
        self._values += values
        if self._values > MAX_VALUES:
            raise _refusal(
                f"more than {MAX_VALUES:,} keys and values, if each alias is replaced by what it stands for", event
            )

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        """Return the next scalar. Pairs of escapes for one character, as JSON has them, become that character."""
        node = super().compose_scalar_node(anchor)
        with contextlib.suppress(UnicodeError):
            node.value = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        try:
            node.value.encode("utf-8", "surrogateescape")  # this is how Python keeps bytes that are not UTF-8
        except UnicodeError:
            raise _refusal("an escape is half a character", node) from None
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Return the next section. Raises ConstructorError for a key that is no text, or is given twice."""
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _refusal("a key must be text", key)
            if key.value in lines:
                raise _refusal(f"`{key.value}` is given twice, first in line {lines[key.value]}", key)
            lines[key.value] = key.start_mark.line + 1
        self.flatten_mapping(node)
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Return the text of a scalar. Raises ValueError if it does not fit its tag."""
        if isinstance(node, yaml.ScalarNode) and (kind := node.tag.rpartition(":")[2]) in _PATTERNS:
            if len(node.value) > _MAX_CHARACTERS:
                raise _refusal(f"a number of more than {_MAX_CHARACTERS} characters", node)
            if not re.match(_PATTERNS[kind], node.value) and not (kind == "float" and node.value.isdecimal()):
                raise ValueError(node.value)
        return super().construct_scalar(node)


def _refusal(problem: str, at: yaml.Node | _Event) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, problem, at.start_mark)  # type: ignore[arg-type]


class Yaml12Dumper(yaml.SafeDumper):
    """Quotes text that `Yaml12Loader` or a YAML 1.1 reader would not read as text."""


# In PyYAML's YAML 1.1, `1:4` is sixty-four, `no` is false, `010` is eight and `3e-4` is text.
_DECIMAL = r"(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
_PATTERNS = {
    "null": r"^(?:~|null|Null|NULL|)$",
    "bool": r"^(?:true|True|TRUE|false|False|FALSE)$",
    "int": r"^(?:[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+)$",
    "float": rf"^(?:[-+]?(?:{_DECIMAL}|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))$",
    "merge": r"^<<$",
}
"""What a scalar must look like, by the kind that its tag names. A file may give the tag itself, as in `!!int 3`."""
_FIRST = {
    "null": ["~", "n", "N", ""],
    "bool": list("tTfF"),
    "int": list("-+0123456789"),
    "float": list("-+.0123456789"),
    "merge": ["<"],
}
"""The first characters of such scalars."""
for _class in (Yaml12Loader, Yaml12Dumper):
    for _kind, _pattern in _PATTERNS.items():
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), _FIRST[_kind])


def dump(job: Job) -> str:
    """Return all settings of the job as YAML, which loads as the same job."""
    return str(yaml.dump(escaped(asdict(job)), Dumper=Yaml12Dumper, sort_keys=False, allow_unicode=True, width=10_000))


def escaped(value: Any) -> Any:
    """Escape `${` in all text of a value, so that OmegaConf does not read it as a reference."""
    if isinstance(value, dict):
        return {name: escaped(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
