"""From a job file and `key=value` overrides to a `Job`, or to one text that points at every mistake."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from operator import eq
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, OmegaConfBaseException

from raylaunch.cli import explain
from raylaunch.cli.dialect import Loader
from raylaunch.cli.marks import Finding, Locate, Place, in_file, on_command_line, render
from raylaunch.core.job import Job, problems
from raylaunch.errors import ConfigError

_NULL, _STR, _MAP = (f"tag:yaml.org,2002:{kind}" for kind in ("null", "str", "map"))
_EXAMPLE = "for example `entrypoint: {script: train.py}`"


def load(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Job:
    """The job of a file with overrides merged in; raises ConfigError with everything that is wrong."""
    title = os.fspath(path)
    reading = _Reading(title)
    reading.file(_text(title))
    for override, place in zip(overrides, on_command_line(title, overrides), strict=True):
        reading.override(override, place)
    job = reading.job()
    if reading.findings:
        raise ConfigError(render(reading.findings))
    return job


@dataclass(frozen=True, slots=True)
class _Given:
    """A setting, a section or an item of a list, as somebody wrote it."""

    path: explain.Path
    node: yaml.Node
    key: Place
    value: Place

    @property
    def opens(self) -> bool:
        """Whether it is a section or a list, whose insides are given one by one."""
        kind = dict if isinstance(self.node, yaml.MappingNode) else list
        return isinstance(self.node, yaml.CollectionNode) and kind is explain.container(self.path)

    @property
    def is_null(self) -> bool:
        return self.node.tag == _NULL

    @property
    def config_key(self) -> str:
        """The path as OmegaConf spells it."""
        return ".".join(re.sub(r"([].=[])", r"\\\1", name) for name in self.path)


def _walk(node: yaml.Node, locate: Locate, path: explain.Path, key: Place) -> Iterator[_Given]:
    """All that a node gives. A block, and what is left empty, is shown at its key."""
    is_block = isinstance(node, yaml.CollectionNode) and not node.flow_style
    is_empty = isinstance(node, yaml.ScalarNode) and not node.value and node.style is None
    given = _Given(path, node, key, key if is_block or is_empty else locate(node))
    yield given
    if given.opens and isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _walk(value, locate, (*path, name.value), locate(name))
    elif given.opens:
        for index, item in enumerate(node.value):
            yield from _walk(item, locate, (*path, str(index)), locate(item))


def _schema() -> Any:
    config = OmegaConf.structured(Job)
    for section in (config, config.entrypoint, config.ray):
        OmegaConf.set_readonly(section, False)  # which it is since the dataclasses are frozen
    return config


def _set(config: Any, given: _Given, hint: Any) -> None:
    """Hands one value to OmegaConf, which knows its type."""
    value: Any
    kind = explain.container(given.path)
    if kind and (given.opens or given.is_null):
        if kind is dict:
            return
        value = []
    elif hint in (str, str | None) and isinstance(given.node, yaml.ScalarNode) and not given.is_null:
        value = given.node.value  # as it is written: `1.10` is a version, and an environment wants `true`
    else:
        value = Loader("").construct_object(given.node, deep=True)
    if explain.container(given.path[:-1]) is list:
        OmegaConf.typed_list([value], hint)  # a script's arguments are text, though the schema takes any
        OmegaConf.select(config, given.config_key.rpartition(".")[0]).append(value)
    else:
        OmegaConf.update(config, given.config_key, value, merge=False)


def _resolve(config: Any, given: _Given, _hint: Any) -> None:
    """Looks at a value as it will be: not missing, its references replaced."""
    if not given.opens:
        value = OmegaConf.select(config, given.config_key, throw_on_missing=True)
        if OmegaConf.is_config(value):
            OmegaConf.to_container(value, resolve=True, throw_on_missing=True)


def from_python(settings: Mapping[str, Any]) -> Job:
    """The job of settings given in Python; a section may be a dataclass or a dict. Raises ConfigError."""
    config = _schema()
    for key, value in settings.items():
        try:
            OmegaConf.update(config, key, value, merge=isinstance(value, Mapping))
        except ConfigAttributeError:
            message, hint = explain.unknown((key,))
            raise ConfigError(message, hint=hint) from None
        except OmegaConfBaseException as error:
            written = yaml.ScalarNode(_STR, str(value))
            message, hint = explain.refused(error, (key,), explain.type_of((key,), explain.SETTINGS), written)
            raise ConfigError(f"`{key}`: {message}", hint=hint) from None
    job = OmegaConf.to_object(config)
    assert isinstance(job, Job)
    found = problems(job)
    if found:
        raise ConfigError("; ".join(f"`{problem.key}`: {problem.message}" for problem in found), hint=found[0].hint)
    return job


class _Reading:
    """Collects what is given, and what is wrong with it."""

    def __init__(self, title: str) -> None:
        self.whole = Place(source=title)
        self.given: dict[explain.Path, _Given] = {}
        self.findings: list[Finding] = []
        self.types = dict(explain.SETTINGS)

    def file(self, text: str) -> None:
        locate = in_file(self.whole.source, text)
        node = self._composed(text, locate, ())
        if isinstance(node, yaml.MappingNode):
            self._add(node, locate)
        elif node and node.tag != _NULL:
            message, _ = explain.misfit(Job, node)
            self.findings.append(Finding(message=message, place=locate(node), hint=_EXAMPLE, paths=((),)))

    def override(self, text: str, place: Place) -> None:
        """Takes `a.b=value` as the file takes `{a: {b: value}}`."""
        key, equals, value = text.partition("=")
        path = tuple(key.split("."))
        if not equals or not all(path):
            message = f"`{text}` names no setting" if equals else f"`{key}` is given no value"
            hint = f"write `{explain.near_miss(key) or 'key'}=value`"
            self.findings.append(Finding(message=message, place=place, hint=hint, paths=(path,)))
        elif node := self._composed(value, lambda _: place, path):
            for name in reversed(path):
                node = yaml.MappingNode(_MAP, [(yaml.ScalarNode(_STR, name), node)])
            self._add(node, lambda _: place)

    def _composed(self, text: str, locate: Locate, path: explain.Path) -> yaml.Node | None:
        """The nodes of a text; None if there is an error in it."""
        try:
            return Loader(text).get_single_node() or yaml.ScalarNode(_NULL, "")
        except yaml.YAMLError as error:
            (message, hint), mark = explain.unreadable(error)
            place = locate(yaml.ScalarNode(_STR, "", mark, mark)) if mark or path else self.whole
            self.findings.append(Finding(message=message, place=place, hint=hint, paths=(path,)))
            return None

    def _add(self, node: yaml.Node, locate: Locate) -> None:
        """Sections are merged, the rest is replaced."""
        for given in _walk(node, locate, (), self.whole):
            old = self.given.get(given.path)
            if not (old and old.opens and isinstance(old.node, yaml.MappingNode) and given.opens):
                below = [path for path in self.given if path[: len(given.path)] == given.path]
                for path in below:
                    del self.given[path]
                self.given[given.path] = given

    def job(self) -> Job:
        """What is right of all this, and defaults for the rest."""
        function = self.given.get(("entrypoint", "function"))
        if function is None or function.is_null:
            self.types["entrypoint", "args"] = list[str]
        config = _schema()
        taken = [given for given in self.given.values() if self._accepts(_set, config, given)]
        right = [given for given in taken if self._accepts(_resolve, config, given)]
        if self.findings:
            config = _schema()
            for given in right:
                _set(config, given, explain.type_of(given.path, self.types))
        job = OmegaConf.to_object(config)
        assert isinstance(job, Job)
        self.findings += self._problems(job)
        return job

    def _accepts(self, step: Callable[[Any, _Given, Any], None], config: Any, given: _Given) -> bool:
        hint = explain.type_of(given.path, self.types)
        place, meant = given.value, given.path
        try:
            step(config, given, hint)
            return True
        except ConfigAttributeError:
            message, advice = explain.unknown(given.path)
            place, meant = given.key, tuple(explain.near_miss(".".join(given.path)).split("."))
        except OmegaConfBaseException as error:
            message, advice = explain.refused(error, given.path, hint, given.node)
        except yaml.YAMLError as error:
            (message, advice), _ = explain.unreadable(error)
        except (KeyError, ValueError):
            message, advice = f"`{given.node.value}` does not fit its tag", ""
        self.findings.append(Finding(message=message, place=place, hint=advice, paths=(given.path, meant)))
        return False

    def _problems(self, job: Job) -> Iterator[Finding]:
        """What is wrong with values of the right types, unless it follows from something found before."""
        known = [path for finding in self.findings for path in finding.paths]
        for problem in problems(job):
            paths = [tuple(key.split(".", 1)) for key in (problem.key, problem.also) if key]
            if any(all(map(eq, one, other)) for one in paths for other in known):
                continue  # one is the other, or a section around it
            message, hint = problem.message, problem.hint
            if problem.key == "entrypoint":
                message, hint = message if self.given else "nothing to run: the file is empty", _EXAMPLE
            place, also = self._place(paths[0]), self._place(paths[1]) if problem.also else None
            yield Finding(message=message, place=place, also=also, hint=hint)

    def _place(self, path: explain.Path) -> Place:
        """Of a value; of the section it would be in where it is not given."""
        given = self.given.get(path) or self.given.get(path[:-1])
        return given.value if given else self.whole


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        message, hint = f"`{path}` does not exist", _near_file(Path(path))
    except UnicodeDecodeError:
        message, hint = f"`{path}` is not UTF-8", ""
    except OSError as error:
        message, hint = f"`{path}` cannot be read: {str(error.strerror or error).lower()}", ""
    raise ConfigError(f"error: {message}" + f"\n  = {hint}" * bool(hint))


def _near_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no folder `{path.parent}`"
    files = [file.name for file in path.parent.glob("*.y*ml")]
    close = get_close_matches(path.name, files, n=1, cutoff=0.5)
    return explain.did_you_mean(str(path.parent / close[0]) if close else "")
