"""Which nodes make up a world."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from story import job

from raylaunch.core.ranks import Member
from raylaunch.core.world import Members, fitting


def member(node: str, nproc: int = 2, host: str = "") -> Member:
    return Member(node=node, address=f"10.0.0.{ord(node)}", nproc=nproc, host=host or f"host-of-{node}")


def members(sizes: str | dict[str, int], nnodes: int | str = "1:99", **settings: object) -> Members:
    """Of a job, and there already."""
    found = Members(job(nnodes, **settings))
    for node in sizes:
        found.add(member(node, sizes[node] if isinstance(sizes, dict) else 2))
    return found


def names(chosen: object) -> str:
    return "".join(one.node for one in chosen)


def test_all_that_are_there_are_chosen():
    """In natural order."""
    assert names(members("cab").choose(())) == "abc"


def test_no_more_than_max_are_chosen():
    """Survivors before newcomers, in the order that they had."""
    assert names(members("abcd", "1:3").choose("dc")) == "dca"


def test_fewer_than_min_are_no_world():
    """Not even the survivors."""
    few = members("a", "2:3")
    assert (few.choose("a"), few.enough) == ((), False)
    few.add(member("b"))
    assert (names(few.choose("a")), few.enough) == ("ab", True)


def test_drained_nodes_are_there_but_cannot_be_chosen():
    """They are known until they are removed."""
    found = members("ab", 2)
    found.drain("a")
    assert (len(found), found.nodes["a"].draining, found.enough, found.choose("a")) == (1, True, False, ())
    found.drain("a")
    assert found.remove("a").node == "a"
    assert (len(found), list(found.nodes)) == (1, ["b"])


def test_removed_nodes_are_gone():
    """Whoever removes one learns what it was."""
    found = members("ab")
    assert found.remove("a") == member("a")
    assert names(found.choose("a")) == "b"


def test_all_nodes_of_a_host_are_found():
    """Drained or not."""
    found = members("")
    for node in "abc":
        found.add(member(node, host="x" if node != "b" else "y"))
    found.drain("a")
    assert found.on("x") == ["a", "c"]
    assert found.on("z") == []


def test_doubtful_hosts_come_last():
    """They are taken where there is nobody else; then they keep their place in the order."""
    found = members("abc", "1:2")
    assert names(found.choose("ab", last={"host-of-a"})) == "bc"
    assert names(members("abc", "1:3").choose("ab", last={"host-of-a"})) == "abc"


def test_survivors_that_fit_nobody_give_way_to_others():
    """Where there is a world to be had, it is found."""
    found = members({"a": 2, "b": 2, "c": 3}, 2, multiple_of=4)
    assert found.enough
    assert names(found.choose("c")) == "ab"


@pytest.mark.parametrize(
    ("sizes", "multiple_of", "left"),
    [
        ((2, 2, 2), 1, (2, 2, 2)),
        ((2, 2, 2), 2, (2, 2, 2)),
        ((2, 2, 2), 4, (2, 2)),
        ((4, 3, 2), 2, (4, 2)),
        ((4, 2, 2), 4, (4, 2, 2)),
        ((2, 4, 2, 4), 8, (2, 4, 2)),
        ((8, 1, 1, 1), 8, (8,)),
        ((3, 3), 4, ()),
        ((1, 1, 3), 3, (3,)),
        ((), 4, ()),
    ],
)
def test_what_fits(sizes, multiple_of, left):
    """As few workers as possible go, from the end."""
    found = fitting([member(chr(97 + number), nproc) for number, nproc in enumerate(sizes)], multiple_of)
    assert tuple(one.nproc for one in found) == left


def test_the_last_of_equal_nodes_goes():
    """Those with the first ranks stay."""
    assert names(fitting([member(node) for node in "abc"], 4)) == "ab"


@settings(derandomize=True, deadline=None, database=None, max_examples=150)
@given(st.lists(st.integers(1, 6), max_size=7), st.integers(1, 9))
def test_no_larger_world_fits(sizes, multiple_of):
    """Of all that could be left, the most workers are, and then the most nodes."""
    found = fitting([member(chr(97 + number), nproc) for number, nproc in enumerate(sizes)], multiple_of)
    best = max(
        (sum(kept), len(kept))
        for some in range(len(sizes) + 1)
        for kept in itertools.combinations(sizes, some)
        if sum(kept) % multiple_of == 0
    )
    assert (sum(one.nproc for one in found), len(found)) == best


@settings(derandomize=True, deadline=None, database=None, max_examples=150)
@given(st.lists(st.integers(1, 4), max_size=7), st.integers(1, 6), st.integers(1, 3), st.integers(0, 3), st.randoms())
def test_enough_means_that_a_world_is_chosen(sizes, multiple_of, least, more, random):
    """Whoever survived, and whatever hosts are doubtful; and nodes may have come and gone."""
    found = Members(job(f"{least}:{least + more}", multiple_of=multiple_of))
    for number, nproc in enumerate((*sizes, 5, 3)):
        found.add(member(chr(97 + number), nproc))
    found.remove(chr(97 + len(sizes)))
    found.drain(chr(98 + len(sizes)))
    survivors = random.sample(sorted(found.nodes), len(found.nodes) // 2)
    for last in (set(), {f"host-of-{node}" for node in survivors}):
        chosen = found.choose(survivors, last=last)
        assert chosen or not found.enough
        assert not chosen or least <= len(chosen) <= least + more
        assert sum(one.nproc for one in chosen) % multiple_of == 0


@pytest.mark.parametrize(
    ("host", "settings", "enough"),
    [
        ("host-of-a", {"nnodes": "2:3"}, True),
        ("host-of-a", {"nnodes": 3}, False),
        ("elsewhere", {"nnodes": 3}, True),
        ("elsewhere", {"nnodes": 4}, False),
        ("host-of-a", {"nnodes": "1:3", "multiple_of": 4}, True),
        ("host-of-a", {"nnodes": "3:3", "multiple_of": 6}, False),
    ],
)
def test_whether_a_host_is_needed(host, settings, enough):
    """Asking takes nobody out; who is drained does not count."""
    found = members("abcd", **settings)
    found.drain("d")
    assert found.enough_without(host) is enough
    assert len(found) == 3


def test_a_host_with_several_nodes_is_needed_for_all_of_them():
    """Two of three nodes go with it."""
    found = members("a", nnodes="2:3")
    found.add(member("b", host="h"))
    found.add(member("c", host="h"))
    assert not found.enough_without("h")
