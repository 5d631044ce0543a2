"""docs/glossary.md has each term once, and names the module that the term is in."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tools.docs import blocks

PROCESSES = (
    "driver",
    "agent",
    "subreaper",
    "fork server",
    "zygote",
    "store",
    "worker",
)


@cache
def rows() -> tuple[tuple[str, str, str, Path], ...]:
    """Term, meaning, source of the term, module."""
    text = (blocks.DOCS / "glossary.md").read_text(encoding="utf-8")
    lines = [blocks.cells(line) for line in text.splitlines() if line.startswith("| ")][1:]
    return tuple((term, meaning, source, blocks.ROOT / module.strip("`")) for term, meaning, source, module in lines)


def test_every_term_has_a_meaning_and_a_source() -> None:
    assert [row for row in rows() if not all(row)] == []


def test_no_term_occurs_twice() -> None:
    seen = [term for term, *_ in rows()]
    assert sorted({term for term in seen if seen.count(term) > 1}) == []


def test_terms_are_sorted() -> None:
    """By letters; where only the font differs, the idea comes before the class."""
    terms = [term for term, *_ in rows()]
    assert terms == sorted(terms, key=lambda term: (term.strip("`").lower().replace(" ", ""), term.startswith("`")))


def test_every_module_exists() -> None:
    assert [str(module) for *_, module in rows() if not module.is_file()] == []


def test_every_term_in_code_font_is_defined_in_its_module() -> None:
    terms = [(term.strip("`"), module) for term, *_, module in rows() if term.startswith("`")]
    assert [(term, module.name) for term, module in terms if term not in defined_in(module)] == []


def test_every_process_is_explained() -> None:
    terms = {term for term, *_ in rows()}
    assert [process for process in PROCESSES if process not in terms] == []


def test_a_name_of_the_code_is_listed_only_if_a_page_has_it() -> None:
    """All others are explained by their docstrings."""
    pages = [page.read_text(encoding="utf-8") for page in blocks.pages() if page.name != "glossary.md"]
    names = [term.strip("`") for term, *_ in rows() if term.startswith("`")]
    assert [name for name in names if not any(re.search(rf"\b{name}\b", page) for page in pages)] == []


def defined_in(module: Path) -> set[str]:
    """Names of classes, functions and constants at the top of a module, and of what is in its classes."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    return {name for body in bodies for node in body for name in _names(node)}


def _names(node: ast.stmt) -> list[str]:
    match node:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.name]
        case ast.Assign():
            return [target.id for target in node.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []
