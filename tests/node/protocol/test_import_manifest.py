"""The import manifest: which of a script's imports are imported ahead, and with which environment variables."""

from __future__ import annotations

import os
import socket
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from raylaunch.node.preload.zygote import ImportRefused, ImportsDone, NothingImported, Zygote
from raylaunch.node.preload.zygote_client import ZygoteClient
from raylaunch.node.protocol.import_manifest import ImportedModule, ImportManifest, apart, entry, grown
from raylaunch.worker.runtime.import_recorder import ImportRecord
from raylaunch.worker.runtime.spec import WorkerSpec
from tests.node.harness import until

LIBRARY = sysconfig.get_path("stdlib")
SITE = next(path for path in sys.path if path.endswith("site-packages"))


def record(name: str, folder: str, *, local_rank: int = 0, **env: str | None) -> ImportRecord:
    where = (f"{folder}/{name}.py",) if folder else ()
    return ImportRecord(local_rank=local_rank, name=name, locations=where, env=env)


def manifest_of(*notes: ImportRecord, nproc: int = 1) -> ImportManifest:
    return grown(ImportManifest(entry=()), notes, nproc)


def test_records_of_workers_that_do_not_exist_are_left_out() -> None:
    """A script may have written them."""
    found = manifest_of(record("a", SITE, local_rank=2), record("b", SITE, local_rank=-1), record("c", SITE), nproc=2)
    assert [part.name for part in found.parts] == ["c"]


def test_the_manifest_has_installed_modules_in_order_and_none_of_the_scripts_own() -> None:
    """Nor modules without a file, or that are imported already.

    A package with any module of the script counts as its own.
    """
    found = manifest_of(
        record("b", SITE),
        record("mine", "/home/me"),
        record("b.c", SITE),
        record("a", LIBRARY),
        record("b", SITE),
        record("nowhere", ""),
        record("pytest", SITE),
        record("shared", SITE),
        record("shared.mine", "/home/me/shared"),
    )
    assert [part.name for part in found.parts] == ["b", "b.c", "a"]
    assert found.own == {"mine", "shared"}
    assert found.places["a"] == (f"{LIBRARY}/a.py",)


def test_variables_in_which_workers_differ_are_listed_apart() -> None:
    """Variables with the same value in all workers are set when the module is imported."""
    notes = [record("a", SITE, HOME="x"), record("b", SITE, HOME="x", CACHE="0")]
    others = [record("", "", local_rank=1, HOME="x"), record("", "", local_rank=1, HOME="x", CACHE="1")]
    alone, together = manifest_of(*notes), manifest_of(*notes, *others, nproc=2)
    assert [part.env for part in alone.parts] == [{"HOME": "x"}, {"HOME": "x", "CACHE": "0"}]
    assert [part.env for part in together.parts] == [{"HOME": "x"}, {"HOME": "x"}]
    assert (alone.apart, together.apart) == (set(), {"CACHE"})
    assert manifest_of(*notes, nproc=2).apart == {"HOME", "CACHE"}


def test_without_leaves_out_a_module_and_its_submodules() -> None:
    """But not modules whose names only begin with the same letters."""
    assert manifest("a", "a.b", "ab", "b", "b.a").without(["a", "b.a"]) == manifest("ab", "b")


def test_variables_that_the_fork_server_lacks_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or that have another value there."""
    monkeypatch.setenv("SAME", "1")
    monkeypatch.setenv("OTHER", "1")
    env = {"SAME": "1", "OTHER": "2", "RANK": "0"}
    spec = WorkerSpec(rank=0, local_rank=0, kind="script", target="a.py", env=env, cwd="/", stdout="", stderr="")
    assert apart([spec]) == {"OTHER", "RANK"}
    assert entry(spec) == ("script", "a.py", "/", "")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that the zygote can import."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "quick.py").write_text("")
    (tmp_path / "slow.py").write_text(
        "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass"
    )
    (tmp_path / "fails.py").write_text("1 / 0")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "__init__.py").write_text("from . import inner\n1 / 0")
    (tmp_path / "half" / "inner.py").write_text("")


@pytest.mark.usefixtures("installed")
def test_no_zygote_stays_for_imports_that_take_no_time() -> None:
    """A zygote whose imports are all quick reports that and exits; another one stays, and imports more on request."""
    assert zygote_reports(manifest("quick")) == [NothingImported()]
    assert zygote_reports(manifest("quick", "slow"), manifest("fails", "quick")) == [ImportsDone(), ImportsDone()]


@pytest.mark.usefixtures("installed")
def test_modules_ask_nvml_whether_there_are_gpus(tmp_path: Path) -> None:
    """As in the fork server; afterwards it is up to the script."""
    text = "import os\nopen({!r}, 'w').write(os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK', ''))"
    (tmp_path / "asks.py").write_text(text.format(str(tmp_path / "asked")))
    zygote_reports(manifest("asks"))
    assert (tmp_path / "asked").read_text() == "1"


@pytest.mark.usefixtures("installed")
def test_a_module_that_would_differ_from_the_scripts_is_refused() -> None:
    """A module at another path; one that fails, but leaves submodules of it in sys.modules."""
    elsewhere = replace(manifest("quick"), places={"quick": ("/elsewhere/quick.py",)})
    assert zygote_reports(elsewhere) == [ImportRefused(name="quick", why="imports another `quick` than the script")]
    assert zygote_reports(manifest("half")) == [ImportRefused(name="half", why="")]


def manifest(*names: str) -> ImportManifest:
    return ImportManifest(entry=(), parts=tuple(ImportedModule(name=name) for name in names))


def zygote_reports(*manifests: ImportManifest) -> list[object]:
    """Start a zygote, let it import these manifests, and return its reports."""
    client, reports = ZygoteClient(), []

    def fork(line: socket.socket) -> int:
        if pid := os.fork():
            return pid
        try:
            Zygote(line, os.getppid()).serve()
        finally:
            os._exit(1)

    client.start(fork)
    pid = client.pid
    try:
        for one in manifests:
            client.import_modules(one, in_a_hurry=True)
            reports.append(until(client.receive, "it reports nothing"))
    finally:
        client.kill()
        client.close_in_child()
        os.waitpid(pid, 0)
    return reports
