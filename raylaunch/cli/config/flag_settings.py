"""Translate flags and environment variables into settings of a job, and name the flags that have no effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from raylaunch.cli.args.diagnostics import Finding, SourceSpan
from raylaunch.cli.args.flags import BY_NAME, TABLE, Group
from raylaunch.cli.args.parser import CommandLine, GivenValue, Mode, variable_span
from raylaunch.cli.config import schema
from raylaunch.core.job import secrets
from raylaunch.core.job.job import Entrypoint, Job

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSetting:
    """A value for a config key. Text is literal: `${x}` in it is not a reference."""

    key: str
    value: str | list[str]
    span: SourceSpan
    """Where the value was given."""


@dataclass(slots=True, kw_only=True)
class LineSettings:
    """The settings of a command line and its environment."""

    defaults: list[FlagSetting | GivenValue] = field(default_factory=list)
    """From the environment; the job file overrides them."""
    given: list[FlagSetting | GivenValue] = field(default_factory=list)
    """From the command line; they override the job file. `GivenValue` is a `KEY=VALUE` argument or `--set`."""
    args: list[str] | None = None
    """The arguments of the entrypoint, unchanged; None: those in the job file."""
    replaces_entrypoint: bool = False
    """Whether the command line names the entrypoint, so that the job file's is ignored."""
    findings: list[Finding] = field(default_factory=list)


def line_settings(line: CommandLine, environ: Mapping[str, str]) -> LineSettings:
    """Return the settings of a command line with a script, a job file or `check`."""
    found = LineSettings(args=None if line.args is None else list(line.args))
    for name, key in _TORCHRUN_VARIABLES.items():
        if text := environ.get(name):
            found.defaults.append(FlagSetting(key=key, value=text, span=variable_span(name, text)))
    found.defaults += _settings(line.environment, found.findings)
    if line.mode is Mode.SCRIPT:
        _add_script(line, environ, found)
    elif line.mode is Mode.CHECK:
        found.replaces_entrypoint = True
        found.args = found.args or []
        found.given += [FlagSetting(key=key, value=value, span=line.whole) for key, value in _CHECK_SETTINGS.items()]
    if line.mode is not Mode.SCRIPT:
        found.findings += _script_flag_findings(line)
        if pass_on := line.typed("pass-local-rank"):  # passed to the script of the job file
            found.given.append(FlagSetting(key="entrypoint.pass_local_rank", value="true", span=pass_on.span))
    # `--standalone` sets ray.address, which may also be given by name; that overrides the flag wherever it stands.
    given = sorted(line.given, key=lambda one: one is not line.typed("standalone"))
    found.given += _settings(given, found.findings)
    return found


def _add_script(line: CommandLine, environ: Mapping[str, str], found: LineSettings) -> None:
    """Add the entrypoint, and torchrun's way to show and store output, which is the default for scripts."""
    script = line.script
    assert script is not None
    found.replaces_entrypoint = True
    found.given.append(FlagSetting(key="show", value="raw", span=script.span))
    if any(given.flag is BY_NAME["log-dir"] and given.text for given in (*line.environment, *line.given)):
        found.given.append(FlagSetting(key="log_layout", value="torchrun", span=script.span))
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
        found.defaults.append(FlagSetting(key="name", value=title, span=script.span))
    elif module:
        kind = "module"
    found.args = args
    found.given.append(FlagSetting(key=f"entrypoint.{kind}", value=target, span=script.span))
    if pass_on:
        found.given.append(FlagSetting(key="entrypoint.pass_local_rank", value="true", span=pass_on.span))


def _script_flag_findings(line: CommandLine) -> Iterator[Finding]:
    """Yield a finding for each flag that needs a script on the command line."""
    more = ("pass-local-rank",) if line.mode is Mode.CHECK else ()
    for name in ("module", "no-python", "run-path", *more):
        if given := line.typed(name):
            option = "-m" if name == "module" else f"--{name}"
            message = f"`{option}` needs a script on the command line"
            what = "`check` runs raylaunch's own program" if line.mode is Mode.CHECK else "`entrypoint` names what runs"
            yield Finding(message=message, span=given.span, hint=what)


def _settings(values: Iterable[GivenValue], findings: list[Finding]) -> Iterator[FlagSetting | GivenValue]:
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
                yield FlagSetting(key=f"env.{name}", value=text, span=given.span)
            else:
                message = f"`{secrets.cut(given.text)}` is not of the form `NAME=VALUE`"
                hint = "workers get the variables of this shell anyway; `--env NAME=VALUE` sets one for them"
                findings.append(Finding(message=message, span=given.span, hint=hint))
        elif flag.setting:
            value = flag.convert(given.text)
            if value is not None:
                yield FlagSetting(key=flag.setting, value=value, span=given.span)
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


def _rdzv_timeouts(given: GivenValue, findings: list[Finding]) -> Iterator[FlagSetting]:
    """Yield the settings of `--rdzv-conf`."""
    conf = _rdzv_conf(given, findings)
    for name, keys in _RDZV_TIMEOUTS.items():
        text = conf.get(name)
        if text is not None and not _is_number(text, float):
            message = f"`{name}` is a number of seconds, but `{text}` is text"
            findings.append(Finding(message=message, span=given.span, hint=f"for example `{name}=600`"))
        elif text is not None:
            yield from (FlagSetting(key=key, value=text, span=given.span) for key in keys)


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
