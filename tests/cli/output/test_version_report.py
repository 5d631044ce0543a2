"""`raylaunch --version`, in environments that are made up: an interpreter without site-packages, and folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raylaunch.cli.output import version_report

_PACKAGE = Path(version_report.__file__).parents[2]


def _install(folder, name, version):
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _run(folder, *flags):
    """Return what the command prints where only the packages in a folder are installed, and which modules it loads."""
    if not (folder / "raylaunch").exists():
        (folder / "raylaunch").symlink_to(_PACKAGE)
    code = f"""if True:
        import atexit, sys
        sys.path.append({str(folder)!r})
        atexit.register(lambda: print(*sys.modules, file=sys.stderr))
        from raylaunch.cli.main import main
        sys.exit(main(["--version", *{flags!r}]))"""
    done = subprocess.run([sys.executable, "-ISc", code], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.split()


def test_all_is_installed(tmp_path):
    """The versions are read from metadata and from torch's file, and neither torch nor Ray is imported."""
    for name, version in [("ray", "2.55.1"), ("omegaconf", "2.3.0"), ("raylaunch", "0.7"), ("torch", "2.9.1+cu128")]:
        _install(tmp_path, name, version)
    _install(tmp_path, "nvidia-nccl-cu12", "2.27.5")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart.so')\n")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.9.1+cu128'\ncuda: str = '12.8'\nhip = None\n")
    printed, modules = _run(tmp_path, "--json")
    found = json.loads(printed)
    expected = {"raylaunch": "0.7", "torch": "2.9.1+cu128", "cuda": "12.8", "nccl": "2.27.5", "ray": "2.55.1"}
    assert found.items() >= {**expected, "omegaconf": "2.3.0"}.items()
    assert set(modules).isdisjoint({"torch", "ray", "omegaconf"})
    lines = _run(tmp_path)[0].splitlines()
    assert lines[0] == "raylaunch 0.7"
    assert "CUDA          12.8" in lines
    assert "NCCL          2.27.5" in lines


def test_nothing_is_installed(tmp_path):
    """What is missing is named as missing, without a traceback."""
    found = json.loads(_run(tmp_path, "--json")[0])
    assert {key for key, version in found.items() if version is None} >= {"raylaunch", "torch", "cuda", "nccl", "ray"}
    text = _run(tmp_path)[0]
    assert text.startswith("raylaunch unknown\n")
    assert "\ntorch         not installed\n" in text
    assert "\nNCCL          not in this torch\n" in text


@pytest.mark.parametrize(
    ("torch", "nccl"),
    [
        ("class cuda:\n class nccl:\n  version = staticmethod(lambda: (2, 21, 5))\n", "2.21.5"),
        ("raise OSError('libcudart.so: cannot open shared object file')\n", None),
    ],
)
def test_nccl_in_no_package(tmp_path, torch, nccl):
    """A torch with CUDA whose NCCL is in no package is asked itself; one that cannot be imported does no harm."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(torch)
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.6.0'\ncuda = '12.4'\n")
    found = json.loads(_run(tmp_path, "--json")[0])
    assert (found["torch"], found["cuda"], found["nccl"]) == ("2.6.0", "12.4", nccl)


def test_rocm(tmp_path):
    """A torch for AMD has ROCm in the place of CUDA."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.6.0'\ncuda = None\nhip = '6.2.4'\n")
    assert json.loads(_run(tmp_path, "--json")[0])["cuda"] == "ROCm 6.2.4"


def test_what_is_installed_here():
    """In this environment, nothing that raylaunch requires is missing, and text and JSON list the same."""
    found = version_report.versions()
    assert all(found[key] for key in ("raylaunch", "python", "torch", "ray", "omegaconf", "os", "kernel"))
    assert len(version_report.text(found).splitlines()) == len(json.loads(version_report.as_json(found)))
