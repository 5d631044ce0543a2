"""Values of the right and of wrong types, as they come out of a message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from raylaunch.core.field_types import checker
from raylaunch.core.job.job import StartMethod
from raylaunch.core.newtypes import RunTime


@dataclass(slots=True)
class Part:
    at: RunTime
    names: frozenset[str] = frozenset()


@dataclass(slots=True)
class Whole:
    parts: tuple[Part, ...]
    pair: tuple[str, int] | None = None
    env: Mapping[str, list[str]] = field(default_factory=dict)


RIGHT = Whole(parts=(Part(at=1), Part(at=0.5, names=frozenset({"a"}))), pair=("a", 1), env={"A": ["b"]})


def unpickled() -> Part:
    """Return a part as it comes out of a pickle that has one value too few."""
    return Part.__new__(Part)


@pytest.mark.parametrize(
    ("hint", "right", "wrong"),
    [
        (Whole, RIGHT, None),
        (Whole, RIGHT, Whole(parts=[Part(at=1)])),
        (Whole, RIGHT, Whole(parts=(Part(at="1"),))),
        (Whole, RIGHT, Whole(parts=(Part(at=1, names=frozenset({1})),))),
        (Whole, RIGHT, Whole(parts=(unpickled(),))),
        (Whole, RIGHT, Whole(parts=(), pair=("a", 1, 2))),
        (Whole, RIGHT, Whole(parts=(), pair=("a", "b"))),
        (Whole, RIGHT, Whole(parts=(), env={"A": ["b", 1]})),
        (Whole, RIGHT, Whole(parts=(), env=[("A", [])])),
        (Part | None, None, 0),
        (Literal["a", "b"], "a", "c"),
        (StartMethod, "spawn", 1),
        (list[Any], [1, "a"], ()),
        (type[Part], Part, 1),
    ],
)
def test_right_and_wrong_values(hint, right, wrong):
    assert checker(hint)(right)
    assert not checker(hint)(wrong)
