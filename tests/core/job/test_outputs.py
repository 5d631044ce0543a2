"""Which output of which rank the terminal shows, and with which prefix."""

from __future__ import annotations

from typing import Any

import pytest

from raylaunch.core.job.job import Job
from raylaunch.core.job.outputs import OutputMask, local_ranks, mask, view

NPROC = 2


def header(rank: int, stream: str = "stdout", *, world_size: int = 4, **settings: Any) -> str | None:
    """Return the prefix of lines of a rank, None if they are not shown. Each node has two workers."""
    return view(Job(**settings)).header(stream, rank, rank % NPROC, world_size, "r12i0n8")


def masked_streams(text: int | str) -> dict[int, str]:
    """Return the streams that a mask contains for the first four local ranks: o (stdout) and e (stderr)."""
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
def test_masks_are_as_in_torchrun(text, named):
    """One value for all local ranks, or a map; local ranks that are not in the map have no streams."""
    assert masked_streams(text) == dict(enumerate(named))


def test_masks_with_local_ranks_over_9():
    """torchrun accepts one digit only."""
    found = mask("10:1,123:2")
    assert found.names("stdout", 10)
    assert found.names("stderr", 123)
    assert not found.names("stdout", 1)


@pytest.mark.parametrize(
    "text", ["", "4", 4, -1, "11", "0:1,", "0:1,1", "1,0:1", ",0:1", "0:4", "a:1", "0:1:2", "0=1", "3,3", "٣", "-1:1"]
)
def test_malformed_masks(text):
    """The error shows the value and what is expected."""
    with pytest.raises(ValueError, match="names no streams: 0"):
        mask(text)


@pytest.mark.parametrize(
    ("text", "ranks"), [("", None), (" ", None), ("0", {0}), ("0,1", {0, 1}), (" 0 , 12 ", {0, 12})]
)
def test_local_ranks_filter(text, ranks):
    """None means all local ranks."""
    assert local_ranks(text) == ranks


@pytest.mark.parametrize("text", ["a", "0,", "0-3", "-1"])
def test_malformed_local_ranks_filter(text):
    """The error shows the value."""
    with pytest.raises(ValueError, match=f"`{text}` is not a list of local ranks"):
        local_ranks(text)


@pytest.mark.parametrize(
    ("settings", "headers"),
    [
        # `show` alone: no prefix if one rank is shown, else the rank.
        ({}, ["", None, None, None]),
        ({"show": "2"}, [None, None, "", None]),
        ({"show": "0,3"}, ["[0] ", None, None, "[3] "]),
        ({"show": "all"}, ["[0] ", "[1] ", "[2] ", "[3] "]),
        ({"show": "none"}, [None] * 4),
        ({"show": "raw"}, [""] * 4),
        # `local_ranks_filter` selects local ranks of each node.
        ({"show": "raw", "local_ranks_filter": "1"}, [None, "", None, ""]),
        ({"show": "all", "local_ranks_filter": "0"}, ["[0] ", None, "[2] ", None]),
        ({"show": "0", "local_ranks_filter": "1"}, [None] * 4),
        # Streams of `tee` have torchrun's prefix.
        ({"show": "raw", "tee": 3}, ["[default0]:", "[default1]:", "[default0]:", "[default1]:"]),
        ({"show": "raw", "tee": "1:1"}, ["", "[default1]:", "", "[default1]:"]),
        ({"show": "raw", "tee": 2}, [""] * 4),
        ({"show": "raw", "tee": 1, "role": "trainer"}, [f"[trainer{local}]:" for local in (0, 1, 0, 1)]),
        ({"show": "0", "tee": 3}, ["[default0]:", None, None, None]),
        ({"show": "raw", "tee": 3, "local_ranks_filter": "0"}, ["[default0]:", None, "[default0]:", None]),
        # Streams that are only in `redirects` are not shown.
        ({"show": "raw", "redirects": 3}, [None] * 4),
        ({"show": "raw", "redirects": 2}, [""] * 4),
        ({"show": "raw", "redirects": "0:3"}, [None, "", None, ""]),
        ({"show": "all", "redirects": "0:1"}, [None, "[1] ", None, "[3] "]),
        ({"show": "raw", "redirects": 3, "tee": "1:3"}, [None, "[default1]:", None, "[default1]:"]),
    ],
)
def test_prefixes_of_stdout(settings, headers):
    """On two nodes with two workers each, by global rank."""
    assert [header(rank, **settings) for rank in range(4)] == headers


def test_stderr_has_its_own_bit():
    """2 is stderr, 1 is stdout."""
    assert [header(0, stream, show="raw", tee=2) for stream in ("stdout", "stderr")] == ["", "[default0]:"]
    assert [header(0, stream, show="raw", redirects=1) for stream in ("stdout", "stderr")] == [None, ""]


def test_single_rank_has_no_prefix():
    """Except with `tee`."""
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
        ("${hostname}:${rank}: ", "r12i0n8:3: "),
        ("plain", "plain"),
        ("", "[trainer1]:"),
        (None, "[trainer1]:"),
    ],
)
def test_log_line_prefix_template(template, text):
    """Unknown variables stay as they are; an empty template means the default, as for torchrun."""
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
def test_filtered_streams(settings, filtered):
    """The streams of `tee`, or all streams without `tee`; what is shown does not matter."""
    found = view(Job(**({"duplicate_stdout_filters": ["loss", "acc"]} | settings)))
    assert [
        f"{stream} {local}" for stream in ("stdout", "stderr") for local in range(2) if found.needles(stream, local)
    ] == filtered


def test_texts_of_a_filter():
    assert view(Job(duplicate_stderr_filters=["a", "b,c"])).needles("stderr", 0) == ("a", "b,c")
    assert mask(0) == OutputMask()
