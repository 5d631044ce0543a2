"""To do something to a module right after it is loaded: at once where it is, else when the script imports it."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

Then = Callable[[types.ModuleType], None]


def when_imported(name: str, then: Then) -> None:
    """Call `then` with the module, before anybody else can use it. It must not raise."""
    module = sys.modules.get(name)
    if module is not None:
        then(module)
        return
    _finder.waiting.setdefault(name, []).append(then)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class OnImport:
    """A finder of `sys.meta_path`; it stands before the other finders only as long as somebody waits for a module."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Then]] = {}
        self._asking = ""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting or fullname == self._asking:
            return None
        self._asking = fullname
        try:
            found = importlib.util.find_spec(fullname)
        finally:
            self._asking = ""
        if found is not None and found.loader is not None:
            self._follow(found.loader)
        return found

    def _follow(self, loader: Any) -> None:
        original = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # ours, which hides the loader's own
            original(module)
            for then in self.waiting.pop(module.__name__, ()):
                then(module)
            if not self.waiting and self in sys.meta_path:
                sys.meta_path.remove(self)

        loader.exec_module = exec_module


_finder = OnImport()
