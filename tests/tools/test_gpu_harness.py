"""`make gpu` and `make gpu-bundle` themselves, without a GPU: what is missing is said, and no step stops the others."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

from tools.gpu import __main__ as program
from tools.gpu import bundle, environment, results, steps
from tools.gpu.results import StepResult, TestResult
from tools.gpu.steps import Runner, Step

FACTS = {"python": "3.12.3", "missing": [], "gpus": [], "torch": "2.13.0+cpu"}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (FACTS, "there is no CUDA GPU: torch 2.13.0+cpu sees none"),
        ({"missing": ["torch", "ray"], "gpus": []}, "these packages are missing: torch, ray"),
        ({"missing": [], "gpus": [], "error": "OSError: libcudart.so.13"}, "cannot import torch: OSError: libcudart"),
    ],
)
def test_what_is_missing_is_said(monkeypatch, tmp_path, capsys, facts, said):
    """Exit code 3, and nothing is run or written."""
    monkeypatch.setattr(environment, "facts", lambda _: facts)
    monkeypatch.setattr(environment, "driver", lambda: "")
    assert program.main(["--out", str(tmp_path / "out")]) == 3
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_bundle_for_another_python(monkeypatch, tmp_path, capsys):
    """Exit code 3 too."""
    (tmp_path / "ray-2.60.0-cp399-slim.tar.xz").touch()
    monkeypatch.setattr(environment, "WHEELS", tmp_path)
    assert program.main([]) == 3
    assert "are not for Python 3." in capsys.readouterr().err


FILES = {
    "conftest": "from tests.gpu.conftest import pytest_runtest_logreport, pytest_runtest_logstart",
    "test_good": "def test_one(record_property): record_property('seconds', 0.25)",
    "test_bad": "def test_one(): assert 1 + 1 == 3\ndef test_two(): pass",
    "test_stuck": "import subprocess, time\ndef test_one(): pass\n"
    "def test_two():\n    subprocess.Popen(['sleep', '{nap}'], start_new_session=True)\n"
    "    open('{hangs}', 'w').close()\n    time.sleep(1000)",
}


def test_no_step_stops_the_others(tmp_path, monkeypatch):
    """One passes, one fails, one hangs and is ended with all that it started; for the last one there is no time."""
    nap, hangs = 10**6 + os.getpid(), tmp_path / "hangs"

    class Process(subprocess.Popen):
        """The time of the one that hangs begins when it does: how long Python takes to start is no matter."""

        def wait(self, timeout=None):
            while timeout == 5.0 and self.poll() is None and not hangs.exists():
                time.sleep(0.02)
            return super().wait(timeout and timeout / 5)

    monkeypatch.setattr(steps.subprocess, "Popen", Process)
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text.replace("{nap}", str(nap)).replace("{hangs}", str(hangs)))
    names = ("stuck", "bad", "good")
    runner = Runner(python=Path(sys.executable), scratch=tmp_path, deadline=time.monotonic() + 999, env={}, at_once=3)
    found: dict[str, StepResult] = {}
    runner.run(
        [Step(name, 5.0 if name == "stuck" else 999.0, folder=tmp_path) for name in names],
        lambda one: found.update({one.name: one}),
    )
    late = Runner(python=Path(sys.executable), scratch=tmp_path, deadline=time.monotonic() + 5, env={})
    found["late"] = late.result(Step("good", 6.0, folder=tmp_path))
    assert {name: one.outcome for name, one in found.items()} == {
        "good": results.PASSED,
        "bad": results.FAILED,
        "stuck": results.HUNG,
        "late": results.NOT_RUN,
    }
    outcomes = {one.name: [test.outcome for test in one.tests] for one in found.values()}
    assert outcomes["bad"] == [results.FAILED, results.PASSED]
    assert outcomes["stuck"] == [results.PASSED, results.HUNG]
    assert found["good"].tests[0].figures == {"seconds": 0.25}
    assert "1 + 1" in found["bad"].tests[0].why
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"sleep {nap}" not in listed


def test_the_table(tmp_path):
    """A row for each test, with what it measured or why it failed, and one for a step without tests."""
    tests = [
        TestResult(test="a[1e9]", shows="It works", outcome="passed", seconds=1.0, figures={"restart": 0.12345}),
        TestResult(test="b", outcome="failed", why="assert 1 == 2\n\nmore"),
    ]
    head = {"at": "2026-01-01", "simulated": True, "machine": {"gpu": "NVIDIA H200", "nccl": None}}
    results.write(
        tmp_path / "gpu.json",
        head,
        [StepResult(name="x", outcome="failed", tests=tests), StepResult(name="y", outcome="hung")],
    )
    lines = results.table(json.loads((tmp_path / "gpu.json").read_text())).splitlines()
    assert lines[2:5] == [
        "| It works (1e9) | passed | 1.0 | restart 0.123 |",
        "| b | failed | 0.0 | assert 1 == 2 |",
        "| y | hung | 0.0 |  |",
    ]
    assert lines[-1].startswith("gpu NVIDIA H200. 2026-01-01. GPUs were simulated")


def test_what_is_packed_of_ray(tmp_path):
    """Ray without what no run uses, and its programs executable."""
    names = (
        "ray/__init__.py",
        "ray/jars/ray_dist.jar",
        "ray/dashboard/client/index.html",
        "ray/rllib/x.py",
        "ray/core/raylet",
    )
    with zipfile.ZipFile(tmp_path / "ray.whl", "w") as wheel:
        for name in names:
            member = zipfile.ZipInfo(name)
            member.external_attr = (0o100755 if name.endswith("raylet") else 0o100644) << 16
            wheel.writestr(member, name)
    bundle.slim(tmp_path / "ray.whl", tmp_path / "ray.tar.xz")
    environment.unpack(tmp_path / "ray.tar.xz", tmp_path / "site")
    found = [path for path in sorted((tmp_path / "site").rglob("*")) if path.is_file()]
    assert [str(path.relative_to(tmp_path / "site")) for path in found] == ["ray/__init__.py", "ray/core/raylet"]
    assert [path.stat().st_mode & 0o111 for path in found] == [0, 0o111]


def test_the_environment_of_a_bundle(monkeypatch, tmp_path):
    """Its packages come before those of this Python, which are there too."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    content = b"where = 'bundle'"
    (tmp_path / "wheels").mkdir()
    with tarfile.open(tmp_path / "wheels" / f"ray-2.60.0-{tag}-slim.tar.xz", "w:xz") as packed:
        entry = tarfile.TarInfo("omegaconf.py")
        entry.size = len(content)
        packed.addfile(entry, io.BytesIO(content))
    monkeypatch.setattr(environment, "WHEELS", tmp_path / "wheels")
    python = environment.prepare(tmp_path / "python")
    code = "import omegaconf, pluggy; print(omegaconf.where, pluggy.__name__)"
    done = subprocess.run([str(python), "-c", code], cwd="/", capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["bundle", "pluggy"], done.stderr


def test_the_project_in_a_bundle(tmp_path):
    """What `make gpu` runs is there, and the documentation is not."""
    bundle.copy_project(tmp_path)
    for name in (
        "Makefile",
        "raylaunch/cli/main.py",
        "tools/gpu/__main__.py",
        "tests/private_cluster.py",
        "conf/gpu.yaml",
    ):
        assert (tmp_path / name).is_file(), name
    assert not (tmp_path / "docs").exists()
    assert all(step.file.is_file() for step in steps.STEPS)
