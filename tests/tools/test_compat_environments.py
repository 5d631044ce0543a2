"""Environments: which Python they have, and that nothing of them is left."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.compat import __main__ as command
from tools.compat import combinations, environments
from tools.compat.combinations import Combination
from tools.compat.environments import Environment, InstallError, UnavailableError

THIS = "{}.{}".format(*sys.version_info)


def test_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{sys.base_prefix}/bin")
    assert environments.interpreter(THIS).name == f"python{THIS}"
    with pytest.raises(UnavailableError, match=r"there is no python2\.99 with venv and pip"):
        environments.interpreter("2.99")


def test_what_cannot_be_installed_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also if environments are kept: it would be taken for a complete one."""

    def install(found: Environment, *_: object) -> None:
        assert (found.source / "raylaunch" / "__init__.py").exists()
        msg = "no such version"
        raise UnavailableError(msg)

    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setattr(environments, "install", install)
    with pytest.raises(UnavailableError), environments.environment(Combination(py=THIS), keep=True):
        pass
    assert list(tmp_path.iterdir()) == []


def test_tests_that_take_too_long_are_ended(tmp_path: Path) -> None:
    found = Environment(tmp_path, tmp_path / "source")
    found.source.mkdir()
    found.python.parent.mkdir()
    found.python.symlink_to(sys.executable)
    log = tmp_path / "log"
    assert found.run(("-ISc", "print('began', flush=True); import time; time.sleep(1000)"), 4.0, log) is None
    assert "KeyboardInterrupt" in log.read_text()
    assert found.run(("-c", "raise SystemExit(3)"), 100.0, log) == 3


@pytest.mark.parametrize(("code", "error"), [(1, UnavailableError), (0, InstallError)])
def test_without_a_package_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, error: type[Exception]
) -> None:
    """Only if pip cannot install even a small package, the machine is to blame."""

    def run(_: Environment, args: tuple[str, ...], _seconds: float, log: Path) -> int:
        log.write_text("ERROR: no such version\n")
        return code if environments.SMALL_PACKAGE in args else 1

    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    monkeypatch.setattr(environments.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(Environment, "run", run)
    monkeypatch.setattr(environments, "MIN_FREE_BYTES", 0)
    (tmp_path / "venv").mkdir()
    with pytest.raises(error):
        environments.install(
            Environment(tmp_path / "venv", tmp_path / "venv" / "source"), Path(sys.executable), Combination(py=THIS)
        )


def test_today_pins_nothing_but_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And it has what the tests need."""
    installed: list[tuple[str, ...]] = []

    def run(_: Environment, args: tuple[str, ...], _seconds: float, _log: Path) -> int:
        installed.append(args)
        return 0

    monkeypatch.setattr(environments.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(Environment, "run", run)
    monkeypatch.setattr(environments, "MIN_FREE_BYTES", 0)
    (today,) = combinations.chosen("today")
    environments.install(Environment(tmp_path, tmp_path), Path(sys.executable), today)
    assert [word for word in installed[-1] if "==" in word] == ["torch==2.13.*"]
    assert ".[dev]" in installed[-1]
    assert not any("constraint" in word for word in installed[-1])


@pytest.mark.parametrize(
    ("error", "options", "code"),
    [
        (UnavailableError("no index"), (), 1),
        (UnavailableError("no index"), ("--if-available",), 0),
        (InstallError("no such version"), ("--if-available",), 1),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, options: tuple[str, ...], code: int
) -> None:
    def environment(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "environment", environment)
    monkeypatch.setattr(sys, "argv", ["compat", "--only", "cheap", *options])
    assert command.main() == code
