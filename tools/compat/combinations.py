"""Which versions are tried together, and how `--only` names them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

NEWEST = "newest"
TODAY, CUDA = "today", "cuda"
PACKAGES = ("ray", "torch", "omegaconf")
_WORD = re.compile(r"(py|ray|torch|omegaconf)(\d+(?:\.\d+)*|newest)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Versions, of which the first parts may be given (`2.52`): then the last of these is taken. Or `newest`."""

    py: str = "3.11"
    ray: str = NEWEST
    torch: str = "2.13"
    omegaconf: str = NEWEST
    suite: str = ""
    """Other tests than those that are tried with each combination: a key of `checks.SUITES`."""

    def __str__(self) -> str:
        return self.suite or f"py{self.py} ray{self.ray} torch{self.torch} omegaconf{self.omegaconf}"

    def requirements(self) -> list[str]:
        """What pip installs; `ray[default]` has the dashboard's agent, as on a real cluster."""
        found = []
        for package in PACKAGES:
            version = getattr(self, package)
            name = "ray[default]" if package == "ray" else package
            found.append(name if version == NEWEST else f"{name}=={version}.*")
        return found


CHEAP = (
    Combination(ray="2.44"),
    Combination(py="3.13", torch=NEWEST),
)
"""For CI: another Ray; and another Python, with the newest torch. Each takes a few minutes."""

WHAT_PIP_INSTALLS = Combination(py="{}.{}".format(*sys.version_info), suite=TODAY)
"""For CI: no package is pinned, as for somebody who installs raylaunch today, but torch, whose newest may have CUDA."""

WITH_CUDA = Combination(torch=NEWEST, suite=CUDA)
"""A torch with CUDA, by which one sees without a GPU which processes touch CUDA."""

DEFAULT = (
    Combination(py="3.10", ray="2.44", torch="2.6", omegaconf="2.3"),
    CHEAP[1],
    Combination(py="3.12", ray="2.52", torch=NEWEST),
    Combination(),
    Combination(py="3.12", torch="2.9"),
    CHEAP[0],
)
"""The oldest and the newest first; each Python, each Ray, each torch and each omegaconf at least once."""


def chosen(only: str) -> list[Combination]:
    """Return what `--only` asks for: `cheap`, `today`, `cuda`, or words such as `py3.12 ray2.52`, between commas.

    Words pick the default combinations that have these versions; if none has, they make one. Raises
    ValueError.
    """
    if not only.strip():
        return [*DEFAULT]
    found: dict[Combination, None] = {}
    for words in only.split(","):
        named = {"cheap": CHEAP, TODAY: (WHAT_PIP_INSTALLS,), CUDA: (WITH_CUDA,)}.get(words.strip())
        found |= dict.fromkeys(named or _asked(words))
    return [*found]


def _asked(words: str) -> Iterator[Combination]:
    versions: dict[str, Any] = {}
    for word in words.split():
        match = _WORD.fullmatch(word)
        if match is None or (match[2] == NEWEST and match[1] == "py"):
            msg = f"`{word}` is no version such as py3.12, ray2.52, torch2.15 or omegaconf2.3"
            raise ValueError(msg)
        versions[match[1]] = match[2]
    picked = [each for each in DEFAULT if all(getattr(each, name) == value for name, value in versions.items())]
    yield from picked or [Combination(**versions)]
