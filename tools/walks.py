"""Lists and counts the modules that walks through the code cross: `python -m tools.walks`.

`walk_steps` says which functions and classes a walk reaches. The way from one to the next counts too: the shortest chain
of calls from the last step from which there is one. So a module through which a walk passes cannot be left out.

Which call leads where is read from the source. A name is what the module defines or imports, and a method may be the one
of each class that the module knows, or of a class that may stand in its place.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tools.walk_steps import WALKS

ROOT = Path(__file__).parent.parent
PACKAGE = "raylaunch"

Place = tuple[str, str]
"""A module, without `raylaunch.`, and in it a function, a class, or a method as `Class.method`."""


@dataclass(slots=True)
class _Module:
    """What a module defines and imports."""

    name: str
    #: The first words of its docstring.
    about: str
    #: What each name of the module means: a place, or a module (whose name is "").
    names: dict[str, Place] = field(default_factory=dict)
    #: The methods of each class.
    classes: dict[str, set[str]] = field(default_factory=dict)
    bases: dict[str, list[str]] = field(default_factory=dict)
    #: What each function, method and class body mentions.
    bodies: dict[str, list[ast.AST]] = field(default_factory=dict)


@cache
def modules() -> Mapping[str, _Module]:
    """Return all modules of the program, by their names without `raylaunch.`."""
    paths = {_name(path): path for path in (ROOT / PACKAGE).rglob("*.py")}
    return {name: _read(name, path, paths.keys()) for name, path in paths.items()}


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def path_of(module: str) -> str:
    """Return the file of a module, as from the project's folder."""
    path = ROOT.joinpath(PACKAGE, *module.split("."))
    return str((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).relative_to(ROOT))


def _read(name: str, path: Path, known: Iterable[str]) -> _Module:
    tree = ast.parse(path.read_text())
    first = " ".join(re.split("[.:]", ast.get_docstring(tree) or "")[0].split())
    found = _Module(name, first[:1].lower() + first[1:])
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            source = (node.module or "").partition(".")[2]
            for alias in node.names:
                inner = f"{source}.{alias.name}".strip(".")
                found.names[alias.asname or alias.name] = (inner, "") if inner in known else (source, alias.name)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.names[node.name] = (name, node.name)
            found.bodies[node.name] = [node]
        elif isinstance(node, ast.ClassDef):
            found.names[node.name] = (name, node.name)
            methods = [part for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            found.classes[node.name] = {part.name for part in methods}
            found.bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
            found.bodies[node.name] = []
            found.bodies |= {f"{node.name}.{part.name}": [part] for part in methods}
    return found


@cache
def _is_class(place: Place) -> bool:
    module = modules().get(place[0])
    return module is not None and place[1] in module.classes


@cache
def _visible(module: str) -> set[Place]:
    """Return the classes whose methods code of a module may call: its own, imported ones, and those in their place."""
    found = {place for place in modules()[module].names.values() if _is_class(place)}
    for place in modules()[module].names.values():
        if not place[1] and place[0] in modules():
            found |= {(place[0], name) for name in modules()[place[0]].classes}
    return found | {other for place in found for other in _instead_of(place)}


def _bases(place: Place) -> list[Place]:
    module = modules()[place[0]]
    named = (module.names.get(base) for base in module.bases[place[1]])
    return [base for base in named if base is not None and _is_class(base)]


@cache
def _methods(place: Place) -> Mapping[str, Place]:
    """Return the methods of a class, inherited ones too."""
    found: dict[str, Place] = {}
    for base in _bases(place)[::-1]:
        found |= _methods(base)
    return found | {name: (place[0], f"{place[1]}.{name}") for name in modules()[place[0]].classes[place[1]]}


@cache
def _instead_of(place: Place) -> frozenset[Place]:
    """Return the classes whose objects may stand where one of this class is expected: heirs, and those like a protocol."""
    module, name = place
    found = set()
    wanted = {method for method in _methods(place) if not method.startswith("__")}
    is_protocol = "Protocol" in modules()[module].bases[name]
    for other in modules().values():
        for kind in other.classes:
            methods = _methods((other.name, kind)).keys()
            if place in _bases((other.name, kind)):
                found |= {(other.name, kind), *_instead_of((other.name, kind))}
            elif is_protocol and wanted and wanted <= methods and (other.name, kind) != place:
                found.add((other.name, kind))
    return frozenset(found)


@cache
def calls(place: Place) -> tuple[Place, ...]:
    """Return what a function mentions, and may therefore call, in the order of the names."""
    module = modules()[place[0]]
    found: set[Place] = set()
    if _is_class(place):
        found |= {
            (place[0], f"{place[1]}.{method}")
            for method in ("__init__", "__post_init__")
            if method in module.classes[place[1]]
        }
    for body in module.bodies.get(place[1], []):
        for node in ast.walk(body):
            if isinstance(node, ast.Name) and node.id in module.names:
                found.add(module.names[node.id])
            elif isinstance(node, ast.Attribute):
                found |= _attribute(module, place, node)
    return tuple(sorted(other for other in found if other[1]))


def _attribute(module: _Module, place: Place, node: ast.Attribute) -> set[Place]:
    base = module.names.get(node.value.id) if isinstance(node.value, ast.Name) else None
    if base is not None and not base[1]:
        return {modules()[base[0]].names.get(node.attr, (base[0], ""))}
    if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
        kind = place[1].partition(".")[0]
        family = {(place[0], kind), *_instead_of((place[0], kind))} if _is_class((place[0], kind)) else set()
    else:
        family = _visible(module.name)
    return {_methods(kind)[node.attr] for kind in family if node.attr in _methods(kind)}


def way(reached: Sequence[Place], to: Place) -> list[Place]:
    """Return the shortest chain of calls to a place, from the last place from which there is one; empty: from none."""
    for start in reversed(reached):
        before: dict[Place, Place] = {}
        waiting = deque([start])
        while waiting and to not in before:
            place = waiting.popleft()
            for other in calls(place):
                if other not in before and other[0] in modules():
                    before[other] = place
                    waiting.append(other)
        if to in before:
            found = [to]
            while before[found[-1]] != start:
                found.append(before[found[-1]])
            return found[::-1]
    return []


@dataclass(frozen=True, slots=True)
class Reached:
    """A module that a walk reaches for the first time. `part`: of which process, and `what` happens there."""

    part: str
    module: str
    what: str


def walk(steps: str) -> list[Reached]:
    """Return the modules that a walk crosses, in its order. Raises ValueError for a step that is not there, or no call reaches."""
    found: dict[str, Reached] = {}
    part = ""
    before: list[Place] = []
    for line in filter(None, steps.splitlines()):
        if line.startswith("#"):
            part, before = line.removeprefix("# "), []
            continue
        written, _, what = line.partition(" | ")
        module, _, name = written.partition(":")
        if module not in modules() or name not in modules()[module].bodies:
            msg = f"{written} is not in the code any more: where does the walk go? Say it in tools/walk_steps.py"
            raise ValueError(msg)
        place = (module, name)
        chain = [place] if not before or place in before else way(before, place)
        if not chain:
            msg = f"{written} is not called from what the walk in `{part}` has reached before"
            raise ValueError(msg)
        before.append(place)
        for passed, _ in chain:
            said = what if passed == module and what else about(passed)
            found.setdefault(passed, Reached(part, passed, said))
    return list(found.values())


def about(module: str) -> str:
    """Return what a module says of itself, in some words."""
    return modules()[module].about


def page() -> str:
    """Return the walks as a table in Markdown: where each begins and ends, and how many modules it crosses."""
    rows = (f"| {title} | {begin} | {len(walk(steps))} |" for title, (begin, steps) in WALKS.items())
    return "\n".join(["| walk | what happens | modules |", "|---|---|---|", *rows, ""])


def listing(steps: str) -> str:
    """Return the modules of a walk, as a person reads them in a terminal."""
    lines, part = [], ""
    for number, row in enumerate(walk(steps), 1):
        if row.part != part:
            part = row.part
            lines.append(f"    {part}")
        lines.append(f"{number:3} {path_of(row.module)}: {row.what}")
    return "\n".join(lines)


if __name__ == "__main__":
    for name, (begin, listed) in WALKS.items():
        print(f"{name}: {len(walk(listed))} modules\n{begin}\n{listing(listed)}\n")
