"""Tables of the documentation say what the code says."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import raylaunch
import raylaunch.worker
from raylaunch.cli.args import subcommands, usage
from raylaunch.core.failures.failure import Failure
from raylaunch.core.placement.environment import Assignment, Rendezvous, worker_env
from raylaunch.core.record.attempt import Attempt
from raylaunch.core.record.result import RunResult
from raylaunch.errors import ExitCode
from tools.bench import __main__ as bench
from tools.bench import claims
from tools.chaos.faults import FAULTS
from tools.docs import blocks

REFERENCE = blocks.DOCS / "reference.md"


@pytest.mark.parametrize("page", blocks.pages(), ids=lambda page: page.name)
def test_generated_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert blocks.filled(text) == text, "run `python -m tools.docs`"


def test_every_generated_table_has_its_place() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in blocks.pages())
    assert [name for name in blocks.GENERATED if text.count(f"<!-- {name} -->\n") != 1] == []


@pytest.mark.parametrize("name", blocks.GENERATED)
def test_no_generated_table_is_empty(name: str) -> None:
    assert blocks.GENERATED[name]().count("\n") > 3


def test_every_exit_code_has_a_row() -> None:
    named = set(map(int, re.findall(r"\d+", " ".join(blocks.first_column(blocks.block("reference.md", "exit-codes"))))))
    codes = {int(code) for code in ExitCode if code != ExitCode.INTERRUPTED}  # which is 128 + 2
    assert codes | {128} == named


def test_every_public_name_has_an_entry() -> None:
    """`::: NAME`, which the site fills with its signature and docstring."""
    entries = re.findall(r"^::: (.+)$", (blocks.DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    public = [f"{module.__name__}.{name}" for module in (raylaunch, raylaunch.worker) for name in module.__all__]
    for path in (blocks.ROOT / "raylaunch" / "integrations").glob("[a-z]*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        defined = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        public += [f"raylaunch.integrations.{path.stem}.{name}" for name in defined if not name.startswith("_")]
    assert sorted(entries) == sorted(public)


def test_every_command_is_listed() -> None:
    """In the table, in the usage of the command, and in README.md."""
    commands = {"check", *subcommands.BY_NAME}
    table = " ".join(blocks.first_column(blocks.block("reference.md", "commands")))
    assert {name for name in commands if f"raylaunch {name}" not in table} == set()
    assert {name for name in commands if f"raylaunch {name} " not in usage.USAGE} == set()
    readme = (blocks.ROOT / "README.md").read_text(encoding="utf-8")
    assert {name for name in commands if not re.search(rf"`(raylaunch )?{name}\b", readme)} == set()


def test_every_variable_of_a_worker_is_explained() -> None:
    part = Assignment(attempt=1, node="node-1", node_rank=0, nnodes=2, base_rank=0, nproc=2, world_size=4)
    meeting = Rendezvous(master_addr="10.0.0.1", master_port=1, run_id="run", max_restarts=3, restart_count=0)
    env = worker_env(part, 0, meeting, error_file="", given={})
    named = names(section(REFERENCE, "Environment variables"))
    assert sorted(env.keys() - named) == []


def test_every_key_of_the_result_is_explained() -> None:
    """Fields of `RunResult`, `Attempt` and `Failure`, and what follows from the exit code."""
    named = names(section(REFERENCE, "`result.json`"))
    expected = {field.name for kind in (RunResult, Attempt, Failure) for field in fields(kind)}
    assert sorted((expected | {"resume"}) ^ named) == []


def test_the_table_of_faults_has_all_of_them() -> None:
    faults = [fault.name for _, fault in FAULTS]
    named = blocks.first_column(blocks.block("reliability.md", "chaos"))
    assert named[:-1] == faults


def test_every_bench_is_explained() -> None:
    """By its rows in the table of figures or, without any, in a table of its own."""
    with_rows = {claim.bench for claim in claims.claims()}
    assert with_rows | names(section(blocks.DOCS / "benchmarks.md", "How to run them")) == set(bench.BENCHES)


def test_text_below_an_attribute_is_its_meaning() -> None:
    assert blocks.attribute_docstrings(Example) == {"two": "Second, on two lines."}


class Example:
    """Not the meaning of `one`."""

    one: int = 1
    two: int = 2
    """Second,
    on two lines."""

    def method(self) -> str:
        """Not an attribute."""
        return inspect.getsource(type(self))


def section(page: Path, title: str) -> str:
    """The text below a heading of a page, up to the next one of its level."""
    return page.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def names(text: str) -> set[str]:
    """What is in code font in the first columns of the tables of a text."""
    firsts = [blocks.cells(line)[0] for line in text.splitlines() if line.startswith("| ")]
    return {name for cell in firsts for name in re.findall(r"`([A-Za-z_-]+)`", cell)}
