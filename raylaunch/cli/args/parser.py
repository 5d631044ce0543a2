"""Parse the command line and the `PET_*` variables into `CommandLine`: every given value with its span.

argparse and click each break one of these rules, so the parser is raylaunch's own: everything after the script belongs
to the script (argparse takes `train.py --r 3` for an ambiguous flag of its own), a prefix of a flag stands for it (not
in click), dashes and underscores are the same (two flags to argparse, which makes `--nproc` ambiguous), and an error
marks the argument that is wrong.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum

from raylaunch.cli.args import subcommands, suggestions
from raylaunch.cli.args.diagnostics import COMMAND_LINE, Finding, SourceSpan, render
from raylaunch.cli.args.flags import BY_NAME, BY_SHORT, FLAGS, Flag, matching_flags
from raylaunch.core.job import secrets
from raylaunch.errors import ConfigError

JOB_FILE_SUFFIXES = (".yaml", ".yml", ".json")
_NO_SCRIPT_SUFFIXES = (".json", ".toml")
"""The ends of names that cannot be scripts. Python runs most JSON as an expression, which does nothing."""
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")


class Mode(Enum):
    """What a command line asks for. The value is the subcommand, where there is one."""

    NOTHING = "nothing"
    SCRIPT = "script"
    JOB_FILE = "job file"
    CHECK = "check"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenValue:
    """A flag, or a `KEY=VALUE` argument (`flag` is None), as it was given."""

    flag: Flag | None
    text: str
    """The flag's value, "" for a switch; or the whole argument `KEY=VALUE`."""
    span: SourceSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """A parsed command line. It overrides the job file, which overrides the environment."""

    mode: Mode
    whole: SourceSpan
    """The span of the job file, or of the whole command line."""
    script: GivenValue | None = None
    """In `Mode.SCRIPT`: the script, module or program, which is the first positional argument."""
    job_file: str | None = None
    """The path of the job file."""
    args: tuple[str, ...] | None = None
    """The script's arguments, unchanged; None: those in the job file."""
    given: tuple[GivenValue, ...] = ()
    """Flags and `KEY=VALUE` arguments in their order."""
    environment: tuple[GivenValue, ...] = ()
    """Flags that `PET_*` variables set."""

    def value(self, name: str) -> GivenValue | None:
        """Return the flag's last value on the command line, else the one in the environment."""
        found = [given for given in (*self.environment, *self.given) if given.flag is BY_NAME[name]]
        return found[-1] if found else None

    def typed(self, name: str) -> GivenValue | None:
        """Return the flag's last value on the command line alone."""
        found = [given for given in self.given if given.flag is BY_NAME[name]]
        return found[-1] if found else None


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> CommandLine:
    """Parse a command line without the program's own name.

    With `--help`, `--version` or `--print-completion`, neither mistakes nor the environment matter. Otherwise raises
    ConfigError, which marks each wrong flag and `PET_*` variable.
    """
    parser = _Parser(argv)
    parser.run()
    line = parser.result()
    if any(map(line.typed, ("help", "version", "print-completion"))):
        return line
    found, mistakes = _parse_environment(environ)
    if mistakes or parser.mistakes:
        raise ConfigError(render([*mistakes, *parser.findings()]))
    return parser.result(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """A `GivenValue` without its span, which is known only when the whole command line is parsed."""

    flag: Flag | None
    text: str
    index: int
    """The index in `argv` of the argument that holds the value."""


class _Parser:
    """Reads the arguments once. Spans are made at the end, when it is known where the script's arguments begin."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = list(argv)
        self.position = 0
        self.mode = Mode.NOTHING
        self.job_file: str | None = None
        self.script: int | None = None
        self.args: tuple[str, ...] | None = None
        self.found: list[_Given] = []
        self.mistakes: list[tuple[str, str, int]] = []
        """Message, hint and index in `argv` of each mistake."""

    def run(self) -> None:
        while self.position < len(self.argv) and self.args is None and not self.mistakes:
            argument = self.argv[self.position]
            self.position += 1
            if argument == "--":
                self._double_dash()
            elif argument.startswith("--"):
                self._long_flag(argument)
            elif argument.startswith("-") and argument != "-":
                self._short_flags(argument)
            else:
                self._positional(argument)
        self._check_json()

    def _double_dash(self) -> None:
        """Take what follows `--`: the arguments of a job file's script, or the script itself."""
        if self.mode is Mode.NOTHING and self.position < len(self.argv):
            self._set_script(self.position)
        elif self.mode is not Mode.NOTHING:
            self.args = tuple(self.argv[self.position :])

    def _set_script(self, index: int) -> None:
        has_entry_flag = not {BY_NAME["module"], BY_NAME["no-python"]}.isdisjoint(found.flag for found in self.found)
        if self.argv[index].endswith(_NO_SCRIPT_SUFFIXES) and not has_entry_flag:
            self.position = index + 1
            self._error(f"`{self.argv[index]}` is not a script", "a job file is YAML or JSON")
            return
        self.mode, self.script = Mode.SCRIPT, index
        self.args = tuple(self.argv[index + 1 :])

    def _positional(self, argument: str) -> None:
        flags = {found.flag for found in self.found}
        is_module = BY_NAME["module"] in flags
        has_entry_flag = is_module or BY_NAME["no-python"] in flags
        if self.job_file is not None:
            self.found.append(_Given(flag=None, text=argument, index=self.position - 1))
        elif argument.endswith(JOB_FILE_SUFFIXES) and not (is_module and argument.endswith(_NO_SCRIPT_SUFFIXES)):
            self.mode = Mode.JOB_FILE if self.mode is Mode.NOTHING else self.mode
            self.job_file = argument
        elif self.mode is Mode.CHECK:
            self._error("`check` takes no script", "give a job file or nothing")
        elif argument == Mode.CHECK.value and not has_entry_flag:
            self.mode = Mode.CHECK
        elif argument in subcommands.BY_NAME and not has_entry_flag:
            hint = (
                f"`raylaunch {argument} --help` lists its own; to run a script named `{argument}`, write `./{argument}`"
            )
            self._error(f"`{argument}` is a command, before which no flags are written", hint)
        else:
            self._set_script(self.position - 1)

    def _check_json(self) -> None:
        flags = {given.flag: given.index for given in self.found}
        if BY_NAME["json"] in flags and BY_NAME["version"] not in flags:
            self.mistakes.append(("`--json` is a flag of `--version`", "remove it", flags[BY_NAME["json"]]))

    def _long_flag(self, argument: str) -> None:
        name, equals, value = argument[2:].partition("=")
        flags = matching_flags(name)
        if not flags:
            self._unknown_flag(f"--{name}")
        elif len(flags) > 1:
            self._error(f"`--{name}` is ambiguous", "write " + " or ".join(f"`{flag.option}`" for flag in flags))
        elif flags[0].metavar:
            self._flag_with_value(flags[0], f"--{name}", value if equals else None)
        elif equals:
            self._error(f"`--{name}` takes no value", f"remove `={value}`")
        else:
            self._add(flags[0], "")

    def _short_flags(self, argument: str) -> None:
        """Take `-m`, `-r3`, `-r=3` or `-r 3`, or several in one argument: `-mr3`."""
        letters = argument[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            flag = BY_SHORT.get(letter)
            if flag is None:
                self._unknown_flag(argument)
                return
            if flag.metavar:
                self._flag_with_value(flag, f"-{letter}", letters.removeprefix("=") if letters else None)
                return
            self._add(flag, "")

    def _flag_with_value(self, flag: Flag, written: str, value: str | None) -> None:
        """Take the value from the argument itself, else from the next argument unless that looks like a flag."""
        if value is None and self.position < len(self.argv):
            following = self.argv[self.position]
            if not following.startswith("-") or following == "-" or _NEGATIVE.fullmatch(following):
                value = following
                self.position += 1
        if value is None:
            self._error(f"`{written}` needs a value", f"write `{flag.option} {flag.metavar}`")
        else:
            self._add(flag, value)

    def _add(self, flag: Flag, value: str) -> None:
        self.found.append(_Given(flag=flag, text=value, index=self.position - 1))

    def _unknown_flag(self, written: str) -> None:
        known = [flag.option for flag in FLAGS]
        option = "--" + written.lstrip("-").replace("_", "-").lower()
        close = [name for name in known if written.startswith("--") and name.startswith(option)]
        close = close or get_close_matches(option, known, n=1, cutoff=0.7)
        after = "the script" if self.job_file is None else "`--`"
        hint = f"did you mean `{close[0]}`?" if close else f"arguments for the script go after {after}; see `--help`"
        hint = suggestions.for_flag(written) or hint
        self._error(f"`{written}` is not a flag", hint)

    def _error(self, message: str, hint: str) -> None:
        self.mistakes.append((message, hint, self.position - 1))

    def findings(self) -> Iterator[Finding]:
        for message, hint, index in self.mistakes:
            yield Finding(message=message, span=self._span(index), hint=hint)

    def _span(self, index: int) -> SourceSpan:
        """Return the span of an argument, quoted for a shell. The script's own arguments are shown as `...`."""
        ours = self.argv if self.args is None else self.argv[: len(self.argv) - len(self.args)]
        shown = [shlex.quote(secrets.cut(argument)) for argument in ("raylaunch", *secrets.shown_arguments(ours))]
        text = " ".join(shown) + " ..." * bool(self.args)
        column = len(" ".join(shown[: index + 1])) + 1
        return SourceSpan(source=COMMAND_LINE, text=text, column=column, width=len(shown[index + 1]))

    def result(self, environment: tuple[GivenValue, ...] = ()) -> CommandLine:
        given = [GivenValue(flag=one.flag, text=one.text, span=self._span(one.index)) for one in self.found]
        script = None
        if self.script is not None:
            script = GivenValue(flag=None, text=self.argv[self.script], span=self._span(self.script))
        return CommandLine(
            mode=self.mode,
            whole=SourceSpan(source=self.job_file or COMMAND_LINE),
            script=script,
            job_file=self.job_file,
            args=self.args,
            given=tuple(given),
            environment=environment,
        )


def _parse_environment(environ: Mapping[str, str]) -> tuple[tuple[GivenValue, ...], list[Finding]]:
    """Return the flags that `PET_*` variables set, and the mistakes. A number other than 0 sets a switch."""
    found, mistakes = [], []
    for flag in FLAGS:
        text = environ.get(flag.env_variable)
        if not flag.pet or text is None:
            continue
        span = variable_span(flag.env_variable, text)
        if flag.metavar:
            found += [GivenValue(flag=flag, text=text, span=span)] if text else []
        elif not re.fullmatch(r"\s*[-+]?\d+\s*", text):
            message = f"`{flag.env_variable}` must be a number, but is {f'`{text}`' if text else 'empty'}"
            hint = f"1 sets `{flag.option}`, 0 does not"
            mistakes.append(Finding(message=message, span=span, hint=hint))
        elif int(text):
            found.append(GivenValue(flag=flag, text="", span=span))
    return tuple(found), mistakes


def variable_span(name: str, text: str) -> SourceSpan:
    """Return the span of an environment variable's value."""
    value = shlex.quote(text)
    return SourceSpan(source="environment", text=f"{name}={value}", column=len(name) + 1, width=len(value))
