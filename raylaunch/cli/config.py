"""From a command line and a job file to a `Job`, or to one text that points at every mistake."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from operator import eq
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, OmegaConfBaseException

from raylaunch.cli import explain, schema
from raylaunch.cli.command_line import CommandLine, Given
from raylaunch.cli.dialect import Loader, escaped
from raylaunch.cli.marks import Finding, Locate, Place, in_file, render
from raylaunch.cli.script import script_findings
from raylaunch.cli.torchrun import Setting, meaning
from raylaunch.core import secrets
from raylaunch.core.job import Entrypoint, Job, NodeRule, RayOptions
from raylaunch.core.problems import problems
from raylaunch.core.redaction import Secrets
from raylaunch.errors import ConfigError

_NULL, _STR, _MAP, _SEQ = (f"tag:yaml.org,2002:{kind}" for kind in ("null", "str", "map", "seq"))
_MACROS = {
    "args": "local_rank",
    "log_line_prefix_template": "local_rank|rank|role_name",
    "env": "node_address|interface:[^{}]*",
}
"""What is filled in for each worker or node: by setting, the names that are no references to other settings there."""
_EXAMPLE = "for example `entrypoint: {script: train.py}`"


def load(line: CommandLine, variables: Mapping[str, str]) -> Job:
    """The job of a command line, of the job file on it and of the environment's variables.

    Raises ConfigError with everything that is wrong.
    """
    reading = _Reading(line.whole)
    meant = meaning(line, variables)
    reading.findings += meant.findings
    reading.take(meant.defaults)
    if line.file is not None:
        reading.file(_text(line.file))
    if meant.own_entrypoint:
        reading.forget(("entrypoint",))
    reading.take(meant.given)
    job = reading.job(meant.args)
    if not reading.findings:
        reading.findings += script_findings(job, reading.place(("entrypoint", "script")), variables)
    if reading.findings:
        raise ConfigError(Secrets.of(job, variables).hide(render(reading.findings)))
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
        return schema.key_of(self.path)


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


def _literal(value: str | list[str]) -> yaml.Node:
    """Text as it stands: no reference, not nothing; a number where it reads as one."""
    if isinstance(value, list):
        return yaml.SequenceNode(_SEQ, [_literal(item) for item in value], flow_style=True)
    tag = Loader("").resolve(yaml.ScalarNode, value, (True, False))  # type: ignore[no-untyped-call]
    return yaml.ScalarNode(_STR if tag == _NULL else tag, escaped(value))


def _set(config: Any, given: _Given, hint: Any) -> None:
    """Hands one value to OmegaConf, which knows its type."""
    value: Any
    kind = explain.container(given.path)
    if kind and (given.opens or given.is_null):
        if hint is NodeRule:
            schema.open_rule(config, given.config_key)
        if kind is dict:
            return
        value = []
    elif hint in (str, str | None) and isinstance(given.node, yaml.ScalarNode) and not given.is_null:
        value = given.node.value  # as it is written: `1.10` is a version, and an environment wants `true`
        for name in _MACROS.keys() & given.path[-2:]:
            value = re.sub(rf"(?<!\\)\$\{{(?:{_MACROS[name]})\}}", r"\\\g<0>", value)
    elif given.path == ("event_log_handler",) and given.is_null:
        value = "null"  # which is torchrun's word for no handler
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
    config = schema.defaults()
    for path, value in _leaves((), settings):
        try:
            _update(config, path, value)
        except ConfigAttributeError:
            message, hint = explain.unknown(path)
            raise ConfigError(message, hint=hint) from None
        except OmegaConfBaseException as error:
            message, hint = explain.refused(error, path, explain.type_of(path, explain.SETTINGS), _shown(path, value))
            raise ConfigError(f"`{'.'.join(path)}`: {message}", hint=hint) from None
    job = OmegaConf.to_object(config)
    assert isinstance(job, Job)
    found = problems(job)
    if found:
        raise ConfigError("; ".join(f"`{problem.key}`: {problem.message}" for problem in found), hint=found[0].hint)
    return job


def _leaves(path: explain.Path, value: Any) -> Iterator[tuple[explain.Path, Any]]:
    """The settings in a section. A rule for a node is itself one, since there is none until it is set."""
    hint = explain.type_of(path, explain.SETTINGS)
    inside = asdict(value) if isinstance(value, Entrypoint | NodeRule | RayOptions) else value
    if isinstance(inside, Mapping) and explain.container(path) is dict:
        if hint is NodeRule:
            yield path, NodeRule()
        for name, item in inside.items():
            yield from _leaves((*path, str(name)), item)
    else:
        yield path, inside


def _shown(path: explain.Path, value: Any) -> yaml.Node:
    """A value from Python as one that was written, for a text about it."""
    if isinstance(value, Mapping):
        return yaml.MappingNode(_MAP, [])
    if isinstance(value, list | tuple) and explain.container(path) is not list:
        return yaml.SequenceNode(_SEQ, [])
    if value is None:
        return yaml.ScalarNode(_NULL, "")
    return yaml.ScalarNode(_STR, secrets.HIDDEN if secrets.is_secret(path[-1]) else str(value))


def _update(config: Any, path: explain.Path, value: Any) -> None:
    """Sets a value from Python, where text is what it is: `${x}` in it is no reference."""
    if isinstance(value, NodeRule):
        schema.open_rule(config, schema.key_of(path))
    else:
        OmegaConf.update(config, schema.key_of(path), escaped(value), merge=isinstance(value, Mapping))


class _Reading:
    """Collects what is given, and what is wrong with it."""

    def __init__(self, whole: Place) -> None:
        self.whole = whole
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

    def take(self, words: Sequence[Setting | Given]) -> None:
        """Flags, and `key=value` among them; what comes later wins."""
        for word in words:
            if isinstance(word, Given):
                self._override(word.text, word.place, bare=word.flag is None)
            else:
                self._add_below(tuple(word.key.split(".")), _literal(word.value), word.place)

    def forget(self, path: explain.Path) -> None:
        """As if nothing had been said about a setting or a section."""
        for known in [known for known in self.given if known[: len(path)] == path]:
            del self.given[known]

    def _override(self, text: str, place: Place, *, bare: bool) -> None:
        """Takes `a.b=value` as the file takes `{a: {b: value}}`. `bare`: it stands without `--set`."""
        key, equals, value = text.partition("=")
        path = explain.path_of(key)
        if not equals or not all(path):
            message = f"`{secrets.cut(text)}` names no setting" if equals else f"`{key}` is given no value"
            meant = explain.near_miss(key)
            hint = f"write `{meant or 'key'}=value`" + ", or words for the script after `--`" * (not meant and bare)
            self.findings.append(Finding(message=message, place=place, hint=hint, paths=(path,)))
        elif node := self._composed(value, lambda _: place, path):
            self._add_below(path, node, place)

    def _add_below(self, path: explain.Path, node: yaml.Node, place: Place) -> None:
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
            if place.secret or secrets.is_secret(".".join(path)):
                quoted = (word for word in re.findall("`(.+?)`", message) if word in text)
                for word in quoted:
                    message = message.replace(f"`{word}`", f"`{secrets.HIDDEN}`")
            self.findings.append(Finding(message=message, place=place, hint=hint, paths=(path,)))
            return None

    def _add(self, node: yaml.Node, locate: Locate) -> None:
        """Sections are merged, the rest is replaced."""
        for given in _walk(node, locate, (), self.whole):
            old = self.given.get(given.path)
            if not (old and old.opens and isinstance(old.node, yaml.MappingNode) and given.opens):
                self.forget(given.path)
                self.given[given.path] = given

    def job(self, args: list[str] | None) -> Job:
        """What is right of all this, and defaults for the rest. `args` stand in for the entry point's, as they are."""
        if args is not None:
            self.forget(("entrypoint", "args"))
        function = self.given.get(("entrypoint", "function"))
        if function is None or function.is_null:
            self.types["entrypoint", "args"] = list[str]
        config = schema.defaults()
        taken = [given for given in self.given.values() if self._accepts(_set, config, given)]
        right = [given for given in taken if self._accepts(_resolve, config, given)]
        if self.findings:
            config = schema.defaults()
            for given in right:
                _set(config, given, explain.type_of(given.path, self.types))
        job = OmegaConf.to_object(config)
        assert isinstance(job, Job)
        if args is not None:
            job = replace(job, entrypoint=replace(job.entrypoint, args=args))
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
            paths = [explain.path_of(key) for key in (problem.key, problem.also) if key]
            if any(all(map(eq, one, other)) for one in paths for other in known):
                continue  # one is the other, or a section around it
            message, hint = problem.message, problem.hint
            if problem.key == "entrypoint":
                message, hint = message if self.given else "nothing to run: the file is empty", _EXAMPLE
            place, also = self.place(paths[0]), self.place(paths[-1]) if problem.also else None
            also = None if also is self.whole else also
            if explain.type_of(paths[0], self.types) is NodeRule:
                place = self.given[paths[0]].key  # it is the key that is wrong
            yield Finding(message=message, place=place, also=also, hint=hint)

    def place(self, path: explain.Path) -> Place:
        """Of a value; of the section it would be in where it is not given."""
        found = [self.given[path[:size]] for size in range(len(path), 0, -1) if path[:size] in self.given]
        return found[0].value if found else self.whole


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
