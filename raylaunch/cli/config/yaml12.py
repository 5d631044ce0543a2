"""The YAML of job files: scalars as in YAML 1.2, no duplicate keys, and a dump that loads as the same job."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import yaml

from raylaunch.core.job.job import Job


class Yaml12Loader(yaml.SafeLoader):
    """Reads scalars as YAML 1.2 does, and refuses duplicate keys, of which PyYAML silently takes the last."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            problem = ""
            if not isinstance(key, yaml.ScalarNode):
                problem = "a key must be text"
            elif key.value in lines:
                problem = f"`{key.value}` is given twice, first in line {lines[key.value]}"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        self.flatten_mapping(node)
        return node


class Yaml12Dumper(yaml.SafeDumper):
    """Quotes text that `Yaml12Loader` or a YAML 1.1 reader would not read as text."""


# In PyYAML's YAML 1.1, `1:4` is sixty-four, `no` is false, `010` is eight and `3e-4` is text.
_DECIMAL = r"(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
for _kind, _pattern, _first in (
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    ("int", r"^(?:[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    ("float", rf"^(?:[-+]?(?:{_DECIMAL}|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))$", list("-+.0123456789")),
    ("merge", r"^<<$", ["<"]),
):
    for _class in (Yaml12Loader, Yaml12Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), _first)


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
