"""`make dist`: are the wheel and the source archive complete, and do they run in clean environments?

    python -m tools.dist dist [--only "3.11 3.12"] [--python PATH] [--tag v0.1.0]

For each Python that the metadata names and this machine has, the wheel is installed with all that it requires in a new
environment, which is removed afterwards; it runs two workers there; then the archive takes its place and does the same.
With `--python`, the wheel is installed in the environment of that interpreter, whose packages must not change.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from tools.compat.environments import UnavailableError, interpreter

ROOT = Path(__file__).parents[1]
_SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("rank", os.environ["RANK"], "of", int(total))
dist.destroy_process_group()
"""
_METADATA = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
_JOB = "entrypoint: {script: train.py}\nnproc_per_node: 2\nray: {address: none}\nshow: all\n"
_REQUIRED = re.compile(r"(torch|ray|omegaconf|pyyaml|msgspec|cloudpickle|jinja2)==", re.IGNORECASE)


def supported() -> list[str]:
    """The versions of Python that the classifiers name."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)


def package_files() -> set[str]:
    """The files of the package, as paths below the project's folder."""
    found = [path for kind in ("*.py", "*.j2") for path in (ROOT / "raylaunch").rglob(kind)]
    return {str(path.relative_to(ROOT)) for path in found} | {"raylaunch/py.typed"}


def check_wheel(wheel: Path) -> None:
    """The wheel has every file of the package, and nothing else: no tests, and nothing that an earlier build left."""
    names, package = set(zipfile.ZipFile(wheel).namelist()), package_files()
    metadata = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/"
    described = {name for name in names if name.startswith(metadata)}
    extra = names - package - described
    assert package <= names, f"the wheel lacks {sorted(package - names)}"
    assert not extra, f"the wheel has {sorted(extra)} besides"
    assert described == {metadata + name for name in _METADATA}, described


def check_archive(archive: Path) -> None:
    """The archive has the package, its tests and its documentation, and nothing that Git does not know."""
    with tarfile.open(archive) as file:
        paths = [member.name.partition("/")[2] for member in file if member.isfile()]
    names = {path for path in paths if path not in ("PKG-INFO", "setup.cfg") and ".egg-info/" not in path}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    tracked = set(listed.stdout.split("\n"))
    wanted = package_files() | {
        name
        for name in tracked
        if name.startswith(("tests/", "docs/", "tools/", "examples/", "conf/"))
        or name in ("README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "Makefile", "constraints.txt")
    }
    assert wanted <= names, f"the archive lacks {sorted(wanted - names)}"
    assert names <= tracked, f"the archive has {sorted(names - tracked)} besides"


def check_tag(tag: str) -> None:
    """The tag is the version of the metadata, and CHANGELOG.md has a section for it with a date."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^version = "(.+)"$', text, re.MULTILINE)
    assert tag == f"v{version}", f"the tag is {tag}, and pyproject.toml has {version}"
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    dated = re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE)
    assert dated, f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`"


def check_runs(bin_folder: Path, folder: Path) -> None:
    """The command says its versions, and runs two workers from flags and from a job file, far from this repository."""

    def run(*command: str) -> str:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RAY_", "PET_"))}
        done = subprocess.run(
            [str(bin_folder / command[0]), *command[1:]],
            cwd=folder,
            env=env,
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    versions = json.loads(run("raylaunch", "--version", "--json"))
    print(json.dumps(versions))
    assert all(versions[name] for name in ("raylaunch", "torch", "ray", "omegaconf")), versions
    where = run("python", "-c", "import raylaunch.worker; print(raylaunch.worker.__file__); raylaunch.launch")
    assert "site-packages" in where, where
    (folder / "train.py").write_text(_SCRIPT)
    (folder / "job.yaml").write_text(_JOB)
    for words in (("--standalone", "--nproc-per-node", "2", "train.py"), ("job.yaml",)):
        printed = run("raylaunch", *words)
        assert all(f"rank {rank} of 2" in printed for rank in (0, 1)), printed
    print("ran two workers from flags and from a job file")


def try_clean(python: Path, wheel: Path, archive: Path) -> None:
    """Install the wheel in a new environment of this Python, then the archive in its place, and run both."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run([str(python), "-m", "venv", str(folder / "venv")], check=True)
        inside = folder / "venv" / "bin" / "python"
        # The versions that the tests run with, so that a CPU build of torch is taken where one is at hand.
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / "pins.txt").write_text("".join(line for line in pins if _REQUIRED.match(line)))
        _pip(inside, "install", "--constraint", str(folder / "pins.txt"), str(wheel))
        _pip(inside, "check")
        check_runs(inside.parent, folder)
        _pip(inside, "install", "--no-deps", "--force-reinstall", str(archive))
        check_runs(inside.parent, folder)


def try_into(python: Path, wheel: Path) -> None:
    """Install the wheel in the environment of this Python, which keeps the packages that it has, and run it."""
    before = _installed(python)
    _pip(python, "install", str(wheel))
    assert _installed(python) >= before, f"pip has replaced {sorted(before - _installed(python))}"
    _pip(python, "check")
    with tempfile.TemporaryDirectory() as folder:
        check_runs(python.parent, Path(folder))


def _pip(python: Path, *words: str) -> None:
    subprocess.run([str(python), "-m", "pip", words[0], "--quiet", *words[1:]], check=True)


def _installed(python: Path) -> set[str]:
    command = [str(python), "-m", "pip", "freeze", "--exclude", "raylaunch"]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n"))


def main() -> int:
    """Check what is in the folder. Exit code 1 where no Python could be tried."""
    parser = argparse.ArgumentParser(prog="python -m tools.dist", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--only", default="", help="versions of Python, as in `3.11 3.12`; all that are supported without"
    )
    parser.add_argument("--python", type=Path, help="install the wheel in the environment of this interpreter")
    parser.add_argument("--tag", help="the tag of a release: it must be the version")
    options = parser.parse_args()
    (wheel,), (archive,) = (list(options.folder.resolve().glob(kind)) for kind in ("*.whl", "*.tar.gz"))
    check_wheel(wheel)
    check_archive(archive)
    if options.tag:
        check_tag(options.tag)
    if options.python:
        try_into(options.python, wheel)
        return 0
    tried = 0
    for version in options.only.split() or supported():
        try:
            python = interpreter(version)
        except UnavailableError as error:
            print(f"Python {version}: left out: {error}")
            continue
        print(f"Python {version}", flush=True)
        try_clean(python, wheel, archive)
        tried += 1
    return 0 if tried else 1


if __name__ == "__main__":
    sys.exit(main())
