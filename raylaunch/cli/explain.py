"""What PyYAML and OmegaConf refuse, in our own words: what was expected, what was found, what was probably meant."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import errors

from raylaunch.core.job import Job, NodeRule
from raylaunch.core.secrets import is_secret

Path = tuple[str, ...]
"""The names that lead to a setting: `("entrypoint", "script")`."""
Types = dict[Path, Any]
Advice = tuple[str, str]
"""What is wrong, and what to do about it (or `""`)."""


def _settings(hint: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    yield path, hint
    if is_dataclass(hint):
        for name, inner in get_type_hints(hint).items():
            yield from _settings(inner, (*path, name))


SETTINGS: Types = dict(_settings(Job))
"""The type of every setting and section; the job itself is `()`."""
_RULE = get_type_hints(NodeRule)
"""The types of what a rule of `nodes` may say."""


def type_of(path: Path, types: Types) -> Any:
    """The type of a setting, or of what is in a list or dict; None if there is no such setting."""
    if path in types or not path:
        return types.get(path)
    outer = type_of(path[:-1], types)
    if is_dataclass(outer):
        return _RULE.get(path[-1])
    outer = _collection(outer)
    return get_args(outer)[-1] if outer is not None else None


def path_of(key: str) -> Path:
    """`ray.address` as a path. Names of nodes and of variables may have dots in them."""
    if match := re.fullmatch(rf"(nodes)\.(.+?)(?:\.({'|'.join(_RULE)})(?:\.(.+))?)?", key):
        return tuple(filter(None, match.groups()))
    section, dot, name = key.partition(".")
    return (section, name) if dot and get_origin(SETTINGS.get((section,))) is dict else tuple(key.split("."))


def container(path: Path) -> type | None:
    """`dict` for a section, `list` for a list, None for a single value."""
    hint = type_of(path, SETTINGS)
    return dict if is_dataclass(hint) else get_origin(_collection(hint))


def _collection(hint: Any) -> Any:
    """The list or dict that a value may be, None if it may not."""
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return next((option for option in options if get_origin(option) in (list, dict)), None)


_RULE_HINT = "a node has " + " and ".join(f"`{name}`" for name in _RULE)


def near_miss(key: str) -> str:
    """The setting that was probably meant, `""` if none comes to mind."""
    *section, name = key.split(".")
    name = name.strip("-").replace("-", "_").lower()
    # Where two sections have the same name, the one at hand is meant.
    known = sorted(filter(None, SETTINGS), key=lambda path: list(path[:-1]) != section)
    words = [path[-1] for path in known]
    close = get_close_matches(name, words, n=1, cutoff=0.75)
    return ".".join(known[words.index(close[0])]) if close else ""


def unknown(path: Path) -> Advice:
    """There is no such setting."""
    key = ".".join(path)
    if path[0] == "nodes" and type_of(path[:-1], SETTINGS) is NodeRule:
        close = get_close_matches(path[-1].replace("-", "_").lower(), _RULE, n=1)
        return f"`{path[-1]}` is not a setting of a node", did_you_mean(close[0]) if close else _RULE_HINT
    if key in map(".".join, SETTINGS):
        section, _, name = key.rpartition(".")
        return f"`{key}` has a dot in its name", f"write `{name}` in the section `{section}`"
    return f"`{key}` is not a setting", did_you_mean(near_miss(key))


def did_you_mean(text: str) -> str:
    """A hint, if there is something to hint at."""
    return f"did you mean `{text}`?" if text else ""


def refused(error: errors.OmegaConfBaseException, path: Path, hint: Any, node: yaml.Node) -> Advice:
    """Why OmegaConf does not take the value of a node for a setting of this type."""
    key = ".".join(path)
    written = f"`{node.value}`" if isinstance(node, yaml.ScalarNode) and not is_secret(key) else "this"
    match error:
        case errors.MissingMandatoryValue():
            return f"`{key}` must be given", f"here, or as `{key}=value` on the command line"
        case errors.GrammarParseError():
            return f"{written} is not a complete `${{...}}`", r"write `\${` for a plain `${`"
        case errors.InterpolationValidationError():
            value = "nothing" if error.value is None else f"`{error.value}`"
            return f"{_expected(hint)} is expected, but {written} stands for {value}", ""
        case errors.InterpolationKeyError():
            name = str(error).split("'")[1]
            meant = f"oc.env:{name}" if name in os.environ else near_miss(name)
            return f"{written} refers to `{name}`, which does not exist", did_you_mean(meant and f"${{{meant}}}")
        case errors.InterpolationResolutionError():
            return _translated(_REFERENCES, str(error).partition("\n")[0], written)
        case _:
            return misfit(hint, node)


def misfit(hint: Any, node: yaml.Node) -> Advice:
    """A value is not of the type that its setting has."""
    if isinstance(node, yaml.CollectionNode):
        found = "a list is given" if isinstance(node, yaml.SequenceNode) else "a section is given"
    else:
        tag = node.tag.rpartition(":")[2]
        found = "nothing is given" if tag == "null" else f"`{node.value}` is {_TAGS.get(tag, 'text')}"
    return f"{_expected(hint)} is expected, but {found}", ""


_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
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
"""What a library's sentence has in it (a regular expression), our sentence, what to do."""

_REFERENCES: _Table = (
    (
        "Environment variable '(.*)' not found",
        "the environment variable `{0}` is not set",
        "set it, or give a default: `${{oc.env:{0},value}}`",
    ),
    (r"type (\S+)$", "{this} asks for `{0}`, which does not exist", "environment variables are `${{oc.env:NAME}}`"),
    ("MissingMandatoryValue", "{this} refers to a value that must still be given", ""),
    ("Recursive|parent node", "{this} refers to itself", ""),
    ("(?:resolving interpolation: )?(.*)", "{this} has no value: {0}", ""),
)
_QUOTE = "put the value in quotes"
_INDENTATION = "settings of one section have the same indentation"
_SYNTAX: _Table = (
    (r"character '\\t'", "a tab stands where only spaces may", "indent with spaces"),
    (r"character ['\"](.)['\"] that cannot start", "`{0}` cannot start a value", _QUOTE),
    (r"mapping values", "a `:` is not expected here", "quote text that has `: ` in it; " + _INDENTATION),
    (r"could not find expected ':'", "this line is not `key: value`", ""),
    (r"unexpected end of stream", "this quote is never closed", ""),
    (r"expected ',' or '.', but got '\{'", "a `{{` inside brackets needs quotes", 'for example `"${{nnodes}}"`'),
    (r"expected ',' or '.'", "this bracket is never closed, or a comma is missing in it", ""),
    (r"expected <block end>", "this line does not fit the lines above it", _INDENTATION),
    (r"undefined alias '(.+)'", "`*{0}` stands for nothing", "put text that starts with `*` in quotes"),
    (r"another document", "a second document starts here", "a job file holds one"),
    (r"escape character '(.+)'", "`\\{0}` means nothing in double quotes", "use single quotes"),
    (r"the node content, but found '<", "a value is missing, or a bracket is never closed", ""),
    (r"the node content, but found '(.+)'", "a value is expected, but here is `{0}`", ""),
    (r"sequence entries", "a list starts on its own line", "or write it as `[a, b]`"),
    (r"chomping|line break", "`|` and `>` cannot start a value on one line", _QUOTE),
    (r"constructor for the tag '(.+)'", "the tag `{0}` has no meaning here", ""),
    (r"(.* is given twice.*|a key must be text)", "{0}", ""),
    (r"recursive", "a value cannot contain itself", ""),
    (r"(.*)", "this is not YAML: {0}", ""),
)
# Of these PyYAML notices the mistake only lines later; where the text began, it knows as well.
_NOTICED_LATE = re.compile(r"could not find expected ':'|unexpected end of stream|expected ',' or '.', but got '[^{]")


def unreadable(error: yaml.YAMLError) -> tuple[Advice, yaml.Mark | None]:
    """Why PyYAML cannot read a text, and where it goes wrong."""
    if isinstance(error, yaml.reader.ReaderError):
        return (f"the character U+{error.character:04X} is not allowed in YAML", ""), None
    assert isinstance(error, yaml.MarkedYAMLError)
    problem = error.problem or ""
    marks = [error.problem_mark, error.context_mark]
    found = [mark for mark in (reversed(marks) if _NOTICED_LATE.search(problem) else marks) if mark]
    return _translated(_SYNTAX, problem), found[0] if found else None


def _translated(table: _Table, problem: str, this: str = "") -> Advice:
    matches = ((re.search(pattern, problem), sentence, hint) for pattern, sentence, hint in table)
    match, sentence, hint = next(row for row in matches if row[0])
    groups = match.groups() if match else ()
    return sentence.format(*groups, this=this), hint.format(*groups)
