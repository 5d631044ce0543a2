"""docs/troubleshooting.md has each message that tells a person what to do, as it is in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylaunch.core.failures import hints, stack_notes
from tools.docs import blocks

KEYS = [
    key
    for line in (blocks.DOCS / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
    for key in re.findall(r"`([^`]+)`", blocks.cells(line)[0])
]
OF_GLOO = ("connectFullMesh failed",)
HERE = {"ConfigError", "Finding", "Problem", "CheckRow", "cls", "__init__", "NotDoneError"}
"""What marks the text that is wrong and says what to write, a row of a table that has its hint, and what passes one on."""


def texts(node: ast.expr, assigned: dict[str, list[ast.expr]]) -> Iterator[str]:
    """The texts that an expression may be, with `{}` for what is filled in; of a name, all that a function assigns."""
    match node:
        case ast.Name(id=name):
            for value in assigned.get(name, []):
                yield from texts(value, {})
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr():
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        case ast.IfExp():
            yield from texts(node.body, assigned)
            yield from texts(node.orelse, assigned)


def messages_with_hints() -> Iterator[tuple[str, str]]:
    """Each message of an error with a hint: where it is, and the text."""
    for path in sorted((blocks.ROOT / "raylaunch").rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            assigned: dict[str, list[ast.expr]] = {}
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    assigned.setdefault(node.targets[0].id, []).append(node.value)
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and node.args and is_error_with_hint(node):
                    yield from ((f"{path.name}:{node.lineno}", text) for text in texts(node.args[0], assigned))


def is_error_with_hint(call: ast.Call) -> bool:
    """Whether it makes an error with a hint, other than one of those in `HERE`."""
    return any(word.arg == "hint" for word in call.keywords) and ast.unparse(call.func).rpartition(".")[2] not in HERE


def printed_by_workers() -> Iterator[tuple[str, str]]:
    """What workers tell on stderr, beside the script's own output."""
    for path in sorted((blocks.ROOT / "raylaunch" / "worker").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and node.args:
                for text in texts(node.args[0], {}):
                    if text.startswith("raylaunch: ") and re.search(r"[a-z]{3}", text[11:]):
                        yield f"{path.name}:{node.lineno}", text


def has_entry(text: str) -> bool:
    """Whether a key is found in the text, which has `{}` where something is filled in."""
    return any(pattern(key).search(text) for key in KEYS)


def pattern(key: str) -> re.Pattern[str]:
    """What a key stands for: `...` is anything."""
    return re.compile(".*".join(re.escape(part.strip()) for part in key.split("...")))


@pytest.mark.parametrize(("place", "text"), sorted(set(messages_with_hints())), ids=lambda text: text[:60])
def test_a_message_with_a_hint_has_its_entry(place: str, text: str) -> None:
    assert has_entry(text), f"docs/troubleshooting.md lacks the message of {place}"


@pytest.mark.parametrize(("place", "text"), sorted(set(printed_by_workers())), ids=lambda text: text[:60])
def test_what_workers_tell_has_its_entry(place: str, text: str) -> None:
    if "commits {} for now" in text:  # which tells how things are
        return
    assert has_entry(text), f"docs/troubleshooting.md lacks the message of {place}"


def test_each_failure_with_a_hint_has_its_entry() -> None:
    """A key of the page is found by each pattern of an error; each note of a stack is a key, and each other hint too."""
    missing = [pattern for pattern in hints.PATTERNS if not any(re.search(pattern, key, re.IGNORECASE) for key in KEYS)]
    notes = [text for name, text in vars(stack_notes).items() if name.isupper() and text not in KEYS]
    signals = [name for name in ("SIGKILL", "SIGBUS") if not any(name in key for key in KEYS)]
    source = ast.parse(Path(hints.__file__).read_text(encoding="utf-8"))
    whole = {node.targets[0].id: node.value.value for node in source.body if is_text(node)}
    others = [
        name
        for name, text in whole.items()
        if name not in ("_SHARED_MEMORY", "_KILLED", "_OUT_OF_MEMORY") and not has_entry(text)
    ]
    assert (missing, notes, signals, others) == ([], [], [], [])


def is_text(node: ast.stmt) -> bool:
    """Whether a statement gives a name to a text."""
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_every_key_is_part_of_a_message() -> None:
    """No entry is for a message that is not in the code any more; messages of torch, CUDA and the system have hints."""
    known = [
        key for key in KEYS if key in OF_GLOO or any(re.search(each, key, re.IGNORECASE) for each in hints.PATTERNS)
    ]
    said = [
        text
        for path in (blocks.ROOT / "raylaunch").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for text in (texts(node, {}) if isinstance(node, ast.Constant | ast.JoinedStr) else ())
    ]
    assert [key for key in KEYS if key not in known and not any(map(pattern(key).search, said))] == []
