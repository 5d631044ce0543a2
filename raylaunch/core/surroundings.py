"""What the ranks' nodes are made of, for the self-check: who is where, and in what the nodes differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from raylaunch.core.checkup import Row, Status, ranks_text
from raylaunch.core.secrets import HIDDEN, is_secret

_MUST_AGREE = ("torch", "nccl")
_HINTS = {
    "torch": "install the same torch on all nodes",
    "nccl": "ranks with different NCCL versions may hang or crash when they first meet: install the same torch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Where one rank runs."""

    node: int
    """The node's rank."""
    host: str
    address: str
    """The one that its packets to rank 0's node bear."""
    versions: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    """The variables that steer the backends."""


def node_rows(surroundings: Mapping[int, Surroundings]) -> Iterator[Row]:
    """A row for each node: its ranks, name and address."""
    nodes: dict[tuple[int, str, str], list[int]] = {}
    for rank, one in surroundings.items():
        nodes.setdefault((one.node, one.host, one.address), []).append(rank)
    for (node, host, address), ranks in sorted(nodes.items()):
        line = f"{host}, {address}, {ranks_text(ranks)}"
        yield Row(part="nodes", name=f"node {node}", status=Status.INFO, lines=(line,))


def version_rows(surroundings: Mapping[int, Surroundings]) -> Iterator[Row]:
    """What all share in one row, then a row for each thing in which nodes differ."""
    names = list(dict.fromkeys(name for one in surroundings.values() for name in one.versions))
    found = {name: {rank: one.versions.get(name, "none") for rank, one in surroundings.items()} for name in names}
    shared = [f"{name} {next(iter(by_rank.values()))}" for name, by_rank in found.items() if _agree(by_rank)]
    yield Row(part="versions", name="same on all nodes", status=Status.INFO, lines=(", ".join(shared) or "nothing",))
    for name, by_rank in found.items():
        if not _agree(by_rank):
            status = Status.WRONG if name in _MUST_AGREE else Status.WARNING
            yield Row(
                part="versions",
                name=name,
                status=status,
                lines=tuple(_who_has_which(by_rank, surroundings)),
                hint=_HINTS.get(name, ""),
            )


def env_rows(surroundings: Mapping[int, Surroundings]) -> Iterator[Row]:
    """A row for each variable that steers a backend. Names of interfaces may well differ by node; others hardly."""
    for name in sorted({name for one in surroundings.values() for name in one.env}):
        by_rank = {rank: _value(one.env, name) for rank, one in surroundings.items()}
        if _agree(by_rank):
            yield Row(part="environment", name=name, status=Status.INFO, lines=(next(iter(by_rank.values())),))
        else:
            status = Status.INFO if _names_devices(name) else Status.WARNING
            lines = tuple(_who_has_which(by_rank, surroundings))
            yield Row(part="environment", name=name, status=status, lines=lines)


def _value(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "not set")
    return HIDDEN if name in env and is_secret(name) else value


def _names_devices(name: str) -> bool:
    return name.endswith(("_IFNAME", "_HCA", "_NET_DEVICES"))


def _agree(by_rank: Mapping[int, str]) -> bool:
    return len(set(by_rank.values())) == 1


def _who_has_which(by_rank: Mapping[int, str], surroundings: Mapping[int, Surroundings]) -> Iterator[str]:
    owners: dict[str, list[int]] = {}
    for rank, value in sorted(by_rank.items()):
        owners.setdefault(value, []).append(rank)
    for value, ranks in owners.items():
        nodes = dict.fromkeys(f"node {surroundings[rank].node} {surroundings[rank].host}" for rank in ranks)
        yield f"{value} on {', '.join(nodes)}: {ranks_text(ranks)}"
