"""YAML with a memory: every value knows where it was written, and as which text."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import yaml

from raylaunch.cli.marks import Finding, Place

Locate = Callable[[int, int, int | None], Place]
"""The place from a column to another (or to the end) of a line; all count from 0."""


class UnreadableError(Exception):
    """A text as a whole cannot be used; carries the finding."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value as somebody wrote it: a scalar, or a list or dict of such values."""

    key: Place
    place: Place
    name: object = None
    """Its key as YAML reads it, for mappings whose keys need not be text, or its number in a list."""
    text: str = ""
    value: object = None
    items: list[Given] | None = None
    children: dict[str, Given] | None = None

    @property
    def is_scalar(self) -> bool:
        """Neither a list nor a section."""
        return self.items is None and self.children is None

    @property
    def is_empty(self) -> bool:
        """YAML's null."""
        return self.is_scalar and self.value is None

    @property
    def bare(self) -> object:
        """The scalar, or an empty list or dict for the kind of thing it is."""
        return self.value if self.is_scalar else {} if self.items is None else []


# Scalars are read as in YAML 1.2. In PyYAML's 1.1 `1:4` is sixty-four, `no` is false and `010` is eight.
_DECIMAL = r"(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+"
_SCALARS = {
    "null": (r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    "bool": (r"^(?:true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    "int": (r"^(?:[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+)$", list("-+0123456789")),
    "float": (rf"^(?:[-+]?(?:{_DECIMAL}|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN))$", list("-+.0123456789")),
    "merge": (r"^(?:<<)$", ["<"]),
}
_PLAIN = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str"))


class Loader(yaml.SafeLoader):
    """Reads scalars as YAML 1.2 does."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class Dumper(yaml.SafeDumper):
    """Quotes whatever `Loader` or a reader of YAML 1.1 would not take for text."""

    def ignore_aliases(self, _data: object) -> bool:
        """Two equal lists are written twice; anchors are for machines."""
        return True


def _represented(dumper: Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML escapes these only in double quotes, and reads them back as plain line breaks.
    style = '"' if re.search("[\x85\u2028\u2029\ufeff]", text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


Dumper.add_representer(str, _represented)
for _kind, (_pattern, _first) in _SCALARS.items():
    for _class in (Loader, Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern), _first)


def parse(text: str, locate: Locate, whole: Place, findings: list[Finding]) -> Given | None:
    """The document, None if there is nothing in it; raises UnreadableError."""
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        return None if node is None else _Reading(loader, locate, findings).given(node, whole)
    except yaml.MarkedYAMLError as error:
        raise UnreadableError(_syntax_finding(error, locate)) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n"), len(before) - before.rfind("\n") - 1
        message = f"the character U+{error.character:04X} is not allowed in YAML"
        raise UnreadableError(Finding(message=message, place=locate(line, column, column + 1))) from None


@dataclass(frozen=True, slots=True)
class _Reading:
    """One walk over a document's nodes."""

    loader: Loader
    locate: Locate
    findings: list[Finding]
    above: list[yaml.Node] = field(default_factory=list)

    def given(self, node: yaml.Node, key: Place, name: object = None) -> Given:
        if any(node is outer for outer in self.above):
            raise UnreadableError(Finding(message="a value cannot contain itself", place=key))
        place = self._place_of_value(node, key)
        if isinstance(node, yaml.ScalarNode):
            return Given(key=key, place=place, name=name, text=node.value, value=self._scalar(node, place))
        self.above.append(node)
        if isinstance(node, yaml.MappingNode):
            given = Given(key=key, place=place, name=name, children=self._children(node))
        else:
            items = [self.given(item, self._place(item), index) for index, item in enumerate(node.value)]
            given = Given(key=key, place=place, name=name, items=items)
        self.above.pop()
        return given

    def _place(self, node: yaml.Node) -> Place:
        start, end = node.start_mark, node.end_mark
        return self.locate(start.line, start.column, end.column if end.line == start.line else None)

    def _place_of_value(self, node: yaml.Node, key: Place) -> Place:
        """The key's where the value is a block, or nothing at all."""
        block = isinstance(node, yaml.CollectionNode) and not node.flow_style
        empty = node.start_mark.index == node.end_mark.index
        return key if block or empty else self._place(node)

    def _scalar(self, node: yaml.ScalarNode, place: Place) -> object:
        try:
            if node.tag in _PLAIN:
                return self.loader.construct_object(node)
            message = f"the tag `{node.tag}` has no meaning here"
        except ValueError:
            message = f"`{node.value}` does not fit its tag"
        self.findings.append(Finding(message=message, place=place))
        return node.value

    def _children(self, node: yaml.MappingNode) -> dict[str, Given]:
        self._refuse_twins([key for key, _ in node.value])
        self.loader.flatten_mapping(node)
        children: dict[str, Given] = {}
        for key, value in node.value:
            place = self._place(key)
            if isinstance(key, yaml.ScalarNode):
                name = self._scalar(key, place)
                children[key.value] = self.given(value, place, key.value if name is None else name)
            else:
                self.findings.append(Finding(message="a key must be text", place=place))
        return children

    def _refuse_twins(self, keys: list[yaml.Node]) -> None:
        """YAML takes the last of two equal keys without a word."""
        first: dict[str, yaml.Node] = {}
        for key in keys:
            if isinstance(key, yaml.ScalarNode) and first.setdefault(key.value, key) is not key:
                message = f"`{key.value}` is given twice"
                twin = self._place(first[key.value])
                self.findings.append(Finding(message=message, place=self._place(key), also=twin))


# PyYAML's problem, then our sentence and hint.
_SYNTAX = {
    r"character '\\t'": ("a tab stands where only spaces may", "indent with spaces"),
    r"character ['\"](.)['\"] that cannot start": ("`{0}` cannot start a value", "put the value in quotes"),
    r"mapping values are not allowed": (
        "a `:` is not expected here",
        "quote text that has `: ` in it; settings of one section have the same indentation",
    ),
    r"could not find expected ':'": ("this line is not `key: value`", ""),
    r"unexpected end of stream": ("this quote is never closed", ""),
    r"expected ',' or '.', but got '\{'": (
        "a `{{` inside brackets needs quotes",
        'for example `"${{nnodes}}"`',
    ),
    r"expected ',' or '.'": ("this bracket is never closed, or a comma is missing in it", ""),
    r"expected <block end>": (
        "this line does not fit the lines above it",
        "settings of one section have the same indentation",
    ),
    r"undefined alias '(.+)'": ("`*{0}` stands for nothing", "put text that starts with `*` in quotes"),
    r"another document": ("a second document starts here", "a job file holds one"),
    r"unknown escape character '(.+)'": ("`\\{0}` means nothing in double quotes", "use single quotes"),
    r"the node content, but found '<": ("a value is missing, or a bracket is never closed", ""),
    r"the node content, but found '(.+)'": ("a value is expected, but here is `{0}`", ""),
    r"sequence entries are not allowed": ("a list starts on its own line", "or write it as `[a, b]`"),
    r"for merging": ("`<<` takes a section", ""),
    r"alphabetic or numeric character": ("`&` and `*` cannot start a value", "put the value in quotes"),
    r"chomping|line break": ("`|` and `>` cannot start a value on one line", "put the value in quotes"),
    r"URI|expected ' '|expected '!'": ("`!` cannot start a value", "put the value in quotes"),
    r"<document start>": ("this does not fit what stands above it", ""),
}
# Of these PyYAML notices the mistake only lines later.
_NOTICED_LATE = re.compile(r"could not find expected ':'|unexpected end of stream|expected ',' or '.', but got '[^{]")


def _syntax_finding(error: yaml.MarkedYAMLError, locate: Locate) -> Finding:
    problem = error.problem or ""
    first, second = error.problem_mark, error.context_mark
    mark = second or first if _NOTICED_LATE.search(problem) else first or second
    message, hint = f"this is not YAML: {problem}", ""
    for pattern, (sentence, remedy) in _SYNTAX.items():
        if match := re.search(pattern, problem):
            message, hint = sentence.format(*match.groups()), remedy.format()
            break
    place = locate(mark.line, mark.column, mark.column + 1) if mark else None
    return Finding(message=message, place=place, hint=hint)
