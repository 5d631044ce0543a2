"""Redaction: replace secrets by `***` in everything of a run that is shown or written to files."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from raylaunch.core.environ import snapshot
from raylaunch.core.job.job import Job
from raylaunch.core.job.secrets import HIDDEN, is_secret, is_secret_argument, shown_arguments, split
from raylaunch.errors import RaylaunchError

Thing = TypeVar("Thing")

_PATHS = ("_path", "_file", "_dir", "_directory", "_home")
"""Suffixes of variables whose values are paths, which other texts may contain."""
_LONG = 8
"""Values with at least this many characters are searched everywhere in other texts."""
_SHORT = 4
"""Shorter values are searched as whole words. Still shorter ones (`1`, `on`) occur by chance, and are not searched."""
_COMMON = frozenset(("true", "false", "none", "null", "auto", "basic", "bearer", "token", "default"))
"""Short values that are settings rather than secrets."""
_MIN_DIGITS = 6
"""Shorter numbers are ports, steps and sizes."""
_URL = re.compile(r"""[^\s"'<>]*://[^\s"'<>]*""")
_USER = re.compile(r"[^/:@]*")
_PORT = re.compile(r"\d{1,5}(?:[/?#]|\Z)")


@dataclass(frozen=True, slots=True)
class Redactor:
    """The secret values of a run."""

    values: tuple[str, ...] = ()
    """Longest first, because one may be a part of another."""
    words: tuple[str, ...] = ()
    """Values that are replaced only where they are whole words, since they are short."""

    @classmethod
    def of(cls, job: Job, environ: Mapping[str, str]) -> Redactor:
        """Collect the secrets of the job and of the submitter's environment, which workers may print."""
        found = [*_values(job, environ)]
        values = {form for _, value in found for form in _forms(value) if len(form) >= _LONG}
        words = {form for is_sure, value in found if is_sure for form in _forms(value) if _is_searched_word(form)}
        return cls(tuple(sorted(values, key=_longest_first)), tuple(sorted(words, key=_longest_first)))

    def hide(self, text: str) -> str:
        """Return the text with each secret, and each password or token in a URL, replaced by `***`."""
        if self.values or self.words:
            text = _any_of(self.values, self.words).sub(HIDDEN, text)
        return _URL.sub(_without_password, text) if "://" in text else text

    def headline(self, job: Job) -> str:
        """Return the title of a job, and its program as a shell needs it but for what is hidden.

        A function is no word of a shell, and neither is a word of which a part is hidden.
        """
        entry = job.entrypoint
        target = self.hide(entry.target) if entry.function or not entry.kind else self._word(entry.target)
        arguments = (part + HIDDEN if secret else self._word(str(part)) for part, secret in split(entry.args))
        return f"{self.hide(job.title)}: {' '.join([target, *arguments])}"

    def _word(self, text: str) -> str:
        hidden = self.hide(text)
        return shlex.quote(text) if text == hidden else hidden

    def shown(self, thing: Thing) -> Thing:
        """Return a redacted copy of a job, a journal entry, or any other value of dataclasses, dicts and sequences."""
        shown: Thing = self._shown(thing, _no_name)
        return shown

    def _shown(self, value: Any, hides: Callable[[str], bool]) -> Any:
        if isinstance(value, str):
            return self.hide(value)
        if is_dataclass(value) and not isinstance(value, type):
            items = {field.name: getattr(value, field.name) for field in fields(value)}
            return replace(value, **{name: self._shown(item, _NAMED.get(name, hides)) for name, item in items.items()})
        if isinstance(value, dict):
            return {
                name: HIDDEN if item and item is not True and hides(str(name)) else self._shown(item, hides)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            parts = shown_arguments(value) if hides is is_secret_argument else value
            return type(value)(self._shown(item, hides) for item in parts)
        return value


@lru_cache(maxsize=1)
def _any_of(values: tuple[str, ...], words: tuple[str, ...]) -> re.Pattern[str]:
    parts = [*map(re.escape, values), *(rf"(?<!\w){re.escape(word)}(?!\w)" for word in words)]
    return re.compile("|".join(parts))


def _longest_first(value: str) -> tuple[int, str]:
    return -len(value), value


def _is_searched_word(value: str) -> bool:
    if not _SHORT <= len(value) < _LONG or value.lower() in _COMMON:
        return False
    return not value.isdecimal() or len(value) >= _MIN_DIGITS


def _without_password(match: re.Match[str]) -> str:
    url, parts, done = match[0], [], 0
    last_at = url.rfind("@")
    begin = url.find("://")
    while 0 <= begin < last_at:
        start, end = _password_in(url, begin + len("://"), last_at)
        parts += [url[done:start], HIDDEN] if start < end else []
        done = end if start < end else done
        begin = url.find("://", end)
    return "".join((*parts, url[done:]))


def _password_in(url: str, user: int, last_at: int) -> tuple[int, int]:
    """Return start and end of the `hunter2` in `postgres://ana:hunter2@db/runs`, or the `ghp_0` in `https://ghp_0@host`.

    `user`: index of the `ana`. `last_at`: index of the last `@`, since people write passwords with `/` and `@`, though
    no URL may have them. Without a password, both are equal.
    """
    after_user = _USER.match(url, user)
    colon = user if after_user is None else after_user.end()
    if url.startswith(":", colon) and not _PORT.match(url, colon + 1):
        slash = url.find("/", colon)
        within_host = url.rfind("@", colon, slash) if slash >= 0 else last_at
        return colon + 1, within_host if within_host >= 0 else last_at
    if url.startswith("@", colon) and url.endswith(("http://", "https://"), 0, user):
        return user, colon
    return colon, colon


@contextlib.contextmanager
def redacted_errors(secrets: Redactor) -> Iterator[None]:
    """Hide secrets in errors, which a worker or an address may have told."""
    try:
        yield
    except RaylaunchError as error:
        error.message, error.hint = secrets.hide(error.message), secrets.hide(error.hint)
        error.args = (error.message,)
        raise


def _no_name(_: str) -> bool:
    return False


_NAMED = {"env": is_secret, "args": is_secret_argument, "kwargs": is_secret_argument}
"""Fields of a job with names that the user chose, and how secrets are recognised by these names."""


def _forms(value: str) -> Iterator[str]:
    """Yield the forms in which texts may contain a value: whole or a line of it, plain or quoted by Python or JSON."""
    for part in (value, *value.splitlines()):
        yield from (part, repr(part)[1:-1], json.dumps(part)[1:-1])


def _values(job: Job, environ: Mapping[str, str]) -> Iterator[tuple[bool, str]]:
    """Yield each secret, and whether its name says so for sure: `TOKENIZERS_PARALLELISM` has no token."""
    for env in (snapshot(environ), job.env, *(rule.env for rule in job.nodes.values())):
        for name, value in env.items():
            if is_secret(name) and not name.lower().endswith(_PATHS):
                yield is_secret_argument(name), value
    yield from ((True, secret) for _, secret in split(job.entrypoint.args))
    yield from ((True, str(value)) for name, value in job.entrypoint.kwargs.items() if is_secret_argument(str(name)))
