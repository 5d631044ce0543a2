"""An environment of its own for each combination of versions, made with `venv` and pip.

It has a copy of raylaunch and of the tests, so that this folder may be edited while they run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.compat.combinations import PACKAGES, TODAY, Combination

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".compat"
TOOLS = ("pytest", "pytest-timeout", "hypothesis", "numpy", "setuptools>=77")
INSTALL_SECONDS = 1800.0
SMALL_PACKAGE = "iniconfig"
"""Installed first, to see whether there is a package index. pytest requires it."""
_ONE_TRY = ("--retries", "0", "--timeout", "30")
_INDEX_SECONDS = 120.0
MIN_FREE_BYTES = 20 * 2**30
"""A torch with CUDA takes 5 to 8 GB, and half of that before, when pip has downloaded it."""
_END_SECONDS = 60.0
_COPIED = ("raylaunch", "tests", "tools", "conf", "examples", "docs", "pyproject.toml", "README.md", "LICENSE")
_VERSIONS = """
import json, platform
from importlib.metadata import version
print(json.dumps({"py": platform.python_version(), **{name: version(name) for name in %r}}))
"""


class UnavailableError(Exception):
    """A combination that cannot be tried on this machine, and why."""


class InstallError(Exception):
    """A combination that pip does not install, though it reaches its index: its last errors."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A folder with a Python and the packages of a combination, in which raylaunch is installed too.

    `source`: the project's folder, from which it is installed: a copy, unless this Python itself is tried.
    """

    folder: Path
    source: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def versions(self) -> dict[str, str]:
        """Return what is installed: the exact versions, as in `Combination`."""
        code = _VERSIONS % (PACKAGES,)
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, timeout=100, check=True)
        return dict(json.loads(done.stdout))

    def env(self) -> dict[str, str]:
        """Return the variables of a shell in which the environment is activated."""
        path = os.pathsep.join((str(self.python.parent), os.environ.get("PATH", os.defpath)))
        return os.environ | {"PATH": path, "VIRTUAL_ENV": str(self.folder)}

    def run(self, args: Sequence[str], seconds: float, log: Path) -> int | None:
        """Run Python with arguments in the copy and return the exit code; None: it took too long."""
        command = [str(self.python), *args]
        with log.open("ab") as out:
            process = subprocess.Popen(
                command,
                cwd=self.source,
                env=self.env(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs: by SIGINT, upon which pytest ends what its fixtures have started."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)


@contextlib.contextmanager
def environment(combination: Combination, *, keep: bool) -> Iterator[Environment]:
    """Make the environment of a combination, and remove it afterwards. Raises UnavailableError and InstallError.

    `keep`: do not remove it; the next time it is used as it is.
    """
    python = interpreter(combination.py)
    folder = FOLDER / str(combination).replace(" ", "-")
    found = Environment(folder, folder / "source")
    try:
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _copy(found)
            install(found, python, combination)
        _copy(found)
        yield found
    finally:
        if not keep or not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)


HERE = Environment(Path(sys.prefix), ROOT)
"""This Python, with what is installed."""


def _copy(found: Environment) -> None:
    shutil.rmtree(found.source, ignore_errors=True)
    found.source.mkdir(parents=True)
    for name in _COPIED:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, found.source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, found.source)


def install(found: Environment, python: Path, combination: Combination) -> None:
    free = shutil.disk_usage(found.folder).free
    if free < MIN_FREE_BYTES:
        msg = f"only {free / 2**30:.0f} GB are free, and {MIN_FREE_BYTES / 2**30:.0f} are needed"
        raise UnavailableError(msg)
    subprocess.run([python, "-m", "venv", found.folder], check=True, timeout=200)
    log = found.folder / "pip.log"
    pip = ("-m", "pip", "install", "--quiet", "--no-cache-dir", "--disable-pip-version-check")
    if found.run((*pip, *_ONE_TRY, SMALL_PACKAGE), _INDEX_SECONDS, log) != 0:
        msg = f"pip cannot install {SMALL_PACKAGE}: its package index cannot be reached"
        raise UnavailableError(msg)
    tools, project = ((), ".[dev]") if combination.suite == TODAY else (TOOLS, ".")
    if found.run((*pip, *combination.requirements(), *tools, "--editable", project), INSTALL_SECONDS, log) != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR")]
        msg = "; ".join(lines[-2:]) or "pip failed, or took too long"
        raise InstallError(msg)
    (found.folder / "complete").touch()


def interpreter(version: str) -> Path:
    """Return a Python of this version, from PATH or of pyenv. Raises UnavailableError."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = (Path(folder, name) for folder in os.get_exec_path())
    for found in (*on_path, *sorted(pyenv.glob(f"{version}.*/bin/{name}"), reverse=True)):
        if found.exists() and _is_usable(found, version):
            return found
    msg = f"there is no {name} with venv and pip, neither on PATH nor among pyenv's"
    raise UnavailableError(msg)


def _is_usable(python: Path, version: str) -> bool:
    """Return whether it has that version: pyenv's shim of a version that is switched off ends with an error."""
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    return done.returncode == 0 and done.stdout.strip() == version
