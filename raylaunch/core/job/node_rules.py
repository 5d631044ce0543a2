"""The section `nodes` of a job: which of its rules match a node, and placeholders that each node fills in."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from raylaunch.core.job.job import NodeRule

_LABEL = "label:"
_INTERFACE = "interface:"
_PLACEHOLDER = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<braced>[^{}]*)\}|(?P<plain>[A-Za-z_][A-Za-z0-9_]*))")

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAttributes:
    """The attributes of a node that rules and placeholders refer to. Only the node itself knows its interfaces."""

    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    interfaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Addresses by interface name."""


def problem(key: str) -> str:
    """Return what is wrong with a key of `nodes`, or ""."""
    if key.startswith(_LABEL):
        name, equals, _ = key.removeprefix(_LABEL).partition("=")
        return "" if name and equals else f"`{key}` is not of the form `label:name=value`"
    if not key.strip():
        return "a node's address, a subnet or a label is expected, but the key is empty"
    if _is_subnet(key):
        try:
            _network(key)
        except ValueError:
            return f"`{key}` is not a subnet like `10.1.0.0/16` or `fd00::/8`"
    return ""


def matches(key: str, place: NodeAttributes) -> bool:
    """Whether a key of `nodes` matches this node."""
    if key.startswith(_LABEL):
        name, _, value = key.removeprefix(_LABEL).partition("=")
        return place.labels.get(name) == value
    if _is_subnet(key):
        known = [place.address, *(address for group in place.interfaces.values() for address in group)]
        return any(_is_in(address, key) for address in known)
    return fnmatchcase(place.address, key) or _same(place.address, key)


def matching(rules: Mapping[str, NodeRule], place: NodeAttributes) -> dict[str, NodeRule]:
    """Return the rules that match this node, in their order."""
    return {key: rule for key, rule in rules.items() if matches(key, place)}


def nproc(rules: Mapping[str, NodeRule], place: NodeAttributes) -> int | None:
    """Return `nproc_per_node` of the last matching rule that sets it; None if none does.

    The driver calls this before there is an agent on the node, so a subnet matches only the node's own address.
    """
    given = [rule.nproc_per_node for rule in matching(rules, place).values() if rule.nproc_per_node is not None]
    return given[-1] if given else None


def unmatched(rules: Mapping[str, NodeRule], places: Sequence[NodeAttributes]) -> Iterator[str]:
    """Yield the keys that match none of these nodes, without subnets: only the nodes know all their addresses."""
    for key in rules:
        if not _is_subnet(key) and not any(matches(key, place) for place in places):
            yield key


def expand(values: Mapping[str, str], place: NodeAttributes, environ: Mapping[str, str]) -> dict[str, str]:
    """Fill in `${node_address}`, `${interface:SUBNET}` and variables of `environ`, as `$PATH`; `$$` is a dollar.

    Unknown placeholders stay as they are. Raise ValueError for a subnet in which the node has no interface.
    """
    known = {**environ, "node_address": place.address}

    def fill(found: re.Match[str]) -> str:
        if found["dollar"]:
            return "$"
        name: str = found["plain"] or found["braced"]
        if name.startswith(_INTERFACE):
            return _interface(name.removeprefix(_INTERFACE), place)
        return known.get(name, found[0])

    return {name: _PLACEHOLDER.sub(fill, value) for name, value in values.items()}


def _interface(subnet: str, place: NodeAttributes) -> str:
    """The name of the interface that has an address in the subnet."""
    for name, addresses in place.interfaces.items():
        if any(_is_in(address, subnet) for address in addresses):
            return name
    have = ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in place.interfaces.items()) or "none"
    wrong = problem(subnet)
    msg = wrong or f"the node {place.address} has no interface in {subnet}; its interfaces: {have}"
    raise ValueError(msg)


def _is_subnet(key: str) -> bool:
    return "/" in key and not key.startswith(_LABEL)


def _network(text: str) -> _Network:
    return ipaddress.ip_network(text, strict=False)


def _is_in(address: str, subnet: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]) in _network(subnet)
    except ValueError:
        return False  # a host name, or no subnet, which `problem` reports


def _same(address: str, key: str) -> bool:
    """Whether both are the same IP address: IPv6 addresses have several notations."""
    try:
        return ipaddress.ip_address(address) == ipaddress.ip_address(key)
    except ValueError:
        return False
