"""The import manifest: which modules of a script the fork server may import ahead. Never the script's own files."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raylaunch.worker.runtime.import_recorder import ImportRecord
from raylaunch.worker.runtime.spec import WorkerSpec

_PACKAGES = ("site-packages", "dist-packages")

Entry = tuple[str, ...]
"""What decides where a script's imports come from: kind, target, working folder and PYTHONPATH."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedModule:
    """One module, and the variables that the script had set (None: removed) when it imported it."""

    name: str
    env: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportManifest:
    """All modules to import, in the order in which the script did."""

    entry: Entry
    parts: tuple[ImportedModule, ...] = ()
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """File locations of the installed top-level modules, by name."""
    own: frozenset[str] = frozenset()
    """Top-level modules that are the script's own."""
    apart: frozenset[str] = frozenset()
    """Variables that are not the same for all workers and attempts. Imports ahead do not set them."""

    def without(self, names: Iterable[str]) -> ImportManifest:
        """Return the manifest without these modules and their submodules."""
        left_out = tuple(names)
        inside = tuple(name + "." for name in left_out)
        kept = (part for part in self.parts if part.name not in left_out and not part.name.startswith(inside))
        return replace(self, parts=tuple(kept))


def entry(spec: WorkerSpec) -> Entry:
    """Return the entry of a worker."""
    return spec.kind, spec.target, spec.cwd, spec.env.get("PYTHONPATH", "")


def apart(workers: Iterable[WorkerSpec]) -> frozenset[str]:
    """Return the variables of workers that this process does not have, or has with another value."""
    names = {name for spec in workers for name, value in spec.env.items() if os.environ.get(name) != value}
    return frozenset(names)


def grown(manifest: ImportManifest, records: Sequence[ImportRecord], nproc: int) -> ImportManifest:
    """Return the manifest with what the import records of another attempt of `nproc` workers add to it."""
    records = [record for record in records if record.local_rank in range(nproc)]
    differing = manifest.apart | _differing(records, nproc)
    roots = _roots()
    parts = {part.name: part for part in manifest.parts}
    places, own = dict(manifest.places), set(manifest.own)
    for record in records:
        top = record.name.partition(".")[0]
        if not record.locations or record.name in sys.modules:
            continue
        if not all(place.startswith(roots) for place in record.locations):
            own |= {top} - sys.modules.keys()
            continue
        if top == record.name:
            places[top] = record.locations
        env = {name: value for name, value in record.env.items() if name not in differing}
        parts.setdefault(record.name, ImportedModule(name=record.name, env=env))
    return ImportManifest(
        entry=manifest.entry,
        parts=tuple(part for part in parts.values() if part.name.partition(".")[0] not in own),
        places=places,
        own=frozenset(own),
        apart=differing,
    )


def _differing(records: Sequence[ImportRecord], nproc: int) -> set[str]:
    """Return the variables that the script does not set to the same values in all workers."""
    values: list[dict[str, set[str | None]]] = [{} for _ in range(nproc)]
    for record in records:
        for name, value in record.env.items():
            values[record.local_rank].setdefault(name, set()).add(value)
    names = {name for mine in values for name in mine}
    return {name for name in names if any(mine.get(name) != values[0].get(name) for mine in values)}


def _roots() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed packages.

    Editable installs do not count, nor what PYTHONPATH adds, unless it is such a folder.
    """
    library = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    installed = (path for path in sys.path if os.path.basename(path) in _PACKAGES)
    return tuple(path.rstrip(os.sep) + os.sep for path in (*library, *installed))
