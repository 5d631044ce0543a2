"""Redaction: replace secrets by `***` in everything of a run that is shown or written to files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from raylaunch.core.job.job import Job
from raylaunch.core.job.secrets import HIDDEN, is_secret, is_secret_argument, shown_arguments, split

Thing = TypeVar("Thing")

_PATHS = ("_path", "_file", "_dir", "_home")
"""Suffixes of variables whose values are paths, which other texts may contain."""
_MIN_LENGTH = 8
"""Only values of so many characters are searched in other texts: shorter ones (`1`, `false`) occur by chance."""
_URL_PASSWORD = re.compile(r"(://[^\s/:@]*:)[^\s/@]+@")
"""The password in `postgres://ana:hunter2@db/runs`, whatever the variable's name."""


@dataclass(frozen=True, slots=True)
class Redactor:
    """The secret values of a run."""

    values: tuple[str, ...] = ()
    """Longest first, because one may be a part of another."""

    @classmethod
    def of(cls, job: Job, environ: Mapping[str, str]) -> Redactor:
        """Collect the secrets of the job and of the submitter's environment, which workers may print."""
        found = {form for value in _values(job, environ) for form in _forms(value) if len(form) >= _MIN_LENGTH}
        return cls(tuple(sorted(found, key=lambda value: (-len(value), value))))

    def hide(self, text: str) -> str:
        """Return the text with each secret, and each password of a URL, replaced by `***`."""
        text = _any_of(self.values).sub(HIDDEN, text) if self.values else text
        return _URL_PASSWORD.sub(rf"\1{HIDDEN}@", text)

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
def _any_of(values: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, values)))


def shown(job: Job, environ: Mapping[str, str]) -> Job:
    """Return a redacted copy of the job."""
    return Redactor.of(job, environ).shown(job)


def _no_name(_: str) -> bool:
    return False


_NAMED = {"env": is_secret, "args": is_secret_argument, "kwargs": is_secret_argument}
"""Fields of a job with names that the user chose, and how secrets are recognised by these names."""


def _forms(value: str) -> Iterator[str]:
    """Yield the forms in which texts may contain a value: whole or a line of it, plain or quoted by Python or JSON."""
    for part in (value, *value.splitlines()):
        yield from (part, repr(part)[1:-1], json.dumps(part)[1:-1])


def _values(job: Job, environ: Mapping[str, str]) -> Iterator[str]:
    for env in (environ, job.env, *(rule.env for rule in job.nodes.values())):
        yield from (value for name, value in env.items() if is_secret(name) and not name.lower().endswith(_PATHS))
    yield from (secret for _, secret in split(job.entrypoint.args))
    yield from (str(value) for name, value in job.entrypoint.kwargs.items() if is_secret_argument(str(name)))
