"""What the flags of a command line mean as settings of a job, and what is said about those that mean nothing here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from raylaunch.cli.command_line import CommandLine, Form, Given, in_variable
from raylaunch.cli.flags import BY_NAME, TABLE, Group
from raylaunch.cli.marks import Finding, Place
from raylaunch.core.job import Entrypoint, Job

_TIMES = {
    "timeout": ("placement_timeout", "join_timeout"),
    "join_timeout": ("placement_timeout", "join_timeout"),
    "last_call_timeout": ("last_call",),
}
"""What the keys of `--rdzv-conf` set. Of two that set the same, the later in this table wins: it says it better."""

_VARIABLES = {
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "shutdown_timeout",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "log_line_prefix_template",
}
"""Variables of the driver's own environment that torchrun reads besides `PET_*`, which win over them."""

_SELFCHECK = {
    "name": "check",
    "show": "0",
    "max_restarts": "0",
    "entrypoint.module": "raylaunch.worker.selfcheck",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value for a key of the job, and who says so. Text is meant as it stands: `${x}` in it is no reference."""

    key: str
    value: str | list[str]
    place: Place


@dataclass(slots=True, kw_only=True)
class Meaning:
    """A command line as settings."""

    defaults: list[Setting | Given] = field(default_factory=list)
    """What the environment says; a job file is read on top of it."""
    given: list[Setting | Given] = field(default_factory=list)
    """What the command line says, on top of the job file; `Given` is `KEY=VALUE`."""
    args: list[str] | None = None
    """The arguments of the entry point, as they are; None: as the job file says."""
    own_entrypoint: bool = False
    """The entry point is the command line's, whatever the job file says about it."""
    findings: list[Finding] = field(default_factory=list)


def meaning(line: CommandLine, variables: Mapping[str, str]) -> Meaning:
    """The settings of a command line with a script, a job file or `check`."""
    found = Meaning(args=None if line.args is None else list(line.args))
    for name, key in _VARIABLES.items():
        if text := variables.get(name):
            found.defaults.append(Setting(key=key, value=text, place=in_variable(name, text)))
    found.defaults += _settings(line.environment, found.findings)
    if line.form is Form.SCRIPT:
        _add_script(line, variables, found)
    elif line.form is Form.CHECK:
        found.own_entrypoint = True
        found.args = found.args or []
        found.given += [Setting(key=key, value=value, place=line.whole) for key, value in _SELFCHECK.items()]
    if line.form is not Form.SCRIPT:
        found.findings += _about_no_script(line)
        if pass_on := line.typed("pass-local-rank"):  # to the script of the job file
            found.given.append(Setting(key="entrypoint.pass_local_rank", value="true", place=pass_on.place))
    # `--standalone` stands for a setting that may also be given by its name, which then wins wherever it stands.
    given = sorted(line.given, key=lambda word: word is not line.typed("standalone"))
    found.given += _settings(given, found.findings)
    return found


def _add_script(line: CommandLine, variables: Mapping[str, str], found: Meaning) -> None:
    """The entry point, and what is different by default in torchrun's form: output as torchrun shows and files it."""
    script = line.script
    assert script is not None
    found.own_entrypoint = True
    found.given.append(Setting(key="show", value="raw", place=script.place))
    if any(given.flag is BY_NAME["log-dir"] and given.text for given in (*line.environment, *line.given)):
        found.given.append(Setting(key="log_layout", value="torchrun", place=script.place))
    module, no_python = line.flag("module"), line.flag("no-python")
    kind, target, args = "script", script.text, found.args or []
    pass_on = line.typed("pass-local-rank")
    python = variables.get("PYTHON_EXEC")
    if line.flag("run-path"):
        pass
    elif module and no_python:
        message = "`--no-python` and `-m` exclude each other: a module needs Python"
        found.findings.append(
            Finding(message=message, place=module.place, also=no_python.place, hint="leave one of them away")
        )
    elif no_python:
        kind = "command"
    elif python:
        args = ["-u", *(["-m"] if module else []), target, *(["--local-rank=${local_rank}"] if pass_on else []), *args]
        kind, target, pass_on = "command", python, None
        title = Job(entrypoint=Entrypoint(script=script.text)).title  # the interpreter's name would say little
        found.defaults.append(Setting(key="name", value=title, place=script.place))
    elif module:
        kind = "module"
    found.args = args
    found.given.append(Setting(key=f"entrypoint.{kind}", value=target, place=script.place))
    if pass_on:
        found.given.append(Setting(key="entrypoint.pass_local_rank", value="true", place=pass_on.place))


def _about_no_script(line: CommandLine) -> Iterator[Finding]:
    """Flags about the script where there is none."""
    of_ours = ("pass-local-rank",) if line.form is Form.CHECK else ()
    for name in ("module", "no-python", "run-path", *of_ours):
        if given := line.typed(name):
            spelled = "-m" if name == "module" else f"--{name}"
            message = f"`{spelled}` is about a script on the command line, but there is none"
            what = "the self-check is raylaunch's own" if line.form is Form.CHECK else "`entrypoint` says what runs"
            yield Finding(message=message, place=given.place, hint=what)


def _settings(words: Iterable[Given], findings: list[Finding]) -> Iterator[Setting | Given]:
    """What flags set, in their order; `KEY=VALUE` is left as it is."""
    for word in words:
        flag = word.flag
        if flag is None or flag.name == "set":
            yield word
        elif flag.name == "rdzv-conf":
            yield from _times(word, findings)
        elif flag.setting:
            value = flag.reads(word.text)
            if value is not None:
                yield Setting(key=flag.setting, value=value, place=word.place)
        elif flag.number and not _is_number(word.text, flag.number):
            kind = "a whole number" if flag.number is int else "a number"
            message, hint = f"{kind} is expected, but `{word.text}` is text", f"or leave it away: {flag.about}"
            findings.append(Finding(message=message, place=word.place, hint=hint))


def _is_number(text: str, kind: type[int | float]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _times(word: Given, findings: list[Finding]) -> Iterator[Setting]:
    """The timeouts in `--rdzv-conf`."""
    conf = _pairs(word, findings)
    for name, keys in _TIMES.items():
        text = conf.get(name)
        if text is not None and not _is_number(text, float):
            message = f"`{name}` is a number of seconds, but `{text}` is text"
            findings.append(Finding(message=message, place=word.place, hint=f"for example `{name}=600`"))
        elif text is not None:
            yield from (Setting(key=key, value=text, place=word.place) for key in keys)


def _pairs(word: Given, findings: list[Finding]) -> dict[str, str]:
    """`k=v,k=v`, also in quotes that the shell left there, as scripts that build command lines do."""
    text = word.text.strip().strip("'\"")
    conf = {}
    for part in text.split(",") if text else []:
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name and value:
            conf[name] = value
            continue
        message = f"`{name}` is given no value" if name else f"`{part}` has no name"
        close = get_close_matches(name, _TIMES, n=1, cutoff=0.6)
        hint = f"for example `{close[0] if close else 'join_timeout'}=600`, with a comma between two of them"
        findings.append(Finding(message=message, place=word.place, hint=hint))
    return conf


def without_effect(line: CommandLine) -> str:
    """One line on the flags of this command line that mean nothing here, and on what is done instead; or `""`."""
    instead: dict[str, list[str]] = {}
    for word in line.given:
        flag = word.flag
        if flag in TABLE[Group.ACCEPTED] and flag.spelled not in instead.setdefault(flag.about, []):
            instead[flag.about].append(flag.spelled)
    parts = [f"{', '.join(flags)}: {what}" for what, flags in instead.items()]
    conf = line.typed("rdzv-conf")
    idle = [name for name in _pairs(conf, []) if name not in _TIMES] if conf else []
    if idle:
        parts.append(f"--rdzv-conf {', '.join(idle)}: there is nothing here that it would tune")
    return "; ".join(parts)
