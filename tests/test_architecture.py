"""The layout of the code: which package may import which, what its files are called, and how long they are."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = ROOT / "raylaunch"
TESTS = ROOT / "tests"
ROOMS = ("cli", "cluster", "node", "worker", "core")

MODULES_PER_PACKAGE = 11
"""At most, `__init__` and `__main__` aside: "about ten"."""
LINES_PER_MODULE = 350
LINES_PER_FUNCTION = 55

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


def definitions(*kinds: type[ast.AST]) -> Iterator[tuple[Path, ast.AST]]:
    """Yield all nodes of these kinds in the program, each with its file."""
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, kinds):
                yield path, node


def docstring(path: Path) -> str:
    """Return the docstring of a module or package; "" if it has none."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""


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


def test_packages_are_small():
    """No package has more modules than a reader takes in at one look."""
    found: dict[str, int] = defaultdict(int)
    for path in modules():
        found[shown(path.parent)] += 1
    assert {name: count for name, count in found.items() if count > MODULES_PER_PACKAGE} == {}


def test_a_file_name_occurs_once():
    """Whoever opens a file by its name finds one."""
    places = defaultdict(list)
    for path in modules():
        places[path.name].append(shown(path))
    assert several(places) == {}


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
    tree = ast.parse(path.read_text())
    docs = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
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


@pytest.mark.parametrize("room", ROOMS)
def test_tests_mirror_the_code(room):
    """tests/<room>/<package>/test_<module>*.py tests that module; what is beside the packages tests several."""
    packages = {str(path.parent.relative_to(CODE / room)) for path in (CODE / room).rglob("__init__.py")}
    wrong = []
    for path in (TESTS / room).glob("**/test_*.py"):
        folder = path.parent.relative_to(TESTS / room)
        if folder.parts and str(folder) not in packages:
            wrong.append(f"{shown(path)}: {folder} is no package of {room}")
        names = {module.stem for module in (CODE / room).glob(f"{folder}/*.py" if folder.parts else "*/*.py")}
        about = [name for name in names if f"{path.stem}_".startswith(f"test_{name}_")]
        if folder.parts and not about:
            wrong.append(f"{shown(path)}: no module of {folder} is called so")
        if not folder.parts and path.stem.removeprefix("test_") in names:
            wrong.append(f"{shown(path)}: belongs into the folder of its package")
    assert wrong == []


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
