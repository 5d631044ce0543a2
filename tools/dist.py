"""`make dist`: is a wheel complete, and does it run in a clean environment? Without Ray: that a package index has.

    python -m tools.dist dist/raylaunch-0.1.0-py3-none-any.whl [--python PATH]

Without `--python` the wheel is installed, with all that it requires, in a new environment that is removed afterwards;
with it, in the environment of that interpreter, whose packages must not change.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import venv
import zipfile
from pathlib import Path

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


def check_content(wheel: Path) -> None:
    """The wheel has every file of the package, and nothing else: no tests, and nothing that an earlier build left."""
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [path for kind in ("*.py", "*.j2") for path in (ROOT / "raylaunch").rglob(kind)]
    package = {str(path.relative_to(ROOT)) for path in files} | {"raylaunch/py.typed"}
    metadata = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info/"
    described = {name for name in names if name.startswith(metadata)}
    extra = names - package - described
    assert package <= names, f"the wheel lacks {sorted(package - names)}"
    assert not extra, f"the wheel has {sorted(extra)} besides"
    assert described == {metadata + name for name in _METADATA}, described


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


def _installed(python: Path) -> set[str]:
    command = [str(python), "-m", "pip", "freeze", "--exclude", "raylaunch"]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n"))


def main() -> None:
    """Check the wheel that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", type=Path)
    options = parser.parse_args()
    check_content(options.wheel)
    with tempfile.TemporaryDirectory() as folder:
        python = options.python or Path(folder, "venv", "bin", "python")
        install = ["-m", "pip", "install", "--quiet"]
        if options.python is None:
            venv.create(Path(folder, "venv"), with_pip=True)
            # What the tests run with, so that a CPU build of torch is taken where one is at hand.
            install += ["--constraint", str(ROOT / "constraints.txt")]
        before = _installed(python)
        subprocess.run([str(python), *install, str(options.wheel.resolve())], check=True)
        if options.python is not None:
            assert _installed(python) >= before, f"pip has replaced {sorted(before - _installed(python))}"
        subprocess.run([str(python), "-m", "pip", "check"], check=True)
        check_runs(python.parent, Path(folder))


if __name__ == "__main__":
    main()
