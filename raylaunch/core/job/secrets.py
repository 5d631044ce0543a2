"""Recognise secrets in variables, arguments and lines of text by the names that go with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

HIDDEN = "***"
"""The replacement for a secret."""

_WORDS = ("token", "key", "secret", "password", "passwd", "passphrase", "credential", "credentials")
_SHORT_WORDS = ("pass", "pwd", "auth")
"""Words that are also parts of others (`compass`, `author`): they count alone, as the last part of a name."""
_FOLDERS = ("pwd", "oldpwd")
"""Variables of a shell whose names have one of these words."""
_PART = re.compile(r"[\W_]+|(?<=[a-z])(?=[A-Z])")
"""What separates the parts of a name."""
_SETTING = re.compile(r"""(?<![\w.-])([\w.-]+)["']?\s*(?:=|:(?=\s|$))\s*""")
"""A name with `=` or `:`. It is not searched from within a name: the search would be quadratic."""
_NO_VALUE = re.compile(r"""\?\?\?|\$\{[^{}]*\}|\$\w+""")
"""Values that are missing (OmegaConf's `???`), and references to others."""


def is_secret(variable: str) -> bool:
    """Whether an environment variable of this name holds a secret, as far as any name may tell that."""
    return _contains_word(variable) or _ends_with_short_word(variable)


def is_secret_argument(name: str) -> bool:
    """Whether an argument of this name holds a secret: `--api-key` does, `--tokenizer` and `--max-tokens` do not."""
    return any(part.endswith(_WORDS) for part in _parts(name)) or _ends_with_short_word(name)


def _contains_word(name: str) -> bool:
    return any(word in name.lower() for word in _WORDS)


def _ends_with_short_word(name: str) -> bool:
    return name.lower() not in _FOLDERS and _parts(name)[-1] in _SHORT_WORDS


def _parts(name: str) -> list[str]:
    return [part.lower() for part in _PART.split(name) if part] or [""]


def shown_arguments(arguments: Sequence[Any]) -> list[Any]:
    """Return a redacted copy of arguments: `--api-key=***`, and `--api-key ***`."""
    return [name + HIDDEN if secret else name for name, secret in split(arguments)]


def secret_at(line: str) -> int | None:
    """Return the index at which a secret begins in a line of a job file or a `key=value`; None if it has none.

    The index may be the end of the line: then the secret is on the lines that follow.
    """
    found = next((one for one in _SETTING.finditer(line) if is_secret(one[1])), None)
    return found.end() if found and not _NO_VALUE.fullmatch(line[found.end() :].strip()) else None


def cut(line: str) -> str:
    """Return a line with its secret replaced."""
    at = secret_at(line)
    return line if at is None or not line[at:] else line[:at] + HIDDEN


def split(arguments: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """Yield (the part that may be shown, the secret after it or "") of each argument."""
    awaited = False  # whether the argument before was the name of a secret, without its value
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
