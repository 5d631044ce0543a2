"""Which combinations are tried, and how they are asked for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.compat import combinations
from tools.compat.combinations import CHEAP, DEFAULT, Combination

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_each_oldest_version_of_the_metadata_is_tried() -> None:
    text = PROJECT.read_text()
    bounds = {name: re.findall(rf'"{name}>=([\d.]+)"', text)[0] for name in ("ray", "torch", "omegaconf")}
    bounds["py"] = re.findall(r'^requires-python = ">=([\d.]+)"', text, re.MULTILINE)[0]
    assert {name: any(getattr(each, name) == bound for each in DEFAULT) for name, bound in bounds.items()} == (
        dict.fromkeys(bounds, True)
    )


def test_words_pick_or_make_a_combination() -> None:
    assert combinations.chosen("") == [*DEFAULT]
    assert combinations.chosen("py3.10") == [each for each in DEFAULT if each.py == "3.10"]
    assert combinations.chosen("py3.12 ray2.50.1") == [Combination(py="3.12", ray="2.50.1")]
    assert combinations.chosen("cheap, cheap, torch2.9") == [*CHEAP, *(each for each in DEFAULT if each.torch == "2.9")]


@pytest.mark.parametrize("words", ["python3.12", "ray", "pynewest", "torch2.", "torch 2.9"])
def test_words_that_are_no_version(words: str) -> None:
    with pytest.raises(ValueError, match="is no version such as"):
        combinations.chosen(words)


def test_what_is_installed() -> None:
    assert Combination(ray="newest", torch="2.13").requirements() == ["ray[default]", "torch==2.13.*", "omegaconf"]
