"""Records which modules a worker imports, for `preload: auto`: the fork server imports them before the next attempt.

Each worker of an attempt appends records, which are lines of JSON, to one memory file that the fork server made.
Local rank 0 records every module; the others only record how the script changed their environment, so that variables
that differ between workers are known.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from types import ModuleType

from raylaunch.worker.cpython_internals import encoded_environment, is_importing
from raylaunch.worker.runtime.server_file import ServerFile

_MAX_MODULES = 20_000
"""A script that generates modules may import any number of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRecord:
    """The start of one module's import; with an empty name, a change of the environment alone."""

    local_rank: int
    name: str
    locations: tuple[str, ...]
    """A top-level module's file or folders; the folder that a submodule is in."""
    env: dict[str, str | None]
    """Variables that differed from the environment that the worker was given; None for one that was removed."""


class ImportRecorder:
    """A finder on `sys.meta_path` that records what is looked for and never finds anything."""

    def __init__(self, file: ServerFile, local_rank: int) -> None:
        self._file: ServerFile | None = file
        self._local_rank = local_rank
        self._initial_env = dict(os.environ)
        self._recorded: set[str] = set()
        self._last_raw_env = dict(encoded_environment())
        self._env_changes: dict[str, str | None] = {}
        os.register_at_fork(after_in_child=self._disable)

    def install(self) -> None:
        """Record all imports from now on."""
        sys.meta_path.insert(0, self)

    def _disable(self) -> None:
        """Record nothing more: in a child process, which is no worker, or after an error."""
        self._file = None

    def find_spec(self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None) -> None:
        """Record the first import of a module."""
        if self._file is None or fullname in self._recorded or not is_importing(2):
            return
        self._recorded.add(fullname)
        try:
            self._record(fullname, path)
        except Exception:  # noqa: BLE001
            self._disable()  # an import must not fail because the script has replaced something that is used here

    def _record(self, name: str, path: Sequence[str] | None) -> None:
        changed = self._update_env_changes()
        if self._local_rank == 0:
            self._write(name, _locations(name, path))
        elif changed:
            self._write("", ())

    def _update_env_changes(self) -> bool:
        if self._last_raw_env == encoded_environment():
            return False
        self._last_raw_env = dict(encoded_environment())
        names = self._initial_env.keys() | os.environ.keys()
        changed = (name for name in names if self._initial_env.get(name) != os.environ.get(name))
        self._env_changes = {name: os.environ.get(name) for name in changed}
        return True

    def _write(self, name: str, locations: tuple[str, ...]) -> None:
        if self._file is not None and len(self._recorded) < _MAX_MODULES:
            line = json.dumps([self._local_rank, name, locations, self._env_changes])
            self._file.append(line.encode() + b"\n")
        else:
            self._disable()


def read_records(data: bytes) -> Iterator[ImportRecord]:
    """Yield all complete records in `data`, the content of a recorder's file.

    The file belongs to the workers, and a script may write to any descriptor: a line that is no record is left out.
    """
    for line in data.split(b"\n")[:-1]:
        try:
            local_rank, name, locations, env = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        if not (isinstance(local_rank, int) and isinstance(locations, list) and isinstance(env, dict)):
            continue
        values = [value for value in env.values() if value is not None]
        if all(isinstance(text, str) for text in (name, *locations, *values)):
            yield ImportRecord(local_rank=local_rank, name=name, locations=tuple(locations), env=env)


def _locations(name: str, path: Sequence[str] | None) -> tuple[str, ...]:
    folders = list(path) if path is not None else []
    if len(folders) == 1:
        return (folders[0],)
    try:
        found = PathFinder.find_spec(name, path)
    except Exception:  # noqa: BLE001
        return ()  # the import itself raises it
    if found is None:
        return ()
    return (found.origin,) if found.origin else tuple(found.submodule_search_locations or ())
