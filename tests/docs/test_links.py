"""What the documentation names exists: pages, headings, pictures, files, modules, commands, flags and keys."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import yaml

from raylaunch.cli.args import subcommands
from raylaunch.cli.args.flags import matching_flags
from raylaunch.core.job.job import Job
from tools import dist, smoke
from tools.bench.__main__ import BENCHES
from tools.chaos.faults import FAULTS
from tools.compat import combinations
from tools.docs import blocks
from tools.examples import example
from tools.gpu import steps

PAGES = pytest.mark.parametrize("page", blocks.pages(), ids=lambda page: page.name)
MOST_LINES = 200
_PATH = re.compile(r"(?<![\w/.-])((?:raylaunch|tests|tools|docs|examples|conf)/[\w./-]*[\w/])")
_MAKE = re.compile(r"(?:^    |`)make ([a-z-]+)((?: [A-Z_]+=(?:\"[^\"]*\"|[^\s`]+))*)", re.MULTILINE)
_RUN = re.compile(r"(?:^    |`)(?:[\w./]*/)?python[\d.]* -m ([\w.]+)([^`\n#]*)", re.MULTILINE)
_MODULE = re.compile(r"(?<![\w/.-])raylaunch(?:\.[A-Za-z_]\w*)+")

CHOSEN: dict[str, Callable[[str], object]] = {
    "bench": lambda only: set(only.split()) <= set(BENCHES),
    "smoke": lambda only: set(only.split()) <= {each.name for each in smoke.commands(Path())},
    "examples": lambda only: bool(example.chosen(only.split())),
    "compat": combinations.chosen,
    "dist": lambda only: set(only.split()) <= set(dist.supported()),
    "gpu": lambda only: set(only.split()) <= {step.name for step in steps.STEPS},
    "chaos": lambda only: any(re.search(only, fault.name) for _, fault in FAULTS),
}
"""Whether there is what ONLY names, for each target that has it."""


def test_the_readme_is_short() -> None:
    assert len((blocks.ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_the_readme_names_every_page() -> None:
    text = (blocks.ROOT / "README.md").read_text(encoding="utf-8")
    others = [str(page.relative_to(blocks.ROOT)) for page in blocks.pages()[1:]]
    assert [name for name in others if f"]({name})" not in text] == []


@PAGES
def test_every_link_leads_somewhere(page: Path) -> None:
    """Relative links: the file is there, and the heading in it."""
    wrong = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_pictures_are_drawings_that_need_no_other_file() -> None:
    """Well-formed SVG with a title, without links to elsewhere."""
    for picture in (blocks.DOCS / "images").iterdir():
        root = ET.parse(picture).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert root.find("{http://www.w3.org/2000/svg}title") is not None
        assert not [name for each in root.iter() for name in each.attrib if name.endswith("href")]


@PAGES
def test_every_file_that_is_named_exists(page: Path) -> None:
    text = prose(page)
    named = {path for path in _PATH.findall(text) if "..." not in path}
    assert sorted(path for path in named if not (blocks.ROOT / path).exists()) == []


@PAGES
def test_every_module_and_function_that_is_named_exists(page: Path) -> None:
    assert sorted(name for name in set(_MODULE.findall(prose(page))) if not is_there(name)) == []


@PAGES
def test_every_make_target_that_is_named_exists(page: Path) -> None:
    makefile = (blocks.ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert sorted(named - targets) == []


@PAGES
def test_every_variable_of_make_exists(page: Path) -> None:
    """And what is chosen with ONLY is there to choose."""
    makefile = (blocks.ROOT / "Makefile").read_text(encoding="utf-8")
    for target, words in _MAKE.findall(page.read_text(encoding="utf-8")):
        for name, value in (word.split("=", 1) for word in shlex.split(words)):
            assert re.search(rf"\$\({name}\)|\(or \$\({name}\)|^ifdef {name}$", makefile, re.MULTILINE), name
            if name == "ONLY" and value != "...":
                assert CHOSEN[target](value), f"make {target} {words}"


@PAGES
def test_every_module_that_is_run_exists(page: Path) -> None:
    """`python -m MODULE`, with the flags that are quoted: the program's own help has them."""
    for module, words in _RUN.findall(page.read_text(encoding="utf-8")):
        assert importlib.util.find_spec(module), module
        flags = {word for word in words.split() if word.startswith("--")}
        if module.startswith("tools.") and flags:
            assert sorted(flags - flags_of_tool(module)) == [], module


@PAGES
def test_every_flag_in_a_command_exists(page: Path) -> None:
    """Flags of `raylaunch` itself, which come before its script or before `--`."""
    given = [flag for command in commands(page) for flag in own_flags(command)]
    assert [flag for flag in given if len(matching_flags(flag.lstrip("-"))) != 1] == []


@PAGES
def test_every_flag_of_a_command_on_runs_exists(page: Path) -> None:
    for command in map(str.split, commands(page)):
        if command and command[0] in subcommands.BY_NAME:
            known = {flag.option for flag in subcommands.BY_NAME[command[0]].flags}
            words = itertools.takewhile(lambda word: word != "--", (word.strip("[]") for word in command))
            assert {word for word in words if word.startswith("--")} <= known


@PAGES
def test_every_key_of_a_job_file_exists(page: Path) -> None:
    keys = {field.name for field in fields(Job)}
    found = [
        yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    ]
    assert sorted({key for job in found for key in job} - keys) == []


@cache
def flags_of_tool(module: str) -> set[str]:
    """The flags in a program's help, which takes it a second of CPU."""
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=blocks.ROOT, capture_output=True, text=True, check=True)
    return set(re.findall(r"--[a-z-]+", done.stdout))


def links(page: Path) -> Iterator[str]:
    """Targets of links and images, but for those of the web."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            yield target


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def prose(page: Path) -> str:
    """The text without what is generated from the code, and without recorded output."""
    return re.sub(r"<!-- ([a-z-]+) -->\n.*?<!-- /\1 -->\n", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def is_there(name: str) -> bool:
    """Whether this is a module below raylaunch, or in one."""
    module, _, attribute = name.rpartition(".")
    path = blocks.ROOT / name.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    parent = blocks.ROOT / module.replace(".", "/")
    if module.startswith("raylaunch.integrations."):  # whose library may not be installed
        text = parent.with_suffix(".py").read_text(encoding="utf-8")
        return re.search(rf"^(class|def) {attribute}\b", text, re.MULTILINE) is not None
    is_module = parent.is_dir() or parent.with_suffix(".py").is_file()
    return is_module and hasattr(importlib.import_module(module), attribute)


def commands(page: Path) -> list[str]:
    """Lines that begin with `raylaunch`, in code blocks and code font."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"(?:^    (?:\w+=\S+ )*|`)raylaunch ([^`\n#]*)", text, re.MULTILINE)


def own_flags(command: str) -> Iterator[str]:
    """The flags before the script, or before `--` after a job file; none of a command on runs, which has its own."""
    words = command.split()
    for word in () if words and words[0] in subcommands.BY_NAME else words:
        if word == "--" or word.endswith(".py") or word == "SCRIPT":
            return
        if word.startswith("--"):
            yield word.rstrip("]")
