"""`key=value` words of the command line, put into what the job file gives."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace

from raylaunch.cli.marks import Finding, Place
from raylaunch.cli.settings import advice, names
from raylaunch.cli.written import Given, UnreadableError, parse

_WIDTH = 100


def places(path: str, overrides: Sequence[str]) -> list[Place]:
    """Where each override stands on the command line; on a long one, the others are left out."""
    words = [shlex.quote(word) for word in ("raylaunch", path, *overrides)]
    whole = " ".join(words)
    found = []
    for index in range(2, len(words)):
        text, column = whole, len(" ".join(words[:index])) + 1
        if len(whole) > _WIDTH and len(overrides) > 1:
            before = [*words[:2], "..."] if words[2:index] else words[:2]
            after = ["..."] if words[index + 1 :] else []
            text, column = " ".join([*before, words[index], *after]), len(" ".join(before)) + 1
        # A rank of its own keeps the order of the words where each has its own text.
        width = len(words[index])
        found.append(Place(source="command line", text=text, column=column, width=width, rank=index))
    return found


def put(root: Given, override: str, place: Place, findings: list[Finding]) -> None:
    """Sets one value in the file's settings, or finds what is wrong with the override."""
    key, equals, text = override.partition("=")
    path = re.sub(r"\[([^][]*)\]", r".\1", key).split(".")
    dotted = ".".join(path)
    if not override.strip():
        message, hint = "an empty word is no override", "write `key=value`"
    elif not equals:
        message, hint = f"`{key}` is given no value", _assignment(dotted)
    elif not all(path):
        message, hint = f"`{override}` names no setting", "write `key=value`"
    else:
        try:
            given = parse(text, lambda *_: place, place, findings) or Given(key=place, place=place)
            _set(root, path, given)
        except UnreadableError as error:
            findings.append(replace(error.finding, keys=frozenset([dotted])))
        except LookupError as error:
            findings.append(Finding(message=str(error.args[0]), place=place, keys=frozenset([dotted])))
        return
    findings.append(Finding(message=message, place=place, hint=hint, keys=frozenset([dotted])))


def _assignment(key: str) -> str:
    if key in names():
        return f"write `{key}=value`"
    return advice(key).replace("`?", "=value`?") or "write `key=value`"


def _set(section: Given, path: Sequence[str], given: Given) -> None:
    """Sections are merged, the rest is replaced; raises LookupError for an item that a list has not."""
    head, *rest = path
    items = section.items or []
    inside = section.children
    if inside is None:
        inside = {str(index): item for index, item in enumerate(items)}
    if section.children is None and head not in inside:
        msg = f"the list has {len(items)} items, counted from 0, and `{head}` is none of them"
        raise LookupError(msg)
    old = inside.get(head)
    name = head if old is None else old.name
    if rest:
        if old is None or old.is_scalar:
            old = inside[head] = Given(key=given.key, place=given.key, name=name, children={})
        _set(old, rest, given)
    elif old is not None and old.children is not None and given.children is not None:
        for child, value in given.children.items():
            _set(old, [child], value)
    else:
        inside[head] = replace(given, name=name)
    if section.children is None:
        items[:] = inside.values()
