"""Make a `Job` from a command line, a job file and the environment, or from settings in Python.

There is one error, which marks every mistake.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from numbers import Integral, Real
from operator import eq
from typing import Any

import yaml
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from raylaunch.cli.args.diagnostics import MAX_FINDINGS, Finding, Locator, SourceSpan, file_locator, render
from raylaunch.cli.args.flags import BY_NAME, TABLE, Group
from raylaunch.cli.args.parser import CommandLine, GivenValue, Mode, variable_span
from raylaunch.cli.config import schema, type_errors
from raylaunch.cli.config.job_file import (
    Yaml12Loader,
    command_findings,
    escaped,
    read_job_file,
    script_beside,
    script_findings,
)
from raylaunch.core.job import secrets
from raylaunch.core.job.job import Entrypoint, Job, NodeRule, RayOptions
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.job.validation import problems
from raylaunch.errors import ConfigError

_NULL, _STR, _MAP, _SEQ = (f"tag:yaml.org,2002:{kind}" for kind in ("null", "str", "map", "seq"))
_PLACEHOLDERS = {
    "args": "local_rank",
    "log_line_prefix_template": "local_rank|rank|role_name|hostname",
    "env": "node_address|interface:[^{}]*",
}
"""By setting: the names in `${...}` that are filled in for each worker or node, and so are not references."""
_RDZV_TIMEOUTS = {
    "timeout": ("placement_timeout", "join_timeout"),
    "join_timeout": ("placement_timeout", "join_timeout"),
    "last_call_timeout": ("last_call",),
}
"""The config keys that each key of `--rdzv-conf` sets. Of two keys for one setting, the later in this table wins."""

_TORCHRUN_VARIABLES = {
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "shutdown_timeout",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "log_line_prefix_template",
}
"""Config keys of the environment variables that torchrun reads besides `PET_*`; a `PET_*` variable overrides them."""

_CHECK_SETTINGS = {
    "name": "check",
    "show": "0",
    "max_restarts": "0",
    "entrypoint.module": "raylaunch.worker.selfcheck",
}
_EXAMPLE = "for example `entrypoint: {script: train.py}`"


def load(line: CommandLine, environ: Mapping[str, str], say: Callable[[str], None] = lambda _: None) -> Job:
    """Return the job that a command line, its job file and the environment describe. `say` takes a line for a person.

    Raises ConfigError, which names everything that is wrong.
    """
    reader = _JobReader(line.whole)
    settings = _line_settings(line, environ)
    reader.findings += settings.findings
    reader.add(settings.defaults)
    if line.job_file is not None:
        reader.add_file(read_job_file(line.job_file))
    if settings.replaces_entrypoint:
        reader.forget(("entrypoint",))
    reader.add(settings.given)
    job = reader.job(settings.args)
    script, command = ("entrypoint", "script"), ("entrypoint", "command")
    if not reader.has_mistakes_in(script, ("ray",)):
        if line.job_file is not None:
            job = _with_script_beside(job, line.job_file, reader.span(script), say)
        reader.findings += script_findings(job, reader.span(script), environ)
    if not reader.has_mistakes_in(command):
        reader.findings += command_findings(job, reader.span(command))
    if reader.findings:
        raise ConfigError(Redactor.of(job, environ).hide(render(reader.findings)))
    return job


def job_of(settings: Mapping[str, Any]) -> Job:
    """Return the job of settings given in Python, where a section is a dataclass or a dict. Raises ConfigError."""
    reader = _JobReader(SourceSpan(source="Python"))
    reader.add_node(_node((), settings), lambda _: reader.whole)
    job = reader.job(None)
    if reader.findings:
        said = []
        for finding in reader.findings:
            key = ".".join(finding.paths[0])
            said.append(finding.message if f"`{key}`" in finding.message else f"`{key}`: {finding.message}")
        raise ConfigError("; ".join(said), hint=reader.findings[0].hint)
    return job


def _with_script_beside(job: Job, name: str, span: SourceSpan, say: Callable[[str], None]) -> Job:
    """Return the job with the path of a script that its file names as if it were run in the folder of the file."""
    path = script_beside(job, name) if span.source == name else ""
    if not path:
        return job
    say(f"`{job.entrypoint.script}` is not in this folder: `{path}`, beside the job file, is run")
    return replace(job, entrypoint=replace(job.entrypoint, script=path))


@dataclass(frozen=True, slots=True)
class _Input:
    """A setting, a section or an item of a list, as it was given."""

    path: schema.Path
    node: yaml.Node
    key: SourceSpan
    value: SourceSpan

    @property
    def is_container(self) -> bool:
        """Whether it is a section or a list where one is expected; each item in it is an `_Input` of its own."""
        kind = dict if isinstance(self.node, yaml.MappingNode) else list
        return isinstance(self.node, yaml.CollectionNode) and kind is schema.container(self.path)

    @property
    def is_null(self) -> bool:
        return self.node.tag == _NULL


def _walk(node: yaml.Node, locate: Locator, path: schema.Path, key: SourceSpan) -> Iterator[_Input]:
    """Yield a node and everything in it. An empty value, or a block of several lines, is marked at its key."""
    is_block = isinstance(node, yaml.CollectionNode) and not node.flow_style
    is_empty = isinstance(node, yaml.ScalarNode) and not node.value and node.style is None
    given = _Input(path, node, key, key if is_block or is_empty else locate(node))
    yield given
    if given.is_container and isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            yield from _walk(value, locate, (*path, name.value), locate(name))
    elif given.is_container:
        for index, item in enumerate(node.value):
            yield from _walk(item, locate, (*path, str(index)), locate(item))


def _literal(value: str | list[str]) -> yaml.Node:
    """Return the node of literal text: a number if it reads as one, but never a reference or null."""
    if isinstance(value, list):
        return yaml.SequenceNode(_SEQ, [_literal(item) for item in value], flow_style=True)
    tag = Yaml12Loader("").resolve(yaml.ScalarNode, value, (True, False))  # type: ignore[no-untyped-call]
    return yaml.ScalarNode(_STR if tag == _NULL else tag, escaped(value))


def _node(path: schema.Path, value: Any) -> yaml.Node:
    """Return the node of a value from Python. Text is literal: `${x}` in it is not a reference. Raises ConfigError."""
    match value:
        case Entrypoint() | NodeRule() | RayOptions():
            return _node(path, asdict(value))
        case Mapping():
            names = {str(name): item for name, item in value.items()}
            items = [(yaml.ScalarNode(_STR, name), _node((*path, name), item)) for name, item in names.items()]
            return yaml.MappingNode(_MAP, items)
        case list() | tuple():
            return yaml.SequenceNode(_SEQ, [_node((*path, str(index)), item) for index, item in enumerate(value)])
        case None:
            return yaml.ScalarNode(_NULL, "")
        case bool() | Integral() | Real():
            plain = value if isinstance(value, bool) else int(value) if isinstance(value, Integral) else float(value)
            return yaml.representer.SafeRepresenter().represent_data(plain)
        case str() | os.PathLike():
            return yaml.ScalarNode(_STR, escaped(str(value)))
        case _:
            key, kind = ".".join(path), type(value).__name__
            shown = secrets.HIDDEN if secrets.is_secret(path[-1]) else secrets.cut(str(value))
            raise ConfigError(f"`{key}`: a plain value is expected, but `{shown}` is of type {kind}")


def _set(config: Any, given: _Input, hint: Any) -> None:
    """Set one value in the config; OmegaConf checks its type."""
    value: Any
    kind = schema.container(given.path)
    if kind and (given.is_container or given.is_null):
        if hint is NodeRule:
            schema.add_rule(config, given.path)
        if kind is dict:
            return
        value = []
    elif hint in (str, str | None) and isinstance(given.node, yaml.ScalarNode) and not given.is_null:
        value = given.node.value  # the text as written: `1.10` may be a version, and variables need `true`, not True
        for name in _PLACEHOLDERS.keys() & given.path[-2:]:
            value = re.sub(rf"(?<!\\)\$\{{(?:{_PLACEHOLDERS[name]})\}}", r"\\\g<0>", value)
    elif given.path == ("event_log_handler",) and given.is_null:
        value = "null"  # the name that torchrun gives to its default handler
    else:
        value = Yaml12Loader("").construct_object(given.node, deep=True)
        schema.check_union(hint, value)
    if schema.container(given.path[:-1]) is list:
        ListConfig([value], element_type=hint)  # arguments of a script must be text, though the schema allows any type
        schema.get(config, given.path[:-1]).append(value)
    else:
        schema.put(config, given.path, value)


def _resolve(config: Any, given: _Input, _hint: Any) -> None:
    """Read a value with its references replaced; raises if one is wrong or the value is missing."""
    if not given.is_container:
        value = schema.get(config, given.path)
        if OmegaConf.is_config(value):
            OmegaConf.to_container(value, resolve=True, throw_on_missing=True)


class _JobReader:
    """Collects the inputs from all sources and the findings about them, then makes the job."""

    def __init__(self, whole: SourceSpan) -> None:
        self.whole = whole
        self.given: dict[schema.Path, _Input] = {}
        self.findings: list[Finding] = []
        self.types = dict(schema.SETTINGS)

    def add_file(self, text: str) -> None:
        """Add the settings of a job file with this text."""
        locate = file_locator(self.whole.source, text)
        node = self._parse(text, locate, ())
        if isinstance(node, yaml.MappingNode):
            self.add_node(node, locate)
        elif node and node.tag != _NULL:
            message, _ = type_errors.wrong_type(Job, node)
            self.findings.append(Finding(message=message, span=locate(node), hint=_EXAMPLE, paths=((),)))

    def add(self, values: Sequence[_FlagSetting | GivenValue]) -> None:
        """Add settings of flags and `key=value` arguments; later ones override earlier ones."""
        for value in values:
            if isinstance(value, GivenValue):
                self._add_override(value.text, value.span, is_argument=value.flag is None)
            else:
                self._add_at(schema.path_of(value.key), _literal(value.value), value.span)

    def forget(self, path: schema.Path) -> None:
        """Drop a setting or a section, as if it had not been given."""
        for known in [known for known in self.given if known[: len(path)] == path]:
            del self.given[known]

    def _add_override(self, text: str, span: SourceSpan, *, is_argument: bool) -> None:
        """Add `a.b=value` like `{a: {b: value}}` in a job file. `is_argument`: it was given without `--set`."""
        key, equals, value = text.partition("=")
        path = schema.path_of(key)
        if not equals or not all(path):
            meant = schema.near_miss(key)
            if equals:
                message = f"`{secrets.cut(text)}` does not name a setting"
            else:
                message = f"`{key}` needs a value" if meant else f"`{key}` is not of the form `key=value`"
            hint = f"write `{meant or 'key'}=value`"
            hint += ", or put the script's arguments after `--`" * (not meant and is_argument)
            self.findings.append(Finding(message=message, span=span, hint=hint, paths=(path,)))
        elif node := self._parse(value, lambda _: span, path):
            self._add_at(path, node, span)

    def _add_at(self, path: schema.Path, node: yaml.Node, span: SourceSpan) -> None:
        for name in reversed(path):
            node = yaml.MappingNode(_MAP, [(yaml.ScalarNode(_STR, name), node)])
        self.add_node(node, lambda _: span)

    def _parse(self, text: str, locate: Locator, path: schema.Path) -> yaml.Node | None:
        """Return the node of a YAML text; None, with a finding, if its syntax is wrong."""
        try:
            return Yaml12Loader(text).get_single_node() or yaml.ScalarNode(_NULL, "")
        except yaml.YAMLError as error:
            (message, hint), mark = type_errors.wrong_syntax(error, text)
            span = locate(yaml.ScalarNode(_STR, "", mark, mark)) if mark or path else self.whole
            if span.secret or secrets.is_secret(".".join(path)):
                for quoted in re.findall("`(.+?)`", message):
                    if quoted in text:
                        message = message.replace(f"`{quoted}`", f"`{secrets.HIDDEN}`")
            self.findings.append(Finding(message=message, span=span, hint=hint, paths=(path,)))
            return None

    def add_node(self, node: yaml.Node, locate: Locator) -> None:
        """Add a node and everything in it: sections are merged, other values are replaced."""
        for given in _walk(node, locate, (), self.whole):
            old = self.given.get(given.path)
            if not (old and old.is_container and isinstance(old.node, yaml.MappingNode) and given.is_container):
                if old:
                    self.forget(given.path)
                self.given[given.path] = given

    def job(self, args: list[str] | None) -> Job:
        """Make the job of all correct inputs, with defaults for the rest, and collect what is wrong.

        `args`: the entrypoint's arguments, unchanged; None takes those that were given.
        """
        if args is not None:
            self.forget(("entrypoint", "args"))
        function = self.given.get(("entrypoint", "function"))
        if function is None or function.is_null:
            self.types["entrypoint", "args"] = list[str]
        config = schema.defaults()
        correct = [given for given in self.given.values() if self._accepts(_set, config, given)]
        correct = [given for given in correct if self._accepts(_resolve, config, given)]
        if self.findings:
            config = schema.defaults()
            for given in correct:
                _set(config, given, schema.type_of(given.path, self.types))
        job = schema.to_job(config)
        if args is not None:
            job = replace(job, entrypoint=replace(job.entrypoint, args=args))
        if len(self.findings) <= MAX_FINDINGS:
            self.findings += [*self._problems(job)]
        return job

    def _accepts(self, step: Callable[[Any, _Input, Any], None], config: Any, given: _Input) -> bool:
        """Apply a step to an input; False, with a finding, if the step refuses it.

        After many findings no more inputs are tried: to find the key that was meant takes time.
        """
        if len(self.findings) > MAX_FINDINGS:
            return False
        hint = schema.type_of(given.path, self.types)
        span, meant = given.value, given.path
        try:
            step(config, given, hint)
            return True
        except (ConfigAttributeError, ConfigKeyError):
            message, advice = type_errors.unknown_setting(given.path)
            span, meant = given.key, tuple(schema.near_miss(".".join(given.path)).split("."))
        except OmegaConfBaseException as error:
            message, advice = type_errors.wrong_value(error, given.path, hint, given.node)
        except yaml.YAMLError as error:
            (message, advice), _ = type_errors.wrong_syntax(error)
        except RecursionError:
            message, advice = "this is nested too deeply", ""
        except (LookupError, ValueError):
            message, advice = f"`{given.node.value}` does not fit its tag", ""
        self.findings.append(Finding(message=message, span=span, hint=advice, paths=(given.path, meant)))
        return False

    def _problems(self, job: Job) -> Iterator[Finding]:
        """Yield what is wrong with values of the right types, except what follows from an earlier finding."""
        for problem in problems(job):
            paths = [schema.path_of(key) for key in (problem.key, problem.also) if key]
            if self.has_mistakes_in(*paths):
                continue
            message, hint = problem.message, problem.hint
            if problem.key == "entrypoint":
                message, hint = message if self.given else "nothing to run: the file is empty", _EXAMPLE
            span, related = self.span(paths[0]), self.span(paths[-1]) if problem.also else None
            related = None if related is self.whole else related
            if schema.type_of(paths[0], self.types) is NodeRule:
                span = self.given[paths[0]].key  # the key is what is wrong
            yield Finding(message=message, span=span, related=related, hint=hint, paths=tuple(paths))

    def has_mistakes_in(self, *paths: schema.Path) -> bool:
        """Whether a finding concerns one of these settings, what it contains, or a section that contains it."""
        known = [path for finding in self.findings for path in finding.paths]
        return any(all(map(eq, one, other)) for one in paths for other in known)

    def span(self, path: schema.Path) -> SourceSpan:
        """Return the span of a value, or of the section that would contain it if it is not given."""
        found = [self.given[path[:size]] for size in range(len(path), 0, -1) if path[:size] in self.given]
        return found[0].value if found else self.whole


# What flags and environment variables set.


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlagSetting:
    """A value for a config key. Text is literal: `${x}` in it is not a reference."""

    key: str
    value: str | list[str]
    span: SourceSpan
    """Where the value was given."""


@dataclass(slots=True, kw_only=True)
class _LineSettings:
    """The settings of a command line and its environment."""

    defaults: list[_FlagSetting | GivenValue] = field(default_factory=list)
    """From the environment; the job file overrides them."""
    given: list[_FlagSetting | GivenValue] = field(default_factory=list)
    """From the command line; they override the job file. `GivenValue` is a `KEY=VALUE` argument or `--set`."""
    args: list[str] | None = None
    """The arguments of the entrypoint, unchanged; None: those in the job file."""
    replaces_entrypoint: bool = False
    """Whether the command line names the entrypoint, so that the job file's is ignored."""
    findings: list[Finding] = field(default_factory=list)


def _line_settings(line: CommandLine, environ: Mapping[str, str]) -> _LineSettings:
    """Return the settings of a command line with a script, a job file or `check`."""
    found = _LineSettings(args=None if line.args is None else list(line.args))
    for name, key in _TORCHRUN_VARIABLES.items():
        if text := environ.get(name):
            found.defaults.append(_FlagSetting(key=key, value=text, span=variable_span(name, text)))
    found.defaults += _settings(line.environment, found.findings)
    if line.mode is Mode.SCRIPT:
        _add_script(line, environ, found)
    elif line.mode is Mode.CHECK:
        found.replaces_entrypoint = True
        found.args = found.args or []
        found.given += [_FlagSetting(key=key, value=value, span=line.whole) for key, value in _CHECK_SETTINGS.items()]
    if line.mode is not Mode.SCRIPT:
        found.findings += _script_flag_findings(line)
        if pass_on := line.typed("pass-local-rank"):  # passed to the script of the job file
            found.given.append(_FlagSetting(key="entrypoint.pass_local_rank", value="true", span=pass_on.span))
    # `--standalone` sets ray.address, which may also be given by name; that overrides the flag wherever it stands.
    given = sorted(line.given, key=lambda one: one is not line.typed("standalone"))
    found.given += _settings(given, found.findings)
    return found


def _add_script(line: CommandLine, environ: Mapping[str, str], found: _LineSettings) -> None:
    """Add the entrypoint, and torchrun's way to show and store output, which is the default for scripts."""
    script = line.script
    assert script is not None
    found.replaces_entrypoint = True
    found.given.append(_FlagSetting(key="show", value="raw", span=script.span))
    if any(given.flag is BY_NAME["log-dir"] and given.text for given in (*line.environment, *line.given)):
        found.given.append(_FlagSetting(key="log_layout", value="torchrun", span=script.span))
    module, no_python = line.value("module"), line.value("no-python")
    kind, target, args = "script", script.text, found.args or []
    pass_on = line.typed("pass-local-rank")
    python = environ.get("PYTHON_EXEC")
    if line.value("run-path"):
        pass
    elif module and no_python:
        message = "`--no-python` and `-m` cannot be combined: a module needs Python"
        hint, concerned = "remove one of them", (("entrypoint",),)
        found.findings.append(
            Finding(message=message, span=module.span, related=no_python.span, hint=hint, paths=concerned)
        )
    elif no_python:
        kind = "command"
    elif python:
        args = ["-u", *(["-m"] if module else []), target, *(["--local-rank=${local_rank}"] if pass_on else []), *args]
        kind, target, pass_on = "command", python, None
        title = Job(
            entrypoint=Entrypoint(script=script.text)
        ).title  # else the run would be named after the interpreter
        found.defaults.append(_FlagSetting(key="name", value=title, span=script.span))
    elif module:
        kind = "module"
    found.args = args
    found.given.append(_FlagSetting(key=f"entrypoint.{kind}", value=target, span=script.span))
    if pass_on:
        found.given.append(_FlagSetting(key="entrypoint.pass_local_rank", value="true", span=pass_on.span))


def _script_flag_findings(line: CommandLine) -> Iterator[Finding]:
    """Yield a finding for each flag that needs a script on the command line."""
    more = ("pass-local-rank",) if line.mode is Mode.CHECK else ()
    for name in ("module", "no-python", "run-path", *more):
        if given := line.typed(name):
            option = "-m" if name == "module" else f"--{name}"
            message = f"`{option}` needs a script on the command line"
            what = "`check` runs raylaunch's own program" if line.mode is Mode.CHECK else "`entrypoint` names what runs"
            yield Finding(message=message, span=given.span, hint=what)


def _settings(values: Iterable[GivenValue], findings: list[Finding]) -> Iterator[_FlagSetting | GivenValue]:
    """Yield what each flag sets, in order; `KEY=VALUE` is passed through."""
    for given in values:
        flag = given.flag
        if flag is None or flag.name == "set":
            yield given
        elif flag.name == "rdzv-conf":
            yield from _rdzv_timeouts(given, findings)
        elif flag.setting == "env":
            name, equals, text = given.text.partition("=")
            if name and equals:
                yield _FlagSetting(key=f"env.{name}", value=text, span=given.span)
            else:
                message = f"`{secrets.cut(given.text)}` is not of the form `NAME=VALUE`"
                hint = "workers get the variables of this shell anyway; `--env NAME=VALUE` sets one for them"
                findings.append(Finding(message=message, span=given.span, hint=hint))
        elif flag.setting:
            value = flag.convert(given.text)
            if value is not None:
                yield _FlagSetting(key=flag.setting, value=value, span=given.span)
        elif flag.number_type and not _is_number(given.text, flag.number_type):
            kind = "a whole number" if flag.number_type is int else "a number"
            message, hint = f"{kind} is expected, but `{given.text}` is text", f"or remove it: {flag.help}"
            findings.append(Finding(message=message, span=given.span, hint=hint))


def _is_number(text: str, kind: type[int | float]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _rdzv_timeouts(given: GivenValue, findings: list[Finding]) -> Iterator[_FlagSetting]:
    """Yield the settings of `--rdzv-conf`."""
    conf = _rdzv_conf(given, findings)
    for name, keys in _RDZV_TIMEOUTS.items():
        text = conf.get(name)
        if text is not None and not _is_number(text, float):
            message = f"`{name}` is a number of seconds, but `{text}` is text"
            findings.append(Finding(message=message, span=given.span, hint=f"for example `{name}=600`"))
        elif text is not None:
            yield from (_FlagSetting(key=key, value=text, span=given.span) for key in keys)


def _rdzv_conf(given: GivenValue, findings: list[Finding]) -> dict[str, str]:
    """Parse `k=v,k=v`. Quotes around it are ignored: scripts that build command lines leave them there."""
    text = given.text.strip().strip("'\"")
    conf = {}
    for part in text.split(",") if text else []:
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name and value:
            conf[name] = value
            continue
        message = f"`{name}` needs a value" if name else f"`{part}` has no name"
        close = get_close_matches(name, _RDZV_TIMEOUTS, n=1, cutoff=0.6)
        hint = f"for example `{close[0] if close else 'join_timeout'}=600`; separate several with commas"
        findings.append(Finding(message=message, span=given.span, hint=hint))
    return conf


def ineffective_flags(line: CommandLine) -> str:
    """Return one line that names the flags without effect and what raylaunch does instead; "" if there are none."""
    instead: dict[str, list[str]] = {}
    for given in line.given:
        flag = given.flag
        if flag in TABLE[Group.ACCEPTED] and flag.option not in instead.setdefault(flag.help, []):
            instead[flag.help].append(flag.option)
    parts = [f"{', '.join(options)} ({what})" for what, options in instead.items()]
    conf = line.typed("rdzv-conf")
    unused = [name for name in _rdzv_conf(conf, []) if name not in _RDZV_TIMEOUTS] if conf else []
    if unused:
        parts.append(f"--rdzv-conf {', '.join(unused)} (raylaunch has no such setting)")
    return f"without effect: {'; '.join(parts)}" if parts else ""


def settings_for_script(line: CommandLine) -> str:
    """Return one line that names arguments of the script that read like settings of a job; "" if there are none.

    They go to the script all the same, as with torchrun: it may have a setting of the same name.
    """
    if line.mode is not Mode.SCRIPT:
        return ""
    words = [word.partition("=") for word in line.args or ()]
    keys = dict.fromkeys(key for key, equals, _ in words if equals and schema.path_of(key) in schema.SETTINGS)
    if not keys:
        return ""
    named = ", ".join(f"`{key}=...`" for key in keys)
    what = "is an argument" if len(keys) == 1 else "are arguments"
    return f"{named} {what} of the script; a setting of the job is given before it: `--set {next(iter(keys))}=...`"
