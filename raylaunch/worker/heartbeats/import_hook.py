"""Calls a function when a module is imported, or at once if it already is."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

Callback = Callable[[types.ModuleType], None]


class ImportHook:
    """A finder that is the first on `sys.meta_path` as long as a callback waits for a module."""

    def __init__(self) -> None:
        self._callbacks: dict[str, list[Callback]] = {}
        self._resolving = ""

    def when_imported(self, name: str, callback: Callback) -> None:
        """Call `callback` with the module before its importer can use it. The callback must not raise."""
        module = sys.modules.get(name)
        if module is not None:
            callback(module)
            return
        self._callbacks.setdefault(name, []).append(callback)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find, with a loader that calls the callbacks (importlib's protocol)."""
        if fullname not in self._callbacks or fullname == self._resolving:
            return None
        self._resolving = fullname
        try:
            found = importlib.util.find_spec(fullname)
        finally:
            self._resolving = ""
        if found is not None and found.loader is not None:
            self._wrap(found.loader)
        return found

    def _wrap(self, loader: Any) -> None:
        original = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # this function, which hides the loader's own method
            original(module)
            for callback in self._callbacks.pop(module.__name__, ()):
                callback(module)
            if not self._callbacks and self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = exec_module


when_imported = ImportHook().when_imported
"""The hook of this process: `when_imported(name, callback)`."""
