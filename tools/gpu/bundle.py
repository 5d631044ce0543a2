"""`make gpu-bundle`: a folder with all that `make gpu` needs on a machine without a network, besides Python and torch.

    python -m tools.gpu.bundle FOLDER [--python 3.12]

The folder has the project, as far as `make gpu` uses it, and in `wheels` the packages for that Python on x86-64: those
of `WHEELS` as they are, raylaunch itself, and Ray without what no run uses (`UNUSED`), compressed more tightly than a
wheel. NumPy and torch are taken to be there.
"""

from __future__ import annotations

import argparse
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_BYTES = 60 * 2**20
WHEELS = (
    *("omegaconf", "PyYAML", "msgspec", "cloudpickle", "Jinja2", "MarkupSafe"),
    *("pytest", "pytest-timeout", "iniconfig", "pluggy", "packaging", "Pygments", "hypothesis", "sortedcontainers"),
    *("click", "filelock", "jsonschema", "jsonschema-specifications", "referencing", "rpds-py", "attrs", "msgpack"),
    *("protobuf", "requests", "urllib3", "idna", "charset-normalizer", "certifi", "typing_extensions"),
    *("fsspec", "pydantic", "pydantic_core", "annotated-types", "typing-inspection", "tensorboardX"),
)
"""What raylaunch, the tests and Ray require, without Ray Train's pandas and pyarrow, which are too large."""
UNUSED = re.compile(r"ray/(jars|cpp|rllib|serve|llm|dashboard/client|tune/examples|train/examples)/|/tests?/")
"""Of Ray: its parts for Java and C++, the libraries that nothing here uses, and the web pages of the dashboard."""
PROJECT = ("Makefile", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "raylaunch", "conf", "examples")
TOOLS = ("__init__.py", "bench", "gpu")
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_FASTEST = 1
"""xz's preset: Ray becomes 10 % larger than with the default, in a fifth of the time."""


def copy_project(folder: Path) -> None:
    """Copy what git knows, or would add, of the parts that `make gpu` uses."""
    parts = [*PROJECT, "tests/*.py", "tests/gpu", *(f"tools/{name}" for name in TOOLS)]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *parts]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # else it was removed since the last commit
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def download(wheels: Path, python: str, *names: str) -> None:
    """Download the versions of constraints.txt for that Python."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={python}", "--implementation=cp", *(f"--platform={name}" for name in _PLATFORMS)]
    command += [f"--constraint={ROOT / 'constraints.txt'}", f"--dest={wheels}", *names]
    subprocess.run(command, check=True)


def slim(wheel: Path, target: Path) -> None:
    """Write a wheel of Ray as a tar file without what is unused, with the programs executable."""
    with (
        zipfile.ZipFile(wheel) as files,
        lzma.open(target, "wb", preset=_FASTEST) as out,
        tarfile.open(fileobj=out, mode="w") as packed,
    ):
        for member in files.infolist():
            if member.is_dir() or UNUSED.search(member.filename):
                continue
            entry = tarfile.TarInfo(member.filename)
            entry.size = member.file_size
            entry.mode = (member.external_attr >> 16) & 0o777 or 0o644
            with files.open(member) as content:
                packed.addfile(entry, content)


def make(folder: Path, python: str) -> int:
    """Make the folder anew, but for a Ray that was packed before; return its size in bytes."""
    wheels = folder / "wheels"
    packed = wheels / f"ray-{version('ray')}-cp{python.replace('.', '')}-slim.tar.xz"
    for path in [*folder.glob("*"), *folder.glob(".[!.]*")]:
        if path != wheels:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in wheels.glob("*"):
        if path != packed:
            path.unlink()
    wheels.mkdir(parents=True, exist_ok=True)
    copy_project(folder)
    download(wheels, python, *WHEELS)
    with tempfile.TemporaryDirectory() as scratch:
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={wheels}"]
        copy_project(Path(scratch, "project"))  # setuptools leaves files in the folder that it builds
        subprocess.run([*build, str(Path(scratch, "project"))], check=True)
        if not packed.exists():
            download(Path(scratch), python, "ray")
            (wheel,) = Path(scratch).glob("ray-*.whl")
            slim(wheel, Path(scratch, packed.name))
            shutil.move(Path(scratch, packed.name), packed)
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> int:
    """Exit code 1: the folder is larger than what can be carried."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu.bundle", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the Python of the machine with the GPU")
    options = parser.parse_args()
    size = make(options.folder, options.python)
    print(f"{options.folder}: {size / 2**20:.1f} MiB of at most {MOST_BYTES >> 20}; run `make gpu` in it")
    return 1 if size > MOST_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
