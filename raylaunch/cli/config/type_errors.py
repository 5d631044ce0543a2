"""Messages for what PyYAML and OmegaConf refuse: what was expected, what was found, and a hint."""

from __future__ import annotations

import os
import re
from dataclasses import is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, get_args, get_origin

import yaml
from omegaconf import errors

from raylaunch.cli.args.suggestions import separated, split
from raylaunch.cli.config.schema import NODE_RULE, SETTINGS, Path, near_miss, type_of
from raylaunch.core.job.job import Entrypoint, NodeRule
from raylaunch.core.job.secrets import cut, is_secret, shown_arguments

Advice = tuple[str, str]
"""A message and a hint (or "")."""

_RULE_HINT = "the settings of a node are " + " and ".join(f"`{name}`" for name in NODE_RULE)


def unknown_setting(path: Path) -> Advice:
    """Return the message for a path that is not a setting."""
    key = ".".join(path)
    if path[0] == "nodes" and type_of(path[:-1], SETTINGS) is NodeRule:
        close = get_close_matches(path[-1].replace("-", "_").lower(), NODE_RULE, n=1)
        return f"`{path[-1]}` is not a setting of a node", did_you_mean(close[0]) if close else _RULE_HINT
    if key in map(".".join, SETTINGS):
        section, _, name = key.rpartition(".")
        return f"`{key}` has a dot in its name", f"write `{name}` in the section `{section}`"
    return f"`{key}` is not a setting", did_you_mean(near_miss(key))


def did_you_mean(text: str) -> str:
    """Return the hint that proposes a text; "" for no text."""
    return f"did you mean `{text}`?" if text else ""


def wrong_value(error: errors.OmegaConfBaseException, path: Path, hint: Any, node: yaml.Node) -> Advice:
    """Return the message for a value that OmegaConf refuses. `hint` is the type of the setting at `path`."""
    key = ".".join(path)
    written = f"`{node.value}`" if isinstance(node, yaml.ScalarNode) and not is_secret(key) else "this"
    match error:
        case errors.MissingMandatoryValue():
            return f"`{key}` needs a value", f"set it here, or with `{key}=value` on the command line"
        case errors.GrammarParseError():
            return f"{written} is not a complete `${{...}}`", r"write `\${` for a plain `${`"
        case errors.InterpolationValidationError():
            value = "null" if error.value is None else f"`{error.value}`"
            return f"{_expected(hint)} is expected, but {written} resolves to {value}", ""
        case errors.InterpolationKeyError():
            name = str(error).split("'")[1]
            meant = f"oc.env:{name}" if name in os.environ else near_miss(name)
            return f"{written} refers to `{name}`, which does not exist", did_you_mean(meant and f"${{{meant}}}")
        case errors.InterpolationResolutionError():
            return _translated(_REFERENCES, str(error).partition("\n")[0], written)
        case _:
            return wrong_type(hint, node)


def wrong_type(hint: Any, node: yaml.Node) -> Advice:
    """Return the message for a node that does not have the type of its setting."""
    if isinstance(node, yaml.CollectionNode):
        found = "a list is given" if isinstance(node, yaml.SequenceNode) else "a section is given"
    else:
        tag = node.tag.rpartition(":")[2]
        found = "no value is given" if tag == "null" else f"`{cut(node.value)}` is {_TAGS.get(tag, 'text')}"
    return f"{_expected(hint)} is expected, but {found}", _as_meant(hint, node)


def _as_meant(hint: Any, node: yaml.Node) -> str:
    """Return how a duration with a unit, or an entry point in one text, is written; `""` for anything else."""
    if not isinstance(node, yaml.ScalarNode):
        return ""
    words = split(node.value)
    if hint is Entrypoint and words and node.tag.endswith(":str"):
        key = "function" if ":" in words[0] else "script" if words[0].endswith(".py") else "command"
        if len(words) > 1:
            return separated(words, in_file=True) + " in the section `entrypoint`"
        return f"write `entrypoint: {{{key}: {words[0]}}}`"
    if get_origin(hint) is list and node.tag.endswith(":str"):
        items = words if len(words) > 1 or node.value.startswith("-") else node.value.split(",")
        return f"write `[{', '.join(map(str, shown_arguments([item.strip() for item in items])))}]`"
    is_time = hint is float or float in get_args(hint)
    if is_time and (match := _DURATION.fullmatch(node.value.strip().lower())):
        return f"times are in seconds: write `{float(match[1]) * _UNITS[match[2][0]]:g}`"
    return ""


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "`true` or `false`",
    list: "a list like `[a, b]`",
    dict: "a section",
}
_TAGS = {"bool": "a boolean", "int": "a number", "float": "a decimal number"}


def _expected(hint: Any) -> str:
    if is_dataclass(hint):
        return "a section"
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    options = tuple(get_origin(option) or option for option in options)
    options = tuple(option for option in options if option is not int or float not in options)
    return " or ".join(_KINDS[option] for option in options if option in _KINDS) or "a plain value"


_Table = tuple[tuple[str, str, str], ...]
"""Rows of: a regular expression that the library's message matches, raylaunch's message, and a hint."""

_REFERENCES: _Table = (
    (
        "Environment variable '(.*)' not found",
        "the environment variable `{0}` is not set",
        "set it, or give a default: `${{oc.env:{0},value}}`",
    ),
    (
        r"type (\S+)$",
        "{this} uses the resolver `{0}`, which does not exist",
        "write environment variables as `${{oc.env:NAME}}`",
    ),
    ("MissingMandatoryValue", "{this} refers to a setting that has no value", ""),
    ("Recursive|parent node", "{this} refers to itself", ""),
    ("(?:resolving interpolation: )?(.*)", "{this} has no value: {0}", ""),
)
_QUOTE = "put the value in quotes"
_INDENTATION = "settings of one section have the same indentation"
_SYNTAX: _Table = (
    (r"character '\\t'", "only spaces may be used here, but there is a tab", "indent with spaces"),
    (r"character ['\"](.)['\"] that cannot start", "`{0}` cannot start a value", _QUOTE),
    (r"mapping values", "a `:` is not expected here", "quote text that has `: ` in it; " + _INDENTATION),
    (r"could not find expected ':'", "this line is not `key: value`", ""),
    (r"unexpected end of stream", "this quote is never closed", ""),
    (r"expected ',' or '.', but got '\{'", "a `{{` inside brackets needs quotes", 'for example `"${{nnodes}}"`'),
    (r"expected ',' or '.'", "this bracket is never closed, or a comma is missing in it", ""),
    (r"expected <block end>", "this line does not fit the lines above it", _INDENTATION),
    (r"undefined alias '(.+)'", "the alias `*{0}` is not defined", "put text that starts with `*` in quotes"),
    (r"another document", "a second document starts here", "a job file contains only one"),
    (r"escape character '(.+)'", "`\\{0}` is not an escape sequence of double quotes", "use single quotes"),
    (r"the node content, but found '<", "a value is missing, or a bracket is never closed", ""),
    (r"the node content, but found '(.+)'", "a value is expected, but here is `{0}`", ""),
    (r"sequence entries", "a list must start on its own line", "or write it as `[a, b]`"),
    (r"chomping|line break", "`|` and `>` cannot start a value on one line", _QUOTE),
    (r"constructor for the tag '(.+)'", "the tag `{0}` is not supported", ""),
    (r"(.* is given twice.*|a key must be text|an escape is half a character|a number of more .*)", "{0}", ""),
    (r"(more than .*)", "{0}", "the reference has the limits of a job file"),
    (r"recursive", "a value cannot contain itself", ""),
    (r"(.*)", "this is not YAML: {0}", ""),
)
# PyYAML notices these mistakes only lines later; its context mark says where the text began.
_NOTICED_LATE = re.compile(r"could not find expected ':'|unexpected end of stream|expected ',' or '.', but got '[^{]")


def wrong_syntax(error: yaml.YAMLError, text: str = "") -> tuple[Advice, yaml.Mark | None]:
    """Return the message for what PyYAML refuses in a text, and the position of the mistake if it is known."""
    if isinstance(error, yaml.reader.ReaderError):
        return (f"the character U+{error.character:04X} is not allowed in YAML", ""), _mark(text, error.position)
    assert isinstance(error, yaml.MarkedYAMLError)
    problem = error.problem or ""
    marks = [error.problem_mark, error.context_mark]
    found = [mark for mark in (reversed(marks) if _NOTICED_LATE.search(problem) else marks) if mark]
    return _translated(_SYNTAX, problem), found[0] if found else None


def _mark(text: str, position: int) -> yaml.Mark:
    before = text[:position]
    return yaml.Mark("", position, before.count("\n"), position - before.rfind("\n") - 1, None, None)  # type: ignore[arg-type]


def _translated(table: _Table, problem: str, this: str = "") -> Advice:
    matches = ((re.search(pattern, problem), sentence, hint) for pattern, sentence, hint in table)
    match, sentence, hint = next(row for row in matches if row[0])
    groups = match.groups() if match else ()
    return sentence.format(*groups, this=this), hint.format(*groups)
