"""Imports the modules of a manifest ahead of the script, and refuses those whose import the script could notice."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType

from raylaunch.node.preload.fork_safety import ProcessSnapshot
from raylaunch.node.protocol.import_manifest import ImportedModule, ImportManifest
from raylaunch.worker import cpython_internals

_PAUSE_RATIO = 2.0
"""Seconds of sleep for each second of CPU, so that the CPUs are left to the workers."""


class ImportRefusedError(Exception):
    """The import of a module has changed this process in a way that its workers must not inherit."""

    def __init__(self, name: str, why: str) -> None:
        """`why` is a predicate (`starts a process`), or empty where the module just cannot be imported."""
        super().__init__(name, why)
        self.name = name
        self.why = why


def import_all(manifest: ImportManifest, on_import: Callable[[str], None], *, in_a_hurry: bool) -> float:
    """Import all modules of the manifest, and return the CPU seconds that it took.

    `on_import` is called with a module's name before it is imported. `in_a_hurry` makes no pauses. Raises
    ImportRefusedError at the first module with a side effect.
    """
    snapshot, began = ProcessSnapshot.take(), time.process_time()
    watcher = _SideEffectWatcher(manifest, pause_ratio=0.0 if in_a_hurry else _PAUSE_RATIO)
    with watcher.installed():
        for module in manifest.parts:
            if module.name in sys.modules:
                continue
            on_import(module.name)
            with _environment_of(module, manifest.apart):
                failed = _import(module.name)
            why = watcher.side_effect or snapshot.side_effect() or _found_elsewhere(manifest.places)
            if why or (failed and _left_submodules(module.name)):
                raise ImportRefusedError(module.name, why)
            watcher.pause()
    return time.process_time() - began


def _import(name: str) -> bool:
    """Import a module; return whether that failed."""
    try:
        importlib.import_module(name)
    except BaseException:  # noqa: BLE001
        return True
    return False


def _left_submodules(name: str) -> bool:
    """Return whether a module that could not be imported left submodules: its next import would differ from a first."""
    return any(other.startswith(name + ".") for other in sys.modules)


def _found_elsewhere(places: Mapping[str, tuple[str, ...]]) -> str:
    """Return a predicate if a module was found in another place than by the script, else `""`."""
    for name, where in places.items():
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is None:
            continue
        found = (spec.origin,) if spec.origin else tuple(spec.submodule_search_locations or ())
        if found != where:
            return f"imports another `{name}` than the script"
    return ""


@contextlib.contextmanager
def _environment_of(module: ImportedModule, apart: frozenset[str]) -> Iterator[None]:
    """Set the variables that the script had set when it imported the module, except those in `apart`.

    Afterwards they are restored; changes that the import made itself stay.
    """
    before = dict(os.environ)
    for name, value in module.env.items():
        if name not in apart:
            _set_variable(name, value)
    given = dict(os.environ)
    try:
        yield
    finally:
        now = dict(os.environ)
        for name in given.keys() | now.keys():
            if given.get(name) == now.get(name):
                _set_variable(name, before.get(name))


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    elif os.environ.get(name) != value:
        os.environ[name] = value


class _SideEffectWatcher:
    """Notices imports of the script's own modules, and reads of variables that differ between workers.

    For the imports it is a finder on `sys.meta_path` that never finds anything.
    """

    def __init__(self, manifest: ImportManifest, pause_ratio: float) -> None:
        self.side_effect = ""
        self._own = manifest.own
        self._apart = manifest.apart
        self._pause_ratio = pause_ratio
        self._last_pause = time.process_time()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Record side effects of imports within the `with` block."""
        sys.meta_path.insert(0, self)
        try:
            with cpython_internals.environment_reads(self._on_read):
                yield
        finally:
            sys.meta_path.remove(self)

    def _on_read(self, name: str) -> None:
        if name in self._apart and not self.side_effect:
            self.side_effect = f"reads {name}, of which each worker has its own"

    def find_spec(self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> None:
        """Note that a module is looked for (importlib's protocol)."""
        if fullname in self._own and not self.side_effect:
            self.side_effect = f"imports `{fullname}`, which is the script's own"
        self.pause()

    def pause(self) -> None:
        """Sleep in proportion to the CPU time since the last pause."""
        if self._pause_ratio:
            time.sleep((time.process_time() - self._last_pause) * self._pause_ratio)
            self._last_pause = time.process_time()
