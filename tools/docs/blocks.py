"""Tables of the documentation that are generated from the code.

A table called `NAME` stands between the lines `<!-- NAME -->` and `<!-- /NAME -->`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from signal import SIGTERM
from typing import Any, get_args

from raylaunch.cli.args import subcommands, usage
from raylaunch.cli.args.flags import TABLE, Flag, Group, attribute_docstrings, default_text
from raylaunch.cli.args.subcommands import signature
from raylaunch.core.job.job import Entrypoint, Job, NodeRule, RayOptions
from raylaunch.core.machine.events_and_actions import Action, Event
from raylaunch.core.machine.state import TRANSITIONS, Phase
from raylaunch.core.record import run_layout
from raylaunch.errors import resume, signal_exit_code
from tools import walks
from tools.compat import results
from tools.examples.example import EXAMPLES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_SECTIONS = {"entrypoint": Entrypoint, "ray": RayOptions}
_BLOCK = re.compile(r"<!-- (?P<name>[a-z-]+) -->\n(?P<body>.*?)<!-- /(?P=name) -->\n", re.DOTALL)


def pages() -> list[Path]:
    """All pages that a person reads, README.md first."""
    above = ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "CODE_OF_CONDUCT", "AGENTS", "examples/README")
    return [*(ROOT / f"{name}.md" for name in above), *sorted(DOCS.rglob("*.md"))]


def filled(text: str) -> str:
    """The text with its generated tables as the code is now. Blocks that are measured stay as they are."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- {name} -->\n{GENERATED[name]()}<!-- /{name} -->\n" if name in GENERATED else match[0]

    return _BLOCK.sub(block, text)


def block(page: str, name: str) -> str:
    """The text of one block of a page in docs/."""
    bodies = {match["name"]: match["body"] for match in _BLOCK.finditer((DOCS / page).read_text(encoding="utf-8"))}
    return bodies[name]


def first_column(table: str) -> list[str]:
    """The cells of a Markdown table's first column, without its head."""
    return [cells(line)[0] for line in table.splitlines() if line.startswith("| ") and "---" not in line][1:]


def cells(row: str) -> list[str]:
    """The cells of one row of a Markdown table."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    first, *others = (f"| {' | '.join(row)} |\n".replace("|  |", "| |") for row in (head, *escaped))
    return "".join((first, "|---" * len(head), "|\n", *others))


def _commands() -> str:
    rows = [*usage.COMMANDS[: -len(subcommands.TABLE)], *((each.synopsis, each.help) for each in subcommands.TABLE)]
    rows.append(("raylaunch --version [--json]", "show the versions that a bug report needs; what is missing is null"))
    return _table(("command", "what it does"), ((f"`{line}`", text) for line, text in rows))


def _flags() -> str:
    """Without the flags of keys, which are in the table of keys."""
    notes = {Group.ACCEPTED: "accepted without effect: ", Group.OURS: "raylaunch only: "}
    rows = (
        (f"`{signature(flag)}`", _default(flag), notes.get(group, "") + flag.help)
        for group in Group
        if group is not Group.KEYS
        for flag in TABLE[group]
    )
    return _table(("flag", "default", "meaning"), rows)


def _default(flag: Flag) -> str:
    return f"`{flag.default}`" if flag.default and " " not in flag.default else flag.default


def _subcommands() -> str:
    rows = (
        (f"`{command.name}`", f"`{signature(flag)}`", _default(flag), flag.help)
        for command in subcommands.TABLE
        for flag in command.flags
        if flag.name != "help"
    )
    return _table(("command", "flag", "default", "meaning"), rows)


def _config() -> str:
    return _table(("key", "default", "meaning"), _keys(Job, ""))


def _keys(kind: type[Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    meanings = attribute_docstrings(kind)
    for field in fields(kind):
        if field.name in _SECTIONS and not prefix:
            yield from _keys(_SECTIONS[field.name], f"{field.name}.")
            continue
        yield (
            f"`{prefix}{field.name}`",
            f"`{default}`" if (default := default_text(field)) else "",
            meanings[field.name],
        )
        if field.name == "nodes":
            yield from _keys(NodeRule, "nodes.<which>.")


def _exit_codes() -> str:
    """From `--help`, which says them too."""
    lines = usage.full().partition("Exit codes:\n")[2].partition("\n\n")[0].splitlines()
    rows = (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines)
    codes = ((code, meaning, int(code) if code.isdecimal() else signal_exit_code(SIGTERM)) for code, meaning in rows)
    return _table(("code", "meaning", "`resume`"), ((code, meaning, resume(number)) for code, meaning, number in codes))


def _run_folder() -> str:
    lines = inspect.cleandoc(run_layout.__doc__ or "").partition("::\n\n")[2].split("\n\n")[0]
    return f"```text\n{textwrap.dedent(lines)}\n```\n"


def _classes(union: Any) -> str:
    rows = ((f"`{kind.__name__}`", _first_paragraph(kind)) for kind in get_args(union))
    return _table(("`is`", "meaning"), rows)


def _phases() -> str:
    rows = ((f"`{phase.name}`", meaning, _names(TRANSITIONS[phase])) for phase, meaning in _phase_meanings())
    return _table(("phase", "meaning", "may be followed by"), rows)


def _phase_meanings() -> list[tuple[Phase, str]]:
    meanings = attribute_docstrings(Phase)
    return [(phase, meanings[phase.name]) for phase in Phase]


def _names(phases: Iterable[Phase]) -> str:
    return ", ".join(f"`{phase.name}`" for phase in Phase if phase in set(phases))


def _first_paragraph(thing: Any) -> str:
    return " ".join(inspect.cleandoc(thing.__doc__ or "").split("\n\n")[0].split())


def _examples() -> str:
    return _table(
        ("example", "what it shows", "goes on from", "final loss after a kill"),
        (
            (
                f"[{each.script}]({each.script}){' '.join(('', *each.arguments)) if '--state' in each.arguments else ''}",
                each.what,
                "its own files" if each.files else "`State`",
                f"within {each.tolerance:g}" if each.tolerance else "bitwise equal",
            )
            for each in EXAMPLES
        ),
    )


def _compat() -> str:
    head, *rows = results.table(results.read())
    left_out = "".join(f"- {line}\n" for line in results.notes(results.read()))
    return _table(head, rows) + (f"\n{left_out}" if left_out else "")


def _recording() -> str:
    from tools.docs import recording  # which needs the paths of this module

    return recording.text()


GENERATED: dict[str, Callable[[], str]] = {
    "commands": _commands,
    "flags": _flags,
    "subcommands": _subcommands,
    "config": _config,
    "exit-codes": _exit_codes,
    "run-folder": _run_folder,
    "events": lambda: _classes(Event),
    "actions": lambda: _classes(Action),
    "phases": _phases,
    "walks": walks.page,
    "compat": _compat,
    "recording": _recording,
    "examples": _examples,
}
