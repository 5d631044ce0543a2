"""From a job file and `key=value` overrides to a `Job`, or to an error that points at every mistake."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_origin

import yaml
from omegaconf import OmegaConf

from raylaunch.cli.marks import Finding, Place, render
from raylaunch.cli.overrides import places, put
from raylaunch.cli.references import (
    DeadReferenceError,
    escaped,
    is_complete,
    refers,
    resolved,
)
from raylaunch.cli.settings import MisfitError, advice, fitted, inner, names, near_miss
from raylaunch.cli.written import Dumper, Given, UnreadableError, parse
from raylaunch.core.job import Job, problems
from raylaunch.errors import ConfigError

_MISSING = "???"
_EXAMPLE = "for example `entrypoint: {script: train.py}`"


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Job:
    """The job of a file with overrides merged in; raises ConfigError with everything that is wrong."""
    title = os.fspath(path)
    text = _read(title)
    findings: list[Finding] = []
    root, readable = Given(key=Place(source=title), place=Place(source=title), children={}), True
    try:
        root = _settings(parse(text, _Lines(title, text), root.place, findings)) or root
    except UnreadableError as error:
        findings.append(error.finding)
        readable = False
    for override, place in zip(overrides, places(title, overrides), strict=True):
        put(root, override, place, findings)
    job = _Check(root, findings).job()
    if readable:
        findings += _semantic(job, root, findings)
    if findings:
        raise ConfigError(render(findings))
    return job


def dump(job: Job) -> str:
    """The whole job as YAML that `load` reads back."""
    data = _escaped(asdict(job))
    return str(yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=10_000))


class _Lines:
    """Turns lines and columns of a file into places."""

    def __init__(self, title: str, text: str) -> None:
        self.title = title
        self.lines = re.split(r"\r\n|[\r\n\x85\u2028\u2029]", text)

    def __call__(self, line: int, column: int, end: int | None) -> Place:
        # What is missing at the end of a file is shown behind its last word.
        while line > 0 and not "".join(self.lines[line:]).strip():
            line -= 1
            column = end = len(self.lines[line].rstrip())
        text = self.lines[line]
        width = (len(text) if end is None else end) - column
        return Place(source=self.title, line=line + 1, text=text, column=column, width=max(1, width))


class _Check:
    """One walk along the settings and their types; what does not fit is found and left out."""

    def __init__(self, root: Given, findings: list[Finding]) -> None:
        self.root = root
        self.findings = findings
        self.config = OmegaConf.create(_over(asdict(Job()), _plain(Job, root)))
        function = _find(root, "entrypoint.function")
        self.takes_words = function is None or function.is_empty

    def job(self) -> Job:
        """What is right of the settings, and defaults for the rest."""
        children = (self.root.children or {}).items()
        return Job(**dict(self._each(Job, children, self.config, "")))

    def _each(self, hint: Any, given: Any, config: Any, prefix: str) -> Iterator[tuple[Any, Any]]:
        for text, child in given:
            key, name = f"{prefix}{text}", child.name if hint is Any else text
            # A program gets its arguments as they are written; only a function knows numbers from text.
            words = self.takes_words and key == "entrypoint.args"
            kind = list[str] if words else inner(hint, str(text))
            try:
                if kind is None:
                    message = f"`{key}` {'has a dot in its name' if key in names() else 'is not a setting'}"
                    self._refuse(child.key, message, advice(key), key, near_miss(key))
                else:
                    yield name, self._value(kind, child, config, name, key)
            except (MisfitError, DeadReferenceError) as error:
                self._refuse(child.place, error.message, error.hint, key)

    def _value(self, hint: Any, given: Given, config: Any, name: Any, key: str) -> Any:
        section, origin = is_dataclass(hint), get_origin(hint)
        if given.text == _MISSING:
            message, remedy = f"`{key}` must be given", f"here, or as `{key}=value` on the command line"
            raise MisfitError(message, remedy)
        if given.children is not None and (section or hint is Any or origin is dict):
            inside = dict(self._each(hint, given.children.items(), config[name], f"{key}."))
            return hint(**inside) if section else inside
        if given.items is not None and (hint is Any or origin is list):
            return [value for _, value in self._each(hint, enumerate(given.items), config[name], f"{key}.")]
        if given.is_empty and (section or origin in (list, dict)):
            return hint()
        if refers(given.text):
            return fitted(hint, resolved(config, name, given.text), written=given.text)
        return fitted(hint, given.bare, given.text)

    def _refuse(self, place: Place, message: str, hint: str, *keys: str) -> None:
        self.findings.append(Finding(message=message, place=place, hint=hint, keys=frozenset(keys) - {""}))


def _plain(hint: Any, given: Given) -> Any:
    """Values without places, as `${...}` of other values sees them."""
    if given.children is not None:
        return {
            child.name if hint is Any else name: _plain(inner(hint, name) or Any, child)
            for name, child in given.children.items()
        }
    if given.items is not None:
        return [_plain(inner(hint) or Any, item) for item in given.items]
    if refers(given.text):
        return given.text if is_complete(given.text) else None
    try:
        return fitted(hint, given.value, given.text)
    except MisfitError:
        return given.value


def _over(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return below | {name: _over(below.get(name), value) for name, value in above.items()}


def _settings(given: Given | None) -> Given | None:
    if given is not None and given.children is None and not given.is_empty:
        what, place = ("a list", given.items[0].place) if given.items else ("text", given.place)
        message = f"a section of settings is expected, but the file is {what}"
        raise UnreadableError(Finding(message=message, place=place, hint=_EXAMPLE))
    return None if given is None or given.is_empty else given


def _semantic(job: Job, root: Given, findings: list[Finding]) -> list[Finding]:
    """What is wrong with values of the right types, unless it follows from something found before."""
    known = {key for finding in findings for key in finding.keys}
    found = []
    for problem in problems(job):
        keys = {problem.key, problem.also} - {""}
        if any(_overlap(key, other) for key in keys for other in known):
            continue
        nothing = problem.key == "entrypoint"
        message = "nothing to run: the file is empty" if nothing and not root.children else problem.message
        place, also = _place(root, problem.key), _place(root, problem.also) if problem.also else None
        hint = problem.hint or (_EXAMPLE if nothing else "")
        found.append(Finding(message=message, place=place, also=also, hint=hint))
    return found


def _overlap(key: str, other: str) -> bool:
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def _find(root: Given, key: str) -> Given | None:
    found: Given | None = root
    for name in key.split("."):
        found = (found.children or {}).get(name) if found else None
    return found


def _place(root: Given, key: str) -> Place:
    """Of a value; of the section it should be in where it is not given."""
    while key:
        if found := _find(root, key):
            return found.place
        key = key.rpartition(".")[0]
    return root.place


def _escaped(value: Any) -> Any:
    """Text that holds a `${` would be taken for a reference."""
    if isinstance(value, dict):
        return {name: _escaped(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    return escaped(value) if isinstance(value, str) else value


def _read(path: str) -> str:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(render([_unread(path, error)])) from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"the file is not UTF-8: byte 0x{content[error.start]:02x} in line {line}"
        raise ConfigError(render([Finding(message=message, place=Place(source=path))])) from None


def _unread(path: str, error: OSError) -> Finding:
    match error:
        case FileNotFoundError() | NotADirectoryError():
            return Finding(message=f"`{path}` does not exist", hint=_near_file(path))
        case IsADirectoryError():
            files = [str(file) for file in sorted(Path(path).glob("*.y*ml"))]
            hint = f"did you mean `{files[0]}`?" if files else ""
            return Finding(message=f"`{path}` is a folder, but a job file is expected", hint=hint)
        case PermissionError():
            return Finding(message=f"`{path}` may not be read", hint="look at its permissions: `ls -l`")
        case _:
            return Finding(message=f"`{path}` cannot be read: {(error.strerror or str(error)).lower()}")


def _near_file(path: str) -> str:
    folder, name = Path(path).parent, Path(path).name
    if not folder.is_dir():
        return f"there is no folder `{folder}`"
    files = [file.name for file in folder.iterdir() if file.suffix in (".yaml", ".yml")]
    close = get_close_matches(name, files, n=1, cutoff=0.5)
    return f"did you mean `{folder / close[0]}`?" if close else ""
