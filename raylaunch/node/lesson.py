"""What the fork server may learn from a script's imports: installed modules, never the script's own files."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raylaunch.worker.imports import Note
from raylaunch.worker.spec import WorkerSpec

_PACKAGES = ("site-packages", "dist-packages")

Entry = tuple[str, ...]
"""What decides where a script's imports come from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One module to import, and the script's changes to the environment in force while it does."""

    name: str
    env: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """All modules to import, in the order in which the script did."""

    entry: Entry
    parts: tuple[Part, ...] = ()
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Where the installed top-level modules come from."""
    own: frozenset[str] = frozenset()
    """Top-level modules that are the script's own."""
    apart: frozenset[str] = frozenset()
    """Variables that are not the same for all workers and attempts."""

    def without(self, names: Iterable[str]) -> Lesson:
        """Less these modules, and those in them."""
        left_out = tuple(names)
        inside = tuple(name + "." for name in left_out)
        kept = (part for part in self.parts if part.name not in left_out and not part.name.startswith(inside))
        return replace(self, parts=tuple(kept))


def entry(spec: WorkerSpec) -> Entry:
    """Of a worker."""
    return spec.kind, spec.target, spec.cwd, spec.env.get("PYTHONPATH", "")


def apart(workers: Iterable[WorkerSpec]) -> frozenset[str]:
    """Variables that workers have, and we have not, or not so."""
    names = {name for spec in workers for name, value in spec.env.items() if os.environ.get(name) != value}
    return frozenset(names)


def grown(lesson: Lesson, notes: Sequence[Note], nproc: int) -> Lesson:
    """The lesson with what the notes of another attempt, of so many workers, add to it."""
    differing = lesson.apart | _differing(notes, nproc)
    roots = _roots()
    parts = {part.name: part for part in lesson.parts}
    places, own = dict(lesson.places), set(lesson.own)
    for note in notes:
        top = note.name.partition(".")[0]
        if not note.where or note.name in sys.modules:
            continue
        if not all(place.startswith(roots) for place in note.where):
            own |= {top} - sys.modules.keys()
            continue
        if top == note.name:
            places[top] = note.where
        env = {name: value for name, value in note.env.items() if name not in differing}
        parts.setdefault(note.name, Part(name=note.name, env=env))
    return Lesson(
        entry=lesson.entry,
        parts=tuple(part for part in parts.values() if part.name.partition(".")[0] not in own),
        places=places,
        own=frozenset(own),
        apart=differing,
    )


def _differing(notes: Sequence[Note], nproc: int) -> set[str]:
    """Variables that the script sets to something else in each worker."""
    values: list[dict[str, set[str | None]]] = [{} for _ in range(nproc)]
    for note in notes:
        for name, value in note.env.items():
            values[note.local_rank].setdefault(name, set()).add(value)
    names = {name for mine in values for name in mine}
    return {name for name in names if any(mine.get(name) != values[0].get(name) for mine in values)}


def _roots() -> tuple[str, ...]:
    """Folders of the standard library and of installed packages. Nothing else counts: not what is installed to be
    edited, nor what PYTHONPATH adds, unless it is such a folder.
    """
    library = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    installed = (path for path in sys.path if os.path.basename(path) in _PACKAGES)
    return tuple(path.rstrip(os.sep) + os.sep for path in (*library, *installed))
