"""What the terminal shows of which rank, and with what before each line."""

from __future__ import annotations

from typing import Any

import pytest

from raylaunch.core.job import Job
from raylaunch.core.streams import Mask, local_ranks, mask, view

NPROC = 2


def header(rank: int, stream: str = "stdout", *, world_size: int = 4, **settings: Any) -> str | None:
    return view(Job(**settings)).header(stream, rank, rank % NPROC, world_size)


def names(text: int | str) -> dict[int, str]:
    """For the first local ranks, the streams named, in short."""
    found = mask(text)
    return {
        local: "".join(stream[3] for stream in ("stdout", "stderr") if found.names(stream, local)) for local in range(4)
    }


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (0, ["", "", "", ""]),
        ("0", ["", "", "", ""]),
        (1, ["o", "o", "o", "o"]),
        ("2", ["e", "e", "e", "e"]),
        ("3", ["oe", "oe", "oe", "oe"]),
        ("0:3,1:0,2:1,3:2", ["oe", "", "o", "e"]),
        ("1:2", ["", "e", "", ""]),
        (" 0:1, 2:3 ", ["o", "", "oe", ""]),
        ("0:1,0:2", ["e", "", "", ""]),
    ],
)
def test_masks_are_torchruns(text, named):
    """A value for all local ranks, or a map in which those that are not named have none."""
    assert names(text) == dict(enumerate(named))


def test_local_ranks_may_have_many_digits():
    """torchrun takes one digit only."""
    found = mask("10:1,123:2")
    assert found.names("stdout", 10)
    assert found.names("stderr", 123)
    assert not found.names("stdout", 1)


@pytest.mark.parametrize(
    "text", ["", "4", 4, -1, "11", "0:1,", "0:1,1", "1,0:1", ",0:1", "0:4", "a:1", "0:1:2", "0=1", "3,3", "٣", "-1:1"]
)
def test_what_is_no_mask(text):
    """The error shows what was written, and what is expected."""
    with pytest.raises(ValueError, match="names no streams: 0"):
        mask(text)


@pytest.mark.parametrize(
    ("text", "ranks"), [("", None), (" ", None), ("0", {0}), ("0,1", {0, 1}), (" 0 , 12 ", {0, 12})]
)
def test_local_ranks_of_the_filter(text, ranks):
    """None stands for all."""
    assert local_ranks(text) == ranks


@pytest.mark.parametrize("text", ["a", "0,", "0-3", "-1"])
def test_what_is_no_list_of_local_ranks(text):
    """The error shows what was written."""
    with pytest.raises(ValueError, match=f"`{text}` is not a list of local ranks"):
        local_ranks(text)


@pytest.mark.parametrize(
    ("settings", "headers"),
    [
        # `show` alone: as it is where one rank is shown, else with the rank.
        ({}, ["", None, None, None]),
        ({"show": "2"}, [None, None, "", None]),
        ({"show": "0,3"}, ["[0] ", None, None, "[3] "]),
        ({"show": "all"}, ["[0] ", "[1] ", "[2] ", "[3] "]),
        ({"show": "none"}, [None] * 4),
        ({"show": "raw"}, [""] * 4),
        # A local rank is one of each node.
        ({"show": "raw", "local_ranks_filter": "1"}, [None, "", None, ""]),
        ({"show": "all", "local_ranks_filter": "0"}, ["[0] ", None, "[2] ", None]),
        ({"show": "0", "local_ranks_filter": "1"}, [None] * 4),
        # What `tee` names has torchrun's header.
        ({"show": "raw", "tee": 3}, ["[default0]:", "[default1]:", "[default0]:", "[default1]:"]),
        ({"show": "raw", "tee": "1:1"}, ["", "[default1]:", "", "[default1]:"]),
        ({"show": "raw", "tee": 2}, [""] * 4),
        ({"show": "raw", "tee": 1, "role": "trainer"}, [f"[trainer{local}]:" for local in (0, 1, 0, 1)]),
        ({"show": "0", "tee": 3}, ["[default0]:", None, None, None]),
        ({"show": "raw", "tee": 3, "local_ranks_filter": "0"}, ["[default0]:", None, "[default0]:", None]),
        # What only `redirects` names is not shown.
        ({"show": "raw", "redirects": 3}, [None] * 4),
        ({"show": "raw", "redirects": 2}, [""] * 4),
        ({"show": "raw", "redirects": "0:3"}, [None, "", None, ""]),
        ({"show": "all", "redirects": "0:1"}, [None, "[1] ", None, "[3] "]),
        ({"show": "raw", "redirects": 3, "tee": "1:3"}, [None, "[default1]:", None, "[default1]:"]),
    ],
)
def test_what_is_shown_of_stdout(settings, headers):
    """Two nodes with two workers each."""
    assert [header(rank, **settings) for rank in range(4)] == headers


def test_stderr_has_bits_of_its_own():
    """2 is stderr, 1 is stdout."""
    assert [header(0, stream, show="raw", tee=2) for stream in ("stdout", "stderr")] == ["", "[default0]:"]
    assert [header(0, stream, show="raw", redirects=1) for stream in ("stdout", "stderr")] == [None, ""]


def test_a_world_of_one_needs_no_names():
    """The only rank is shown as it is; `tee` means it."""
    assert header(0, show="all", world_size=1) == ""
    assert header(0, show="all", tee=1, world_size=1) == "[default0]:"
    assert view(Job(show="all")).shows_one(1)
    assert not view(Job(show="all")).shows_one(2)
    assert view(Job(show="3")).shows_one(8)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("[rank${rank}]: ", "[rank3]: "),
        ("${role_name}/$local_rank|", "trainer/1|"),
        ("$unknown ${rank} $", "$unknown 3 $"),
        ("plain", "plain"),
        ("", "[trainer1]:"),
        (None, "[trainer1]:"),
    ],
)
def test_the_prefix_is_a_template(template, text):
    """What it does not know, it leaves; an empty one is none, as under torchrun."""
    assert header(3, show="raw", tee=1, role="trainer", log_line_prefix_template=template) == text


@pytest.mark.parametrize(
    ("settings", "filtered"),
    [
        ({}, ["stdout 0", "stdout 1"]),
        ({"tee": 3}, ["stdout 0", "stdout 1"]),
        ({"tee": "1:1"}, ["stdout 1"]),
        ({"tee": 2}, ["stdout 0", "stdout 1"]),
        ({"local_ranks_filter": "0"}, ["stdout 0"]),
        ({"tee": "1:1", "local_ranks_filter": "0"}, []),
        ({"show": "none", "redirects": 3}, ["stdout 0", "stdout 1"]),
        ({"duplicate_stdout_filters": [], "duplicate_stderr_filters": ["E"]}, ["stderr 0", "stderr 1"]),
    ],
)
def test_what_is_filtered(settings, filtered):
    """What `tee` names, or all where it names nothing; whatever is shown."""
    found = view(Job(**({"duplicate_stdout_filters": ["loss", "acc"]} | settings)))
    assert [
        f"{stream} {local}" for stream in ("stdout", "stderr") for local in range(2) if found.needles(stream, local)
    ] == filtered


def test_the_texts_of_a_filter():
    """As they were given."""
    assert view(Job(duplicate_stderr_filters=["a", "b,c"])).needles("stderr", 0) == ("a", "b,c")
    assert mask(0) == Mask()
