"""The runs of a cluster: the entry of each is in the key-value store of the cluster's head while the run lasts.

The entries tell commands on any machine of the cluster where the driver of a run answers. Anyone with the token of the
cluster may read them, and so ask the drivers: such a person may run code in the cluster anyway.
"""

from __future__ import annotations

import contextlib
import os
import secrets as random
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from types import ModuleType

from raylaunch.cluster import registry_key
from raylaunch.cluster.driver import run_registry
from raylaunch.cluster.driver.run_registry import RegisteredRun, RegistryEntry
from raylaunch.cluster.registry_key import RENEW_SECONDS
from raylaunch.cluster.session import discovery
from raylaunch.core.job.job import RayOptions
from raylaunch.node.protocol.acceptor import SecretAddress

_NAMESPACE, _PREFIX = registry_key.NAMESPACE.encode(), registry_key.PREFIX.encode()
_ASK_SECONDS = 3.0
"""How long the head may take to answer."""
LIST_SECONDS = 6.0
"""How long it may take to find a cluster, and to read what runs there."""
STALE_SECONDS = 10 * RENEW_SECONDS
"""When a driver that does not answer counts as gone, after it wrote its entry last. Clocks may differ by minutes."""


@contextlib.contextmanager
def entered(run: RegisteredRun, environ: Mapping[str, str], warn: Callable[[str], None]) -> Iterator[RegistryEntry]:
    """Keep a run in its user's registry, and in its cluster's registry if others reach it. `warn` takes a message.

    A thread talks to the cluster's head, which may take long to answer. Where it cannot, the run goes on without.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_announce, args=(run, ended, warn), daemon=True, name="raylaunch-announce")
    if run.cluster and run.control is not None:
        thread.start()
    try:
        with run_registry.entered(run, environ, warn) as entry:
            yield entry
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join(_ASK_SECONDS)


def _announce(run: RegisteredRun, ended: threading.Event, warn: Callable[[str], None]) -> None:
    key = registry_key.registry_key(run.token or random.token_hex(8))  # the next driver's entry replaces this one

    def is_replaced() -> bool:
        found = run_registry.load(_internals().own_kept(key, _NAMESPACE, _ASK_SECONDS)) if run.is_detached else None
        return found is not None and found.control != run.control

    def write() -> None:
        value = run_registry.dump(replace(run, renewed=time.time())).encode()
        _internals().keep_in_head(key, value, _NAMESPACE, _ASK_SECONDS)

    try:
        write()
    except Exception as error:  # noqa: BLE001
        warn(f"other machines will not find this run: {error}")
    while not ended.wait(RENEW_SECONDS):
        with contextlib.suppress(Exception):
            if not is_replaced():
                write()
    with contextlib.suppress(Exception):
        if not is_replaced():
            _internals().keep_in_head(key, None, _NAMESPACE, _ASK_SECONDS)


def note_absence(token: str, why: str) -> RegisteredRun | None:
    """Renew the entry of a detached run that has no driver in command, with the reason, and return it.

    None: there is none, or the head does not answer.
    """
    key = registry_key.registry_key(token)
    with contextlib.suppress(Exception):
        run = run_registry.load(_internals().own_kept(key, _NAMESPACE, _ASK_SECONDS))
        if run is not None:
            value = run_registry.dump(replace(run, no_driver=why, renewed=time.time())).encode()
            _internals().keep_in_head(key, value, _NAMESPACE, _ASK_SECONDS)
        return run
    return None


def _internals() -> ModuleType:
    return import_module("raylaunch.cluster.ray_internals")


# For commands, which do not connect to the cluster.


def is_stale(run: RegisteredRun) -> bool:
    """Return whether the driver has not written the entry for so long that it must be gone if it does not answer."""
    return 0 < run.renewed < time.time() - STALE_SECONDS


def runs(environ: Mapping[str, str]) -> list[RegisteredRun]:
    """Return the runs of the cluster that this machine belongs to; none if there is none, or it does not answer."""
    found: list[RegisteredRun] = []
    if discovery.is_alone(RayOptions(), environ):
        return found
    thread = threading.Thread(target=lambda: found.extend(_runs()), daemon=True, name="raylaunch-cluster-runs")
    with _STDERR_LOCK, _no_stderr():
        thread.start()
        thread.join(LIST_SECONDS)
    return list(found)


_STDERR_LOCK = threading.Lock()
"""One thread at a time replaces stderr: of two, the second one would keep what the first has put there."""


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    """Let nothing reach stderr: Ray's C++ code writes warnings there, of a token that is refused, at any log level."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def _runs() -> Iterator[RegisteredRun]:
    with contextlib.suppress(Exception):  # there is no Ray, no token, or nobody who answers
        address = _address()
        if ":" in address:
            kept = _internals().kept_in_head(address, _PREFIX, _NAMESPACE, _ASK_SECONDS)
            yield from (run for value in kept.values() if (run := run_registry.load(value)) is not None)


def _address() -> str:
    return str(import_module("raylaunch.cluster.session.ray_session").find(RayOptions()))


def forget(gone: Collection[SecretAddress]) -> None:
    """Remove the entries of runs whose drivers are gone: at these addresses nobody answers."""
    with contextlib.suppress(Exception):
        address = _address()
        for key, value in _internals().kept_in_head(address, _PREFIX, _NAMESPACE, _ASK_SECONDS).items():
            run = run_registry.load(value)
            if run is not None and run.control in gone:
                _internals().remove_from_head(address, key, _NAMESPACE, _ASK_SECONDS)
