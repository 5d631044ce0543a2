"""The flags that keys of job files have if torchrun has none for them: `--placement pack` sets `placement`.

They are made of the fields of `Job` and of the docstrings below these, so a new key is a flag at once.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from raylaunch.cli.args.flag import Flag, Value
from raylaunch.core.job.job import LOG_LAYOUTS, PLACEMENTS, Job, RayOptions

_NO_FLAGS = ("entrypoint", "nodes", "ray")
"""Sections. The script on the command line is the entry point; `ray` has flags for its own keys."""
_METAVARS = {
    "gpus_per_worker": "N|auto",
    "cpus_per_worker": "N",
    "placement": "|".join(PLACEMENTS),
    "preload": "MODULES",
    "env": "NAME=VALUE",
    "log_layout": "|".join(LOG_LAYOUTS),
    "hang_timeout": "SECONDS|auto|off",
    "state_memory": "GIB",
    "durable": "DIR",
    "ray.address": "HOST:PORT",
    "ray.working_dir": "DIR",
}
_METAVARS_BY_TYPE = {"bool": "true|false", "int": "N", "float": "SECONDS", "str": "NAME", "list": "A,B"}
_SENTENCE = re.compile(r"\.(?:\s|$)")


def key_flags(taken: Collection[str]) -> tuple[Flag, ...]:
    """Return a flag for each key whose name is not `taken` by another flag."""
    return (*_flags(Job, "", taken), *_flags(RayOptions, "ray.", taken))


def _flags(kind: type[Any], section: str, taken: Collection[str]) -> Iterator[Flag]:
    meanings = attribute_docstrings(kind)
    for field in fields(kind):
        key = section + field.name
        if key not in _NO_FLAGS and key.replace("_", "-") not in taken:
            meaning = _SENTENCE.split(meanings.get(field.name, ""))[0]
            yield Flag(
                name=key.replace("_", "-"),
                metavar=_METAVARS.get(key) or _METAVARS_BY_TYPE[re.split(r"\W", str(field.type))[0]],
                default=default_text(field),
                help=meaning if meaning[1:2].isupper() else meaning[:1].lower() + meaning[1:],
                setting=key,
                convert=_items if str(field.type).startswith("list") else _as_written,
                pet=False,
            )


def _as_written(text: str) -> Value:
    return text


def _items(text: str) -> Value:
    return text if text == "auto" else [part.strip() for part in text.split(",") if part]


def default_text(field: Field[Any]) -> str:
    """Return the default of a key as job files have it; "" if it is a section, empty or null."""
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    if value in (None, "", {}) or is_dataclass(value):
        return ""
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def attribute_docstrings(kind: type) -> dict[str, str]:
    """Return the text below each attribute of a class of a module, on one line, by the attribute's name.

    Empty where Python has the compiled modules only.
    """
    found = {}
    body = next((one.body for one in _classes(kind.__module__) if one.name == kind.__name__), [])
    for before, after in pairwise(body):
        targets = before.targets if isinstance(before, ast.Assign) else [getattr(before, "target", None)]
        if isinstance(targets[0], ast.Name) and isinstance(after, ast.Expr):
            found[targets[0].id] = " ".join(inspect.cleandoc(ast.literal_eval(after.value)).split())
    return found


@cache
def _classes(module: str) -> list[ast.ClassDef]:
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:
        return []
    return [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
