"""The rules of `nodes` that match a node, and placeholders that each node fills in."""

from __future__ import annotations

import pytest

from raylaunch.core.job.job import NodeRule
from raylaunch.core.job.node_rules import NodeAttributes, expand, matches, matching, nproc, problem, unmatched

NODE = NodeAttributes(
    address="10.0.0.7",
    labels={"zone": "a", "ray.io/node-id": "f00"},
    interfaces={"lo": ("127.0.0.1", "::1"), "eth0": ("10.0.0.7",), "ib0": ("10.1.3.4", "fd00::7")},
)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("10.0.0.7", True),
        ("10.0.0.70", False),
        ("10.0.0.*", True),
        ("10.0.0.[0-6]", False),
        ("*", True),
        ("10.0.0.0/24", True),
        ("10.1.0.0/16", True),
        ("10.1.3.4/16", True),
        ("10.2.0.0/16", False),
        ("fd00::/8", True),
        ("fc00:1::/32", False),
        ("10.1.3.4", False),
        ("label:zone=a", True),
        ("label:zone=b", False),
        ("label:zone=", False),
        ("label:rack=a", False),
        ("label:ray.io/node-id=f00", True),
    ],
)
def test_keys_that_match_a_node(key, expected):
    """Its address, a pattern, a subnet of any of its interfaces, or a label."""
    assert matches(key, NODE) is expected
    assert problem(key) == ""


def test_ipv6_addresses_have_several_notations():
    assert matches("fd00:0:0::7", NodeAttributes(address="fd00::7"))
    assert not matches("fd00::8", NodeAttributes(address="fd00::7"))


def test_host_name_is_in_no_subnet():
    """A host name matches patterns."""
    assert not matches("0.0.0.0/0", NodeAttributes(address="node-7"))
    assert matches("node-*", NodeAttributes(address="node-7"))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("10.1.0.0/33", "`10.1.0.0/33` is not a subnet like"),
        ("rack/7", "`rack/7` is not a subnet"),
        ("label:zone", "`label:zone` is not of the form `label:name=value`"),
        ("label:=a", "is not of the form"),
        (" ", "the key is empty"),
    ],
)
def test_malformed_keys(key, message):
    """They have an error text, and match no node."""
    assert message in problem(key)
    assert not matches(key, NODE)


def test_last_matching_rule_counts():
    """Matching rules keep their order, and the last `nproc_per_node` counts."""
    rules = {
        "*": NodeRule(nproc_per_node=8),
        "label:zone=b": NodeRule(nproc_per_node=1),
        "10.0.0.7": NodeRule(nproc_per_node=7),
        "10.1.0.0/16": NodeRule(env={"A": "1"}),
    }
    assert list(matching(rules, NODE)) == ["*", "10.0.0.7", "10.1.0.0/16"]
    assert nproc(rules, NODE) == 7
    assert nproc({"10.1.0.0/16": NodeRule()}, NODE) is None


def test_unmatched_rules():
    """Subnets are not reported, because only a node knows all its addresses."""
    rules = {key: NodeRule() for key in ("10.0.0.8", "10.0.0.7", "label:zone=b", "10.9.0.0/16")}
    assert list(unmatched(rules, [NODE, NodeAttributes(address="10.0.0.9")])) == [
        "10.0.0.8",
        "label:zone=b",
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("${node_address}:29500", "10.0.0.7:29500"),
        ("$node_address", "10.0.0.7"),
        ("${interface:10.1.0.0/16}", "ib0"),
        ("=${interface:fd00::/8},${interface:10.0.0.0/24}", "=ib0,eth0"),
        ("/opt/x:$PATH", "/opt/x:/bin"),
        ("${PATH}s", "/bins"),
        ("$PATHS", "$PATHS"),
        ("${NOBODY} $nobody", "${NOBODY} $nobody"),
        ("$$PATH $${PATH}", "$PATH ${PATH}"),
        ("5$ ${ $1 ${}", "5$ ${ $1 ${}"),
    ],
)
def test_placeholders(value, expected):
    """The node's address, the name of an interface, variables of the node; other text is unchanged."""
    assert expand({"A": value}, NODE, {"PATH": "/bin"}) == {"A": expected}


def test_values_refer_only_to_the_former_environment():
    """A value cannot refer to another value of the same rule."""
    assert expand({"A": "1", "B": "$A"}, NODE, {"A": "0"}) == {"A": "1", "B": "0"}


def test_subnet_without_an_interface_is_an_error():
    """The message names the node and its interfaces."""
    message = (
        r"the node 10.0.0.7 has no interface in 10.9.0.0/16; its interfaces: lo \(127.0.0.1, ::1\), eth0 \(10.0.0.7\)"
    )
    with pytest.raises(ValueError, match=message):
        expand({"A": "${interface:10.9.0.0/16}"}, NODE, {})
    with pytest.raises(ValueError, match="its interfaces: none"):
        expand({"A": "${interface:10.9.0.0/16}"}, NodeAttributes(address="10.0.0.7"), {})
    with pytest.raises(ValueError, match=r"`10.9.0.0/99` is not a subnet"):
        expand({"A": "${interface:10.9.0.0/99}"}, NODE, {})
