"""The limits of references: `${key}` in a value stands for another setting, which may contain references itself.

OmegaConf replaces them without a limit: thirty values, each with two references to the next one, stand for a billion
values. So their cost is added up here before OmegaConf reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import yaml

from raylaunch.cli.config.schema import Path, path_of

MAX_DEPTH = 16
"""How many references may lead from one value to the text that it ends with."""
MAX_REPLACED = 500
"""How many references may be replaced in all. OmegaConf needs half a millisecond for each."""
MAX_CHARACTERS = 1_000_000
"""The length of all texts together in which references were replaced."""

_PLACEHOLDERS = ("local_rank", "rank", "role_name", "node_address", "interface")
"""Names in `${...}` that are filled in for each worker or node, and are no references."""
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")
_NESTED = re.compile(r"\$\{[^{}:]*\$\{")
_NAME = re.compile(r"""\$\{\s*(?:oc\.(?:select|deprecated|dict\.\w+)\s*:)?\s*['"]?([^{}:,'"]*)""")
"""The name of a setting in a reference. The resolvers of OmegaConf that read settings take one as an argument."""


@dataclass(frozen=True, slots=True)
class _Cost:
    replaced: int
    """The number of references that are replaced, also in the values that references lead to."""
    characters: int
    """The length of the text that results."""
    depth: int = 0
    """The length of the longest path of references."""


class ReferenceLimits:
    """Adds up what the references in some values cost."""

    def __init__(self, nodes: Mapping[Path, yaml.Node]) -> None:
        """`nodes`: all values that were given, by their paths, without the sections that they are in."""
        texts = {path: "\n".join(_texts(node)) for path, node in nodes.items()}
        self._lengths = {path: len(text) for path, text in texts.items()}
        self._texts = {path: text for path, text in texts.items() if "${" in text}
        self._inside: dict[Path, list[Path]] = {}
        for path in nodes:
            for size in range(len(path) + 1):
                self._inside.setdefault(path[:size], []).append(path)
        self._costs: dict[Path, _Cost] = {}
        self._total = _Cost(0, 0)

    def problem(self, path: Path) -> str:
        """Return why a value cannot be read because of its references; "" if it can."""
        text = self._texts.get(path)
        if text is None:
            return ""
        if _NESTED.search(text):
            return "the name in a reference cannot contain a reference"
        cost = self._cost(path, ())
        if cost.depth > MAX_DEPTH:
            return f"more than {MAX_DEPTH} references lead from this value to its text"
        total = _Cost(self._total.replaced + cost.replaced, self._total.characters + cost.characters)
        if total.replaced > MAX_REPLACED:
            return f"more than {MAX_REPLACED:,} references would have to be replaced"
        if total.characters > MAX_CHARACTERS:
            return f"with its references replaced, the file would have more than {MAX_CHARACTERS:,} characters"
        self._total = total
        return ""

    def _cost(self, path: Path, above: tuple[Path, ...]) -> _Cost:
        """Return the cost of one value. `above`: the values whose references led here.

        A loop costs nothing, since OmegaConf refuses it.
        """
        found = self._costs.get(path)
        if found is not None or path not in self._texts or path in above or len(above) > MAX_DEPTH:
            return found or _Cost(0, self._lengths[path], depth=len(above) if len(above) > MAX_DEPTH else 0)
        names = [name.strip() for name in _NAME.findall(self._texts[path])]
        names = [name for name in names if name not in _PLACEHOLDERS]
        inner = [self._cost(target, (*above, path)) for name in names for target in self._targets(path, name)]
        found = _Cost(
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
        yield _ESCAPED.sub("", node.value)
    elif isinstance(node, yaml.CollectionNode):
        for item in node.value:
            yield from _texts(item[1] if isinstance(item, tuple) else item)
