"""The layout of the code: which package may import which, what its files are called, and how long they are."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = ROOT / "raylaunch"

LINES_PER_MODULE = 800
LINES_PER_FUNCTION = 55
PUBLIC_NAMES = 12
"""Of a module, at most."""
ATTRIBUTES = 12
METHODS = 25
"""Of a class, at most."""

LARGE_MODULES = {
    "raylaunch/cli/config/schema.py": 13,
    "raylaunch/cluster/control/control_messages.py": 16,
    "raylaunch/cluster/ray_internals.py": 23,
    "raylaunch/cluster/named_resources.py": 15,
    "raylaunch/core/failures/failure.py": 14,
    "raylaunch/core/job/job.py": 17,
    "raylaunch/core/machine/events_and_actions.py": 35,
    "raylaunch/core/record/run_layout.py": 18,
    "raylaunch/node/linux/processes.py": 18,
    "raylaunch/node/protocol/forkserver_messages.py": 14,
    "raylaunch/worker/heartbeats/shared_page.py": 37,
    "raylaunch/worker/state/commit_buffer.py": 17,
    "raylaunch/worker/torch_internals.py": 19,
    "raylaunch/node/state/transfer.py": 18,
}
"""Modules that are older than the limit of public names, with their number. It may only become less."""
HEIRS = {
    "_PlainJob(Job)",
    "Failure(FailureRecord)",
    "Starting(AwaitingNodes)",
    "Saving(AwaitingNodes)",
    "Stopping(AwaitingNodes)",
    "WorkerExit(FailureRecord)",
}
"""Classes that inherit from a concrete class, which no further one may."""
ABSTRACT = ("ABC", "Protocol", "StrEnum", "Enum", "Exception", "TypedDict", "NamedTuple")
STUMBLES = re.compile(
    r"\b(that|those) of\b|\bso many\b|\bTake note\b|\bit is (said|told)\b"
    r'|^\s*(""")?(By which|Of which|Who)\b',
    re.MULTILINE,
)
"""Words over which readers have stumbled."""

CAPABILITIES = {
    "state": (
        *(
            "worker.state",
            "node.state",
            "capabilities.state",
        ),
        "core.machine.commits",
    ),
    "survivors": ("worker.survivors", "node.supervisor.survivor_table"),
    "hangs": (
        "capabilities.hangs",
        *(f"core.monitoring.hang_{part}" for part in ("cause", "detector", "policy")),
    ),
    "notices": ("capabilities.notices",),
    "peers": ("capabilities.peers",),
    "terminal": ("capabilities.terminal",),
    "warm": ("cluster.fleet.agent_reuse",),
    "control": ("cluster.control",),
    "report": ("core.history.run_history", "cli.html_report"),
    "doctor": ("cli.doctor", "cluster.inspection"),
    "selfcheck": ("worker.selfcheck",),
}
"""The packages and modules of each capability, without `raylaunch.`: a run needs none of them.

What the machine decides on an event that a capability has made is the machine's: a replay needs no capability.
"""
KERNEL = (
    *("core.machine", "core.placement", "core.record", "worker.runtime"),
    *("cluster.driver", "cluster.agent", "cluster.fleet"),
    *("cluster.ray_api", "cluster.local", "cluster.named_resources"),
    *("node.protocol", "node.supervisor", "node.forkserver", "node.preload", "node.logs", "node.linux"),
)
"""The packages that start, supervise, restart and resize, and what they need for that."""
KNOWN_CAPABILITIES = {
    "cluster.fleet.ray_fleet": {"warm"},
    "node.forkserver.subreaper": {"state"},
    "node.supervisor.supervisor": {"state", "survivors"},
}
"""The modules of the kernel that import a capability, which no further one may. A pair that goes, goes for good.

- warm: which agents a slot gets is decided in the middle of granting, at seven places, which a protocol would repeat.
- state, subreaper: what serves in the place of a killed agent must run in a process that outlives it.
- state, supervisor: heartbeats, survivors and the end of the fork server need the memory, so a seam for it would have
  more names than the memory has calls there.
- survivors: the supervisor changes with them what it sends to the fork server when an attempt begins.
"""

INTERNALS = (
    "raylaunch/cluster/ray_internals.py",
    "raylaunch/worker/torch_internals.py",
    "raylaunch/worker/cpython_internals.py",
)
"""The modules for what others promise nothing about."""
PUBLIC = ("_exit", "_fields_", "__res_init", "__res_state")
"""Of `os`, of `ctypes`, and of glibc (`resolv.h`)."""
DOTTED_NAME = re.compile(r"\b(?:ray|torch|importlib|runpy|subprocess|sys|os)(?:\.\w+)+")

IMPORTED = """
import sys
before = set(sys.modules)
import {modules}
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}}))
"""


def shown(path: Path) -> str:
    """Return the path as seen from the project's folder."""
    return str(path.relative_to(ROOT))


def files() -> list[Path]:
    """Return all files of the program."""
    return sorted(CODE.rglob("*.py"))


def modules() -> list[Path]:
    """Return all files whose names are our own choice."""
    return [path for path in files() if path.stem not in ("__init__", "__main__")]


@cache
def nodes(path: Path) -> Sequence[ast.AST]:
    """Return all nodes of a file, the module first. It is parsed once, since all files take a second of CPU."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def forget_nodes() -> Iterator[None]:
    """A million of them would make garbage collections slow in the tests of other modules."""
    yield
    nodes.cache_clear()


def definitions(*kinds: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    """Yield all nodes of these kinds in the program, each with its file."""
    for path in files():
        for node in nodes(path):
            if isinstance(node, kinds):
                yield path, node


def docstring(path: Path) -> str:
    """Return the docstring of a module or package; "" if it has none."""
    return ast.get_docstring(nodes(path)[0]) or ""


def several(places: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the names that have more than one place."""
    return {name: found for name, found in places.items() if len(found) > 1}


def imported_by(*modules: str) -> set[str]:
    """Return the top-level packages that a fresh Python has loaded after it imported these modules."""
    code = IMPORTED.format(modules=", ".join(modules))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_imports_follow_the_contracts():
    """The contracts in pyproject.toml hold: imports point downwards, without cycles, and the core cannot act."""
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([lint, "--no-cache", "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_class_name_occurs_once():
    """One name means one thing."""
    places = defaultdict(list)
    for path, node in definitions(ast.ClassDef):
        places[node.name.lstrip("_")].append(f"{shown(path)}:{node.lineno}")
    assert several(places) == {}


def test_modules_are_described():
    """Each module and package says what it is."""
    assert [shown(path) for path in files() if not docstring(path)] == []


def test_packages_are_described():
    """What it is for, which module to read first, how data flows through it: more than a line."""
    packages = CODE.glob("*/**/__init__.py")
    assert [shown(path) for path in packages if len(docstring(path).splitlines()) < 3] == []


def test_modules_are_short():
    """A longer one does two things."""
    found = {shown(path): len(path.read_text().splitlines()) for path in files()}
    assert {name: count for name, count in found.items() if count > LINES_PER_MODULE} == {}


def test_functions_are_short():
    """They fit on a screen."""
    found = {}
    for path, node in definitions(ast.FunctionDef, ast.AsyncFunctionDef):
        found[f"{shown(path)}:{node.lineno} {node.name}"] = node.end_lineno - node.lineno + 1
    assert {name: count for name, count in found.items() if count > LINES_PER_FUNCTION} == {}


def public_names(path: Path) -> set[str]:
    """Return what a module defines for others."""
    found = set()
    for node in nodes(path)[0].body:
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.Assign(targets=targets):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if not name.startswith("_")}


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the attributes that the methods of a class assign."""
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }


def test_modules_have_few_public_names():
    """A module that has more is two."""
    found = {shown(path): len(public_names(path)) for path in modules()}
    assert {name: count for name, count in found.items() if count > LARGE_MODULES.get(name, PUBLIC_NAMES)} == {}
    assert [name for name in LARGE_MODULES if found.get(name, 0) <= PUBLIC_NAMES] == []


def test_classes_are_small():
    """A class that has more attributes or methods is several."""
    found = {}
    for _, node in definitions(ast.ClassDef):
        methods = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
        found[node.name] = (len(attributes(node)), methods)
    large = {name: counts for name, counts in found.items() if counts[0] > ATTRIBUTES or counts[1] > METHODS}
    assert large == {}


def test_class_variables_say_their_types():
    """msgspec decodes no class with a bare `ClassVar` under Python 3.10."""
    found = [
        f"{shown(path)}:{node.lineno}"
        for path, node in definitions(ast.AnnAssign)
        if ast.unparse(node.annotation) in ("ClassVar", "typing.ClassVar")
    ]
    assert found == []


def test_no_class_inherits_from_a_concrete_one():
    """It would depend on the order in which the other calls its own methods."""
    classes = {node.name: node for _, node in definitions(ast.ClassDef)}

    def is_abstract(name: str) -> bool:
        bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in classes[name].bases}
        return name.endswith("Error") or not bases.isdisjoint(ABSTRACT)

    heirs = {
        f"{node.name}({base.id})"
        for node in classes.values()
        for base in node.bases
        if isinstance(base, ast.Name) and base.id in classes and not is_abstract(base.id)
    }
    assert heirs - HEIRS == set()
    assert HEIRS - heirs == set()


def test_prose_has_no_words_over_which_readers_stumble():
    """Neither in the code, nor in the tools and pages."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    found = {
        f"{shown(path)}: {match[0].strip()}"
        for path in [*files(), *(ROOT / "tools").rglob("*.py"), *pages]
        for match in STUMBLES.finditer(path.read_text())
    }
    assert found == set()


def capabilities_of(path: Path) -> set[str]:
    """Return the capabilities that a module imports."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raylaunch."):
            source = (node.module or "").removeprefix("raylaunch.")
            found |= {
                capability
                for capability in CAPABILITIES
                if any(is_part_of(f"{source}.{alias.name}", CAPABILITIES[capability]) for alias in node.names)
            }
    return found


def is_part_of(name: str, packages: Iterable[str]) -> bool:
    """Return whether a name is one of these packages and modules, or is in one."""
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def test_the_kernel_knows_no_further_capability():
    """It is a step towards a kernel that runs a job without any: hand in what a capability does, and shorten the list."""
    every = [part for parts in CAPABILITIES.values() for part in parts]
    found = {}
    for path in modules():
        name = ".".join(path.relative_to(CODE).with_suffix("").parts)
        if is_part_of(name, KERNEL) and not is_part_of(name, every) and (known := capabilities_of(path)):
            found[name] = known
    assert found == KNOWN_CAPABILITIES


def names_in(node: ast.AST) -> list[str]:
    """Return the parts of the names of others that a node may use: an import, an attribute, or a name in a string."""
    match node:
        case ast.Import():
            return [part for alias in node.names for part in alias.name.split(".")]
        case ast.ImportFrom() if node.module != "__future__":
            return [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
            return []
        case ast.Attribute():
            return [node.attr]
        case ast.Call(func=ast.Name(id="getattr" | "hasattr" | "setattr"), args=[_, ast.Constant(value=str(name)), *_]):
            return [name]
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return [name]
        case ast.Constant(value=str(text)):
            return [part for found in DOTTED_NAME.findall(text) for part in found.split(".")]
    return []


def foreign_private_names(path: Path) -> Iterator[str]:
    """Yield the private names of other projects that a file uses, except in its docstrings."""
    docs = {node.value for node in nodes(path) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    for node in nodes(path):
        for name in names_in(node) if node not in docs else ():
            if name.startswith("_") and not name.endswith("__") and name not in PUBLIC:
                yield f"{shown(path)}:{node.lineno} {name}"


def test_private_names_of_others_are_in_three_modules():
    """What Ray, torch and CPython promise nothing about is used where its shapes are known, and nowhere else."""
    found = [name for path in files() if shown(path) not in INTERNALS for name in foreign_private_names(path)]
    assert found == []


def test_make_test_has_every_part():
    """A part that is missing in PARTS, or is there twice, would be noticed by nobody."""
    text = (ROOT / "Makefile").read_text()
    (parts,) = re.findall(r"^PARTS := (.*)$", text, re.MULTILINE)
    rules = re.findall(r"^(test-[-a-z ]+):", text, re.MULTILINE)
    assert sorted(parts.split()) == sorted(["check", *" ".join(rules).split()])


@pytest.mark.parametrize("module", ["raylaunch", "raylaunch.cli.main"])
def test_the_door_is_light(module):
    """Neither `import raylaunch` nor the command line's entry loads what takes long before it is needed."""
    assert imported_by(module).isdisjoint({"ray", "torch", "omegaconf"})


@pytest.mark.parametrize("module", ["raylaunch.cluster.run", "raylaunch.cluster.session.local_session"])
def test_driver_and_agent_need_no_torch(module):
    """It takes seconds to load, and only workers use it; and Ray is for clusters."""
    assert imported_by(module).isdisjoint({"torch", "ray"})


def test_agents_on_a_cluster_need_no_torch():
    """As those without one."""
    assert "torch" not in imported_by("raylaunch.cluster.session.ray_session")


def test_workers_load_nothing_of_others():
    """The fork server and what runs in the user's process: the standard library and raylaunch, no more."""
    found = imported_by("raylaunch.worker.runtime.boot", "raylaunch.node.forkserver.server")
    assert found - sys.stdlib_module_names == {"raylaunch"}
