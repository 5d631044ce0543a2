"""Completion of the command line in a shell: `raylaunch completion bash`.

The scripts of all shells ask `raylaunch completion --words WORDS...` what may come next, at each press of the tab key,
and `lines` answers. So each flag, setting and run is known in one place, also after an update.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

from raylaunch.cli.args import subcommands
from raylaunch.cli.args.flags import FLAGS, Flag
from raylaunch.cli.args.subcommands import Subcommand
from raylaunch.core.job.job import Entrypoint, Job, RayOptions

FILES = ":files"
"""The line that stands for all files; the shell knows how to name them."""
_SECTIONS = {"entrypoint": Entrypoint, "ray": RayOptions}
_JOB_FILES = (".yaml", ".yml", ".json")
_CHECK = "check"
_NODE = "NODE"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A word that may come next. If it ends with `=`, its value follows without a space."""

    word: str
    help: str = ""

    def __str__(self) -> str:
        return f"{self.word}\t{self.help}" if self.help else self.word


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of runs and of nodes."""

    runs: Callable[[], Iterable[Candidate]]
    nodes: Callable[[], Iterable[Candidate]]
    """Of the newest run."""


def lines(words: Sequence[str], names: Names) -> Iterator[str]:
    """Yield the words that may be in the place of the last one, each with its help after a tab; or `FILES`.

    `words`: what was typed after `raylaunch`.
    """
    *before, current = words or [""]
    if current == "=" or before[-1:] == ["="]:  # as bash divides words: this is a value
        yield FILES
        return
    for found in _found(before, current, names):
        if not isinstance(found, Candidate):
            yield FILES
        elif found.word.startswith(current) and (found.word.endswith("=") or shlex.quote(found.word) == found.word):
            yield str(found)  # what would need quotes is left out: it is the name of a run, which has an id too


def _found(before: Sequence[str], current: str, names: Names) -> Iterator[Candidate | str]:
    command = subcommands.BY_NAME.get(before[0]) if before else None
    if command is not None:
        yield from _of_subcommand(command, before[1:], current, names)
        return
    main = _main_word(before)
    if main is None or (main and main != _CHECK and not main.endswith(_JOB_FILES)):  # a value is expected
        yield FILES
    elif current.startswith("-"):
        yield from _options(FLAGS)
    elif main:
        yield from _settings()
        yield FILES
    else:
        if not before:
            yield from (Candidate(each.name, each.help) for each in subcommands.TABLE)
        yield Candidate(_CHECK, "test that the cluster computes and communicates")
        yield FILES


def _main_word(before: Sequence[str]) -> str | None:
    """Return the script, job file or command that was given; "": none yet; None: the next word is a flag's value."""
    by_option = {option: flag for flag in FLAGS for option in _names(flag)}
    rest = iter(before)
    for word in rest:
        if not word.startswith("-"):
            return word
        name, equals, _ = word.partition("=")
        flag = by_option.get(name.replace("_", "-"))
        if flag is not None and flag.metavar and not equals:
            value = next(rest, None)
            if value is None:
                return None
            if value == "=":
                next(rest, None)
    return ""


def _of_subcommand(command: Subcommand, before: Sequence[str], current: str, names: Names) -> Iterator[Candidate | str]:
    metavars = {name: flag.metavar for flag in command.flags if flag.metavar for name in _names(flag)}
    is_value = [index > 0 and before[index - 1] in metavars for index in range(len(before))]
    given = [word for word, value in zip(before, is_value, strict=True) if not (value or word.startswith("-"))]
    if before and before[-1] in metavars:
        yield from names.nodes() if metavars[before[-1]] == _NODE else [FILES]
    elif current.startswith("-"):
        yield from _options(command.flags)
    elif command.operand and not given:
        yield from names.nodes() if command.operand == _NODE else ()
    elif command.takes_run:
        yield from names.runs()
        yield FILES
    elif command.name == "completion":
        yield from map(Candidate, SCRIPTS)
    elif command.other:
        if command.takes_settings and given and given[0].endswith(_JOB_FILES):
            yield from _settings()
        yield FILES


def _names(flag: Flag) -> tuple[str, ...]:
    return (flag.option, *([f"-{flag.short}"] if flag.short else []))


def _options(flags: Iterable[Flag]) -> Iterator[Candidate]:
    for flag in flags:
        yield from (Candidate(name, flag.help) for name in _names(flag))


def _settings() -> Iterator[Candidate]:
    for one in fields(Job):
        if one.name in _SECTIONS:
            yield from (Candidate(f"{one.name}.{inner.name}=") for inner in fields(_SECTIONS[one.name]))
        else:
            yield Candidate(f"{one.name}=")


_BASH = """\
# eval "$(raylaunch completion bash)"
_raylaunch() {
    local IFS=$'\\n' cur=${COMP_WORDS[COMP_CWORD]} line files
    COMPREPLY=()
    [[ $cur == = ]] && cur=
    while read -r line; do
        line=${line%%$'\\t'*}
        if [[ $line == :files ]]; then
            files=($(compgen -f -- "$cur"))
            COMPREPLY+=("${files[@]}")
            ((${#files[@]})) && compopt -o filenames  # which quotes them, and any `=`
        else
            [[ $line == *= ]] && compopt -o nospace
            COMPREPLY+=("$line")
        fi
    done < <("${COMP_WORDS[0]}" completion --words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -F _raylaunch raylaunch
"""
_ZSH = """\
#compdef raylaunch
# eval "$(raylaunch completion zsh)", after compinit; or save it as `_raylaunch` in a folder of fpath
_raylaunch() {
    local line files=
    local -a found values
    while IFS= read -r line; do
        case $line in
            :files) files=yes ;;
            *=) values+=("$line") ;;
            *) found+=("${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}") ;;
        esac
    done < <(${words[1]} completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)
    (( $#found )) && _describe raylaunch found
    (( $#values )) && compadd -S '' -a values
    [[ -n $files ]] && _files
}
if [[ $funcstack[1] == _raylaunch ]]; then _raylaunch "$@"; else compdef _raylaunch raylaunch; fi
"""
_FISH = """\
# raylaunch completion fish | source
function __raylaunch
    set -l words (commandline -opc) (commandline -ct)
    for line in ($words[1] completion --words $words[2..-1] 2>/dev/null)
        if test "$line" = :files
            __fish_complete_path (commandline -ct)
        else
            echo $line
        end
    end
end
complete -c raylaunch -f -a '(__raylaunch)'
"""


def _tcsh() -> str:
    """Return a line for tcsh, which cannot ask: it completes flags, and names of files elsewhere."""
    return f"complete raylaunch 'c/--/({' '.join(flag.name for flag in FLAGS)})/' 'p/*/f/'\n"


SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH, "tcsh": _tcsh()}
"""By shell: what `raylaunch completion` and `--print-completion` print."""

HINT = "write bash, zsh, fish or tcsh"
