"""The nodes that joined, and the choice of the nodes of the next attempt."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_helpers import job

from raylaunch.core.machine.run_state import Membership, fitting
from raylaunch.core.placement.environment import Member
from tests.profiles import examples


def member(node: str, nproc: int = 2, host: str = "") -> Member:
    return Member(node=node, address=f"10.0.0.{ord(node)}", nproc=nproc, host=host or f"host-of-{node}")


def members(sizes: str | dict[str, int], nnodes: int | str = "1:99", **settings: object) -> Membership:
    """Return the members of a job, with these nodes joined."""
    found = Membership(job(nnodes, **settings))
    for node in sizes:
        found.add(member(node, sizes[node] if isinstance(sizes, dict) else 2))
    return found


def names(chosen: object) -> str:
    return "".join(one.node for one in chosen)


def test_all_nodes_are_chosen():
    """New nodes are in natural order."""
    assert names(members("cab").choose(())) == "abc"


def test_at_most_max_nodes_are_chosen():
    """Nodes of the last attempt come before new nodes, in their former order."""
    assert names(members("abcd", "1:3").choose("dc")) == "dca"


def test_fewer_than_min_nodes_are_not_enough():
    """With fewer than MIN nodes, `choose` returns no node."""
    few = members("a", "2:3")
    assert (few.choose("a"), few.enough) == ((), False)
    few.add(member("b"))
    assert (names(few.choose("a")), few.enough) == ("ab", True)


def test_drained_nodes_are_not_chosen():
    """Drained nodes stay members until they are removed."""
    found = members("ab", 2)
    found.drain("a")
    assert (len(found), found.nodes["a"].draining, found.enough, found.choose("a")) == (1, True, False, ())
    found.drain("a")
    assert found.remove("a").node == "a"
    assert (len(found), list(found.nodes)) == (1, ["b"])


def test_removed_nodes_are_not_chosen():
    """`remove` returns the member."""
    found = members("ab")
    assert found.remove("a") == member("a")
    assert names(found.choose("a")) == "b"


def test_on_host_returns_all_nodes_of_a_host():
    """Drained nodes are included."""
    found = members("")
    for node in "abc":
        found.add(member(node, host="x" if node != "b" else "y"))
    found.drain("a")
    assert found.on_host("x") == ["a", "c"]
    assert found.on_host("z") == []


def test_doubtful_hosts_are_chosen_last():
    """If they are needed, they keep their place in the order."""
    found = members("abc", "1:2")
    assert names(found.choose("ab", last={"host-of-a"})) == "bc"
    assert names(members("abc", "1:3").choose("ab", last={"host-of-a"})) == "abc"


def test_nodes_that_allow_no_multiple_are_replaced():
    """Other nodes are chosen if those of the last attempt make no world."""
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
def test_fitting_omits_as_few_workers_as_possible(sizes, multiple_of, left):
    """Nodes at the end are omitted first."""
    found = fitting([member(chr(97 + number), nproc) for number, nproc in enumerate(sizes)], multiple_of)
    assert tuple(one.nproc for one in found) == left


def test_fitting_omits_the_last_of_equal_nodes():
    """Nodes with the first ranks stay."""
    assert names(fitting([member(node) for node in "abc"], 4)) == "ab"


@examples(150)
@given(st.lists(st.integers(1, 6), max_size=7), st.integers(1, 9))
def test_fitting_finds_the_largest_world(sizes, multiple_of):
    """No other selection has more workers, or as many workers on more nodes."""
    found = fitting([member(chr(97 + number), nproc) for number, nproc in enumerate(sizes)], multiple_of)
    best = max(
        (sum(kept), len(kept))
        for some in range(len(sizes) + 1)
        for kept in itertools.combinations(sizes, some)
        if sum(kept) % multiple_of == 0
    )
    assert (sum(one.nproc for one in found), len(found)) == best


@examples(150)
@given(st.lists(st.integers(1, 4), max_size=7), st.integers(1, 6), st.integers(1, 3), st.integers(0, 3), st.randoms())
def test_enough_agrees_with_choose(sizes, multiple_of, least, more, random):
    """This holds for any former roster, any doubtful hosts, and after nodes were added, removed and drained."""
    found = Membership(job(f"{least}:{least + more}", multiple_of=multiple_of))
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
def test_enough_without_a_host(host, settings, enough):
    """The call removes no node, and drained nodes do not count."""
    found = members("abcd", **settings)
    found.drain("d")
    assert found.enough_without(host) is enough
    assert len(found) == 3


def test_enough_without_a_host_with_several_nodes():
    """Two of three nodes are on the host."""
    found = members("a", nnodes="2:3")
    found.add(member("b", host="h"))
    found.add(member("c", host="h"))
    assert not found.enough_without("h")
