"""What looks secret: variables, arguments and lines of text, by the names in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

HIDDEN = "***"
"""What stands for a secret."""

_WORDS = ("token", "key", "secret", "password")
_SETTING = re.compile(rf"""[\w.-]*(?:{"|".join(_WORDS)})[\w.-]*["']?\s*(?:=|:(?=\s|$))\s*""", re.IGNORECASE)
_NO_VALUE = re.compile(r"""\?\?\?|\$\{[^{}]*\}|\$\w+""")
"""What is still missing, and references."""


def is_secret(variable: str) -> bool:
    """Whether the value of an environment variable of this name is nobody's business."""
    return any(word in variable.lower() for word in _WORDS)


def is_secret_argument(name: str) -> bool:
    """Whether that of an argument is: of `--api-key` it is, of `--tokenizer` and `--max-tokens` not."""
    return any(part.endswith(_WORDS) for part in re.split(r"[\W_]+", name.lower()))


def shown_arguments(arguments: Sequence[Any]) -> list[Any]:
    """Arguments as they may be shown: `--api-key=***`, and `--api-key ***`."""
    return [name + HIDDEN if secret else name for name, secret in split(arguments)]


def secret_at(line: str) -> int | None:
    """Where in a line of a job file, or in a `key=value`, a secret begins; it may go on to the end, or begin there."""
    found = _SETTING.search(line)
    return found.end() if found and not _NO_VALUE.fullmatch(line[found.end() :].strip()) else None


def cut(line: str) -> str:
    """A line up to what is secret in it."""
    at = secret_at(line)
    return line if at is None or not line[at:] else line[:at] + HIDDEN


def split(arguments: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """What of each argument may be shown, and the secret behind it or `""`."""
    awaited = False  # the word before was a name without its value
    for word in arguments:
        name, equals, value = word.partition("=") if isinstance(word, str) else ("", "", "")
        is_flag = name.startswith("-")
        if awaited and not is_flag:
            yield "", str(word)
        elif value and is_secret_argument(name):
            yield f"{name}=", value
        else:
            yield word, ""
        awaited = is_flag and not equals and is_secret_argument(name)
