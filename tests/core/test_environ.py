"""The environment of a process whose other threads change it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from raylaunch.core.environ import snapshot
from raylaunch.core.job.job import Job
from raylaunch.core.job.redaction import Redactor
from raylaunch.core.placement.environment import submitted


class Vanishing(Mapping[str, str]):
    """Lists its names at once, as `os.environ` does; afterwards the first of them is gone."""

    def __init__(self, **variables: str) -> None:
        self.variables = variables

    def __iter__(self) -> Iterator[str]:
        names = list(self.variables)
        self.variables.pop("GONE", None)
        return iter(names)

    def __getitem__(self, name: str) -> str:
        return self.variables[name]

    def __len__(self) -> int:
        return len(self.variables)


def environ() -> Vanishing:
    return Vanishing(GONE="0", API_TOKEN="a-long-secret")


def test_a_variable_that_vanishes_is_left_out():
    with pytest.raises(KeyError, match="GONE"):
        dict(environ())
    assert snapshot(environ()) == {"API_TOKEN": "a-long-secret"}


def test_a_run_may_start_while_another_thread_connects_to_ray():
    assert submitted(environ()) == {"API_TOKEN": "a-long-secret"}
    assert Redactor.of(Job(), environ()).hide("a-long-secret") == "***"
