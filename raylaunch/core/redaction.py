"""What may be written down: anything of a run, with `***` for what is secret in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from raylaunch.core.job import Job
from raylaunch.core.secrets import HIDDEN, is_secret, is_secret_argument, shown_arguments, split

Thing = TypeVar("Thing")

_PATHS = ("_path", "_file", "_dir", "_home")
"""Ends of names whose values are paths, which other texts have a right to name."""
_LEAST = 8
"""Characters of a value that other texts are searched for: a shorter one (`1`, `false`) is there by chance."""
_IN_AN_ADDRESS = re.compile(r"(://[^\s/:@]*:)[^\s/@]+@")
"""The password in `postgres://ana:hunter2@db/runs`, whatever the variable's name."""


@dataclass(frozen=True, slots=True)
class Secrets:
    """The secret values of a run."""

    values: tuple[str, ...] = ()
    """Longest first, since one may be part of another."""

    @classmethod
    def of(cls, job: Job, environ: Mapping[str, str]) -> Secrets:
        """Those of the job, and those of the submitter's environment, which the job and its workers may repeat."""
        found = {form for value in _values(job, environ) for form in _forms(value) if len(form) >= _LEAST}
        return cls(tuple(sorted(found, key=lambda value: (-len(value), value))))

    def hide(self, text: str) -> str:
        """The text with none of them in it."""
        text = _any_of(self.values).sub(HIDDEN, text) if self.values else text
        return _IN_AN_ADDRESS.sub(rf"\1{HIDDEN}@", text)

    def shown(self, thing: Thing) -> Thing:
        """A job, an entry of the log or anything else made of such things, as it may be written down."""
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
    """The job as it may be written down."""
    return Secrets.of(job, environ).shown(job)


def _no_name(_: str) -> bool:
    return False


_NAMED = {"env": is_secret, "args": is_secret_argument, "kwargs": is_secret_argument}
"""Settings of a job in which there are names of people's own."""


def _forms(value: str) -> Iterator[str]:
    """How other texts may have it: whole, a line of it, within quotes of Python or of JSON."""
    for part in (value, *value.splitlines()):
        yield from (part, repr(part)[1:-1], json.dumps(part)[1:-1])


def _values(job: Job, environ: Mapping[str, str]) -> Iterator[str]:
    for env in (environ, job.env, *(rule.env for rule in job.nodes.values())):
        yield from (value for name, value in env.items() if is_secret(name) and not name.lower().endswith(_PATHS))
    yield from (secret for _, secret in split(job.entrypoint.args))
    yield from (str(value) for name, value in job.entrypoint.kwargs.items() if is_secret_argument(str(name)))
