"""From the words of the command line and the environment to what was given, each with its place.

The parser is ours since argparse and click each break one of the rules: what follows the script belongs to the script
(argparse takes `train.py --r 3` for an ambiguous flag of its own), beginnings of flags stand for them (not in click),
dashes and underscores are one flag (argparse: two, so that `--nproc` is ambiguous), and mistakes can point at words.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum

from raylaunch.cli.flags import BY_LETTER, BY_NAME, FLAGS, Flag, meant_by
from raylaunch.cli.marks import COMMAND_LINE, Finding, Place, render
from raylaunch.core import secrets
from raylaunch.errors import ConfigError

_JOB_FILES = (".yaml", ".yml")
_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")


class Form(Enum):
    """What the command line as a whole is."""

    NOTHING = "nothing"
    SCRIPT = "script"
    FILE = "job file"
    CHECK = "check"
    STATUS = "status"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A flag, or `KEY=VALUE` (no flag), as somebody wrote it."""

    flag: Flag | None
    text: str
    """The flag's value, `""` for a flag that takes none."""
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """All that was given. Command line beats job file beats environment."""

    form: Form
    whole: Place
    script: Given | None = None
    """The first positional of torchrun's form: script, module or program."""
    file: str | None = None
    """The job file."""
    args: tuple[str, ...] | None = None
    """The words for the script, as they are; None: a job file's own."""
    given: tuple[Given, ...] = ()
    environment: tuple[Given, ...] = ()
    """Flags by `PET_*` variables."""

    def flag(self, name: str) -> Given | None:
        """The last word on a flag: the command line's, else the environment's."""
        found = [given for given in (*self.environment, *self.given) if given.flag is BY_NAME[name]]
        return found[-1] if found else None

    def typed(self, name: str) -> Given | None:
        """The last word of the command line alone on a flag."""
        found = [given for given in self.given if given.flag is BY_NAME[name]]
        return found[-1] if found else None


def parse(words: Sequence[str], environment: Mapping[str, str]) -> CommandLine:
    """Reads a command line without the program's own name; raises ConfigError if there is a mistake in its flags.

    The environment is not looked at where `--help` or `--version` asks for a text.
    """
    parser = _Parser(words)
    parser.run()
    line = parser.result()
    if line.typed("help") or line.typed("version"):
        return line
    found, mistakes = _environment(environment)
    if mistakes or parser.mistakes:
        raise ConfigError(render([*mistakes, *parser.findings()]))
    return parser.result(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Word:
    """A flag or `KEY=VALUE` with the index of the word that holds its value."""

    flag: Flag | None
    text: str
    index: int


class _Parser:
    """Goes through the words once. Places are made in the end, when it is known where the script's words begin."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.at = 0
        self.form = Form.NOTHING
        self.file: str | None = None
        self.script: int | None = None
        self.args: tuple[str, ...] | None = None
        self.found: list[_Word] = []
        self.mistakes: list[tuple[str, str, int]] = []
        """What is wrong, what to do, and the index of the word."""

    def run(self) -> None:
        while self.at < len(self.words) and self.args is None and not self.mistakes:
            word = self.words[self.at]
            self.at += 1
            if word == "--":
                self._rest()
            elif word.startswith("--"):
                self._long(word)
            elif word.startswith("-") and word != "-":
                self._short(word)
            else:
                self._positional(word)
        self._about_status()

    def _rest(self) -> None:
        """After `--` come the words of a job file's script, or the script itself."""
        if self.form is Form.NOTHING and self.at < len(self.words):
            self._is_script(self.at)
        elif self.form is not Form.NOTHING:
            self.args = tuple(self.words[self.at :])

    def _is_script(self, index: int) -> None:
        self.form, self.script = Form.SCRIPT, index
        self.args = tuple(self.words[index + 1 :])

    def _positional(self, word: str) -> None:
        runs_a_name = any(found.flag in (BY_NAME["module"], BY_NAME["no-python"]) for found in self.found)
        if self.form is Form.STATUS:
            self._wrong("`status` runs nothing", "to run a script of this name, write `./status`")
        elif self.file is not None:
            self.found.append(_Word(flag=None, text=word, index=self.at - 1))
        elif word.endswith(_JOB_FILES):
            self.form = Form.FILE if self.form is Form.NOTHING else self.form
            self.file = word
        elif self.form is Form.CHECK:
            self._wrong("`check` runs no script of yours", "a job file is expected, or nothing")
        elif word in (Form.CHECK.value, Form.STATUS.value) and not runs_a_name:
            self.form = Form(word)
        else:
            self._is_script(self.at - 1)

    def _about_status(self) -> None:
        for word in self.found:
            is_end = word.flag is BY_NAME["end"]
            if is_end and self.form is not Form.STATUS:
                self.mistakes.append(("`--end` is about `status`", "write `raylaunch status --end`", word.index))
            elif self.form is Form.STATUS and not is_end and word.flag not in (BY_NAME["help"], BY_NAME["version"]):
                self.mistakes.append(("`status` takes no flag but `--end`", "leave it away", word.index))

    def _long(self, word: str) -> None:
        name, equals, value = word[2:].partition("=")
        flags = meant_by(name)
        if not flags:
            self._unknown(f"--{name}")
        elif len(flags) > 1:
            self._wrong(f"`--{name}` is ambiguous", "write " + " or ".join(f"`{flag.spelled}`" for flag in flags))
        elif flags[0].takes:
            self._valued(flags[0], f"--{name}", value if equals else None)
        elif equals:
            self._wrong(f"`--{name}` takes no value", f"leave `={value}` away")
        else:
            self._take(flags[0], "")

    def _short(self, word: str) -> None:
        """`-m`, `-r3`, `-r=3`, `-r 3`, and several in one word: `-mr3`."""
        letters = word[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            flag = BY_LETTER.get(letter)
            if flag is None:
                self._unknown(word)
                return
            if flag.takes:
                self._valued(flag, f"-{letter}", letters.removeprefix("=") if letters else None)
                return
            self._take(flag, "")

    def _valued(self, flag: Flag, spelled: str, value: str | None) -> None:
        """A value is in the word itself, or is the next word, unless that looks like a flag."""
        if value is None and self.at < len(self.words):
            following = self.words[self.at]
            if not following.startswith("-") or following == "-" or _NEGATIVE.fullmatch(following):
                value = following
                self.at += 1
        if value is None:
            self._wrong(f"`{spelled}` is given no value", f"write `{flag.spelled} {flag.takes}`")
        else:
            self._take(flag, value)

    def _take(self, flag: Flag, value: str) -> None:
        self.found.append(_Word(flag=flag, text=value, index=self.at - 1))

    def _unknown(self, spelled: str) -> None:
        known = [flag.spelled for flag in FLAGS]
        close = get_close_matches("--" + spelled.lstrip("-").replace("_", "-").lower(), known, n=1, cutoff=0.7)
        after = "it" if self.file is None else "`--`"
        hint = f"did you mean `{close[0]}`?" if close else f"words for the script stand after {after}; see `--help`"
        self._wrong(f"`{spelled}` is not a flag", hint)

    def _wrong(self, message: str, hint: str) -> None:
        self.mistakes.append((message, hint, self.at - 1))

    def findings(self) -> Iterator[Finding]:
        for message, hint, index in self.mistakes:
            yield Finding(message=message, place=self._place(index), hint=hint)

    def _place(self, index: int) -> Place:
        """A word as the shell would have it. Of the script's own words only that there are some is shown."""
        ours = self.words if self.args is None else self.words[: len(self.words) - len(self.args)]
        shown = [shlex.quote(secrets.cut(word)) for word in ("raylaunch", *secrets.shown_arguments(ours))]
        text = " ".join(shown) + " ..." * bool(self.args)
        column = len(" ".join(shown[: index + 1])) + 1
        return Place(source=COMMAND_LINE, text=text, column=column, width=len(shown[index + 1]))

    def result(self, environment: tuple[Given, ...] = ()) -> CommandLine:
        given = [Given(flag=word.flag, text=word.text, place=self._place(word.index)) for word in self.found]
        script = None
        if self.script is not None:
            script = Given(flag=None, text=self.words[self.script], place=self._place(self.script))
        return CommandLine(
            form=self.form,
            whole=Place(source=self.file or COMMAND_LINE),
            script=script,
            file=self.file,
            args=self.args,
            given=tuple(given),
            environment=environment,
        )


def _environment(variables: Mapping[str, str]) -> tuple[tuple[Given, ...], list[Finding]]:
    """Flags by `PET_*`. A flag without a value is there if its variable is a number other than 0."""
    found, mistakes = [], []
    for flag in FLAGS:
        text = variables.get(flag.variable)
        if not flag.pet or text is None:
            continue
        place = in_variable(flag.variable, text)
        if flag.takes:
            found += [Given(flag=flag, text=text, place=place)] if text else []
        elif not re.fullmatch(r"\s*[-+]?\d+\s*", text):
            message = f"`{flag.variable}` is a switch, but {f'`{text}`' if text else 'nothing'} is no number"
            hint = f"1 stands for `{flag.spelled}`, 0 for not giving it"
            mistakes.append(Finding(message=message, place=place, hint=hint))
        elif int(text):
            found.append(Given(flag=flag, text="", place=place))
    return tuple(found), mistakes


def in_variable(name: str, text: str) -> Place:
    """The value of an environment variable."""
    value = shlex.quote(text)
    return Place(source="environment", text=f"{name}={value}", column=len(name) + 1, width=len(value))
