"""The runs that the head of a cluster keeps, with a head that is pretended."""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from dataclasses import replace

import pytest

from raylaunch.cluster import ray_internals
from raylaunch.cluster.control import cluster_registry
from raylaunch.cluster.driver import run_registry
from raylaunch.cluster.driver.run_registry import DriverProcess, RegisteredRun
from raylaunch.cluster.session import ray_session
from raylaunch.errors import ClusterError
from raylaunch.node.protocol.acceptor import SecretAddress

AT = SecretAddress(host="10.0.0.2", port=7, secret="s" * 64)


@pytest.fixture
def run() -> RegisteredRun:
    driver = DriverProcess.this()
    known = {"id": "one", "name": "a", "folder": "", "began": "2026-01-01", "cluster": "10.0.0.1:6379"}
    return RegisteredRun(driver=driver, control=AT, user="ann", **known)


@pytest.fixture
def head(monkeypatch) -> dict[bytes, bytes]:
    """What the head keeps."""
    kept: dict[bytes, bytes] = {}

    def keep(key: bytes, value: bytes | None, namespace: bytes, seconds: float) -> None:
        assert (namespace, seconds > 0) == (b"raylaunch", True)
        if value is None:
            del kept[key]
        else:
            kept[key] = value

    def having(address: str, prefix: bytes, namespace: bytes, seconds: float) -> dict[bytes, bytes]:
        assert (address, namespace, seconds > 0) == ("10.0.0.1:6379", b"raylaunch", True)
        return {key: value for key, value in kept.items() if key.startswith(prefix)}

    monkeypatch.setattr(ray_internals, "keep_in_head", keep)
    monkeypatch.setattr(ray_internals, "kept_in_head", having)
    monkeypatch.setattr(ray_internals, "own_kept", lambda key, *_: kept.get(key, b""))
    monkeypatch.setattr(ray_internals, "remove_from_head", lambda _, key, *__: kept.pop(key))
    monkeypatch.setattr(ray_session, "find", lambda _: "10.0.0.1:6379")
    return kept


ENVIRON = {"RAY_ADDRESS": "10.0.0.1:6379"}


def test_a_run_is_found_while_it_lasts(head, run, tmp_path, monkeypatch, until):
    """Its entry is written again if somebody has removed it. What is no entry is left out."""
    monkeypatch.setattr(cluster_registry, "RENEW_SECONDS", 0.01)
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    with cluster_registry.entered(run, environ, pytest.fail):
        until(lambda: cluster_registry.runs(ENVIRON), 100, "the entry")
        cluster_registry.forget([AT])
        until(lambda: cluster_registry.runs(ENVIRON), 100, "the entry again")
        head[b"run:other"] = b"{"
        (found,) = cluster_registry.runs(ENVIRON)
        assert replace(found, renewed=0.0) == run
        assert not cluster_registry.is_stale(found)
        until(lambda: cluster_registry.runs(ENVIRON)[0].renewed > found.renewed, 100, "it to be renewed")
        assert run_registry.runs(run_registry.folder(environ)) == [run]
        (path,) = run_registry.folder(environ).iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(head) == [b"run:other"]


def test_a_driver_that_was_replaced_leaves_the_entry_of_the_next_one(head, run, tmp_path, monkeypatch, until):
    """It stood still meanwhile: it neither writes its own entry again, nor removes that of the driver in command."""
    monkeypatch.setattr(cluster_registry, "RENEW_SECONDS", 0.01)
    run = replace(run, token="1234")
    looks: list[bytes] = []
    following = run_registry.dump(replace(run, control=replace(AT, port=8))).encode()

    def look(key: bytes, *_: object) -> bytes:
        if not looks:
            head[key] = following  # the next driver has just written it
        looks.append(key)
        return head[key]

    monkeypatch.setattr(ray_internals, "own_kept", look)
    with cluster_registry.entered(run, {"XDG_STATE_HOME": str(tmp_path)}, pytest.fail):
        until(lambda: len(looks) > 3, 100, "it to look")
    assert head == {b"run:1234": following}


def test_an_entry_that_nobody_renews(run):
    """Its driver is gone if it does not answer. Of an entry without a time that is not known."""
    ages = (None, 0.0, cluster_registry.STALE_SECONDS - 60, cluster_registry.STALE_SECONDS + 60)
    entries = [run if age is None else replace(run, renewed=time.time() - age) for age in ages]
    assert [cluster_registry.is_stale(entry) for entry in entries] == [False, False, False, True]


def test_only_lost_runs_are_forgotten(head, run):
    """Those whose drivers are gone."""
    head[b"run:one:1"] = run_registry.dump(run).encode()
    head[b"run:two:2"] = run_registry.dump(replace(run, control=replace(AT, port=8))).encode()
    cluster_registry.forget({AT})
    assert list(head) == [b"run:two:2"]


def test_a_head_that_does_not_take_it(head, run, tmp_path, monkeypatch, until):
    """The run goes on, and it is said once."""
    said: list[str] = []

    def refuse(*_: object) -> None:
        raise RuntimeError("the head is gone")

    monkeypatch.setattr(ray_internals, "keep_in_head", refuse)
    monkeypatch.setattr(cluster_registry, "RENEW_SECONDS", 0.01)
    with cluster_registry.entered(run, {"XDG_STATE_HOME": str(tmp_path)}, said.append):
        until(lambda: said, 100, "the message")
    assert said == ["other machines will not find this run: the head is gone"]


def test_a_cluster_that_cannot_be_asked_is_no_error(head, monkeypatch, capfd):
    """Nor is one that does not answer in time; what Ray's own code writes to stderr is not shown."""

    def refuse(_: object) -> str:
        os.write(2, b"[W] gcs_client.cc: Unauthenticated\n")
        raise ClusterError("it refused our token")

    monkeypatch.setattr(ray_session, "find", refuse)
    assert cluster_registry.runs(ENVIRON) == []
    print("after", file=sys.stderr)
    assert capfd.readouterr().err == "after\n"


def test_threads_that_ask_at_once_leave_stderr_as_it_was(head, monkeypatch, capfd):
    """Each replaces it for a while."""
    both, first = threading.Barrier(2), threading.Event()

    def slow(_: object) -> str:
        if not first.is_set():
            first.set()
            time.sleep(0.05)  # the second one begins meanwhile, and would end later
        else:
            time.sleep(0.1)
        raise ClusterError("it refused our token")

    def ask() -> None:
        both.wait()
        cluster_registry.runs(ENVIRON)

    monkeypatch.setattr(ray_session, "find", slow)
    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"


def test_without_a_cluster_nobody_is_asked(run, tmp_path, monkeypatch):
    """And Ray is not needed."""
    monkeypatch.setattr("raylaunch.cluster.session.discovery.signs", lambda *_: [])
    monkeypatch.setattr(ray_session, "find", pytest.fail)
    assert cluster_registry.runs({}) == []
    monkeypatch.setattr(ray_internals, "keep_in_head", pytest.fail)
    with cluster_registry.entered(replace(run, cluster=""), {"XDG_STATE_HOME": str(tmp_path)}, pytest.fail):
        pass
