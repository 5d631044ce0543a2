"""What is different on some nodes: which rules of `nodes` match a node, and values that each node fills in itself."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from raylaunch.core.job import NodeRule

_LABEL = "label:"
_INTERFACE = "interface:"
_PLACEHOLDER = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<braced>[^{}]*)\}|(?P<plain>[A-Za-z_][A-Za-z0-9_]*))")

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What rules and values may ask of a node. Its interfaces are known on the node alone."""

    address: str
    labels: Mapping[str, str] = field(default_factory=dict)
    interfaces: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Addresses by the interface's name."""


def problem(key: str) -> str:
    """`""`, or what is wrong with a key of `nodes`."""
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


def matches(key: str, place: Place) -> bool:
    """Whether a key of `nodes` means this node."""
    if key.startswith(_LABEL):
        name, _, value = key.removeprefix(_LABEL).partition("=")
        return place.labels.get(name) == value
    if _is_subnet(key):
        known = [place.address, *(address for group in place.interfaces.values() for address in group)]
        return any(_is_in(address, key) for address in known)
    return fnmatchcase(place.address, key) or _same(place.address, key)


def matching(rules: Mapping[str, NodeRule], place: Place) -> dict[str, NodeRule]:
    """The rules that mean this node, in their order."""
    return {key: rule for key, rule in rules.items() if matches(key, place)}


def nproc(rules: Mapping[str, NodeRule], place: Place) -> int | None:
    """The workers that the last matching rule with an opinion gives the node.

    The driver asks this before there is anything on the nodes, so a subnet matches the node's own address only.
    """
    given = [rule.nproc_per_node for rule in matching(rules, place).values() if rule.nproc_per_node is not None]
    return given[-1] if given else None


def matching_nobody(rules: Mapping[str, NodeRule], places: Iterable[Place]) -> Iterator[str]:
    """Keys that mean none of these nodes. Of a subnet only the nodes themselves can tell."""
    known = tuple(places)
    for key in rules:
        if not _is_subnet(key) and not any(matches(key, place) for place in known):
            yield key


def expand(values: Mapping[str, str], place: Place, environ: Mapping[str, str]) -> dict[str, str]:
    """Fill in `${node_address}`, `${interface:SUBNET}` and variables of `environ`, as `$PATH`; `$$` is a dollar.

    What is not known stays as it is.
    Raises ValueError for a subnet in which the node has no interface.
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


def _interface(subnet: str, place: Place) -> str:
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
        return False  # a host name, or no subnet; `problem` says so where it is the job's mistake


def _same(address: str, key: str) -> bool:
    """One IPv6 address may be written in many ways."""
    try:
        return ipaddress.ip_address(address) == ipaddress.ip_address(key)
    except ValueError:
        return False
