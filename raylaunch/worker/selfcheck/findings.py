"""The self-check's findings: outcomes and environments of all ranks become rows, and rows a table and an exit code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from raylaunch.core.job.secrets import HIDDEN, is_secret
from raylaunch.core.newtypes import StrEnum
from raylaunch.core.text import spans

_MAX_LINES = 6
"""Different accounts of one check that a row shows."""
_MAX_NUMBER = 999.5
"""A time that would be longer than three digits is given in the next unit."""
_VERSION_HINTS = {
    "torch": "install the same torch on all nodes",
    "nccl": "ranks with different NCCL versions may hang or crash when they first meet: install the same torch",
}
"""The versions that must be the same on all nodes; others only should be."""


class CheckStatus(StrEnum):
    """The result of a check."""

    OK = "ok"
    UNSUPPORTED = "not supported"
    SKIPPED = "skipped"
    WRONG = "wrong"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOutcome:
    """The result of one check on one rank."""

    status: CheckStatus
    text: str = ""
    seconds: float = 0.0
    late: bool = False
    """Whether it ended by a timeout."""
    raised: bool = False
    """Whether it raised an error of torch, after which the process group cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """The result of one check on all ranks. `part` is a backend, `nodes`, `versions` or `environment`."""

    part: str
    name: str
    status: CheckStatus
    lines: tuple[str, ...] = ()
    seconds: float | None = None
    hint: str = ""

    @property
    def result(self) -> str:
        """The result in a few words."""
        if self.status is CheckStatus.OK and self.seconds is not None:
            return f"ok, {_duration(self.seconds)}"
        short = len(self.lines) == 1 and self.status is not CheckStatus.WRONG
        if self.status is CheckStatus.INFO:
            return self.lines[0] if short else ""
        return f"{self.status}: {self.lines[0]}" if short else str(self.status)

    @property
    def details(self) -> tuple[str, ...]:
        """The lines that do not fit into `result`."""
        short = len(self.lines) == 1 and self.status is not CheckStatus.WRONG
        return (*(() if short else self.lines), *([f"hint: {self.hint}"] if self.hint else []))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """Where one rank runs, and with which versions and variables."""

    node: int
    """The node's rank."""
    host: str
    address: str
    """The source address of its packets to rank 0's node."""
    versions: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    """The variables of the backends: those whose names begin with NCCL_, GLOO_ or TORCH_NCCL_."""


def merge_outcomes(part: str, name: str, outcomes: Mapping[int, CheckOutcome]) -> CheckRow:
    """Return one row for the outcomes of a check by rank.

    A check whose result is not the same on all ranks is wrong. The earliest outcome comes first, because the others
    time out after one rank raises. A successful check with a text has the status INFO.
    """
    statuses = {outcome.status for outcome in outcomes.values()}
    slowest = max(outcome.seconds for outcome in outcomes.values())
    if statuses == {CheckStatus.OK}:
        texts = tuple(dict.fromkeys(outcome.text for outcome in outcomes.values() if outcome.text))
        return CheckRow(
            part=part, name=name, status=CheckStatus.INFO if texts else CheckStatus.OK, lines=texts, seconds=slowest
        )
    if len(statuses) == 1 and CheckStatus.WRONG not in statuses:
        return CheckRow(part=part, name=name, status=statuses.pop(), lines=(next(iter(outcomes.values())).text,))
    return CheckRow(
        part=part,
        name=name,
        status=CheckStatus.WRONG,
        lines=tuple(_lines_by_outcome(outcomes)),
        seconds=slowest,
        hint=_hint(part, name, late=any(outcome.late for outcome in outcomes.values())),
    )


def _lines_by_outcome(outcomes: Mapping[int, CheckOutcome]) -> Iterator[str]:
    """Yield a line for each different outcome, with its ranks; the successful ones come last."""
    accounts: dict[tuple[CheckStatus, str], list[int]] = {}
    for rank in sorted(outcomes, key=lambda rank: (outcomes[rank].late, outcomes[rank].seconds)):
        accounts.setdefault((outcomes[rank].status, outcomes[rank].text), []).append(rank)
    sorted_accounts = sorted(accounts.items(), key=lambda item: item[0][0] is CheckStatus.OK)
    for (status, text), ranks in sorted_accounts[:_MAX_LINES]:
        said = text if status is CheckStatus.WRONG else f"{status}{f': {text}' if text else ''}"
        yield f"{_ranks_text(ranks)}: {said}"
    if len(sorted_accounts) > _MAX_LINES:
        others = [rank for _, ranks in sorted_accounts[_MAX_LINES:] for rank in ranks]
        yield f"{_ranks_text(others)}: other accounts of it"


def absent_row(part: str, name: str, absent: Iterable[int]) -> CheckRow:
    """Return the row of a check from which these ranks did not return."""
    lines = (f"did not arrive: {_ranks_text(absent)}",)
    return CheckRow(part=part, name=name, status=CheckStatus.WRONG, lines=lines, hint=_hint(part, name, late=True))


def _hint(part: str, name: str, *, late: bool) -> str:
    """Return what the user should look at. A wrong value has no usual cause, and so no hint."""
    interface = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}.get(part)
    named = f"name the interface that joins the nodes with {interface}" if interface else "look at the nodes' network"
    if name == "init tcp://":
        return f"rank 0's node must take connections on any port: look for a firewall between the nodes, or {named}"
    if late and part == "nccl":
        return f"{named}; NCCL_DEBUG=INFO shows which way NCCL goes"
    if late or name == "init env://":
        return f"look for a firewall between the nodes, or {named}"
    return ""


def exit_code(rows: Iterable[CheckRow]) -> int:
    """Return 0 if no row is wrong, else 1."""
    return int(any(row.status is CheckStatus.WRONG for row in rows))


def table(rows: Sequence[CheckRow]) -> str:
    """Return all rows by part, and a summary, as plain text that ends with a newline."""
    width = max((len(row.name) for row in rows), default=0)
    lines: list[str] = []
    for part in dict.fromkeys(row.part for row in rows):
        lines.append(part)
        for row in rows:
            if row.part == part:
                lines.append(f"  {row.name.ljust(width)}  {row.result}".rstrip())
                lines += [f"      {detail}" for detail in row.details]
        lines.append("")
    return "\n".join([*lines, *_summary(rows)]) + "\n"


def _summary(rows: Sequence[CheckRow]) -> Iterator[str]:
    counts = {
        status: sum(row.status is status for row in rows) for status in CheckStatus if status is not CheckStatus.INFO
    }
    yield (
        ", ".join(f"{count} {_noun(status, count)}" for status, count in counts.items() if count) or "nothing to check"
    )
    wrong = [f"{row.part}: {row.name}" for row in rows if row.status is CheckStatus.WRONG]
    if wrong:
        yield f"wrong: {'; '.join(wrong)}"


def _noun(status: CheckStatus, count: int) -> str:
    return "warnings" if status is CheckStatus.WARNING and count > 1 else str(status)


def _duration(seconds: float) -> str:
    """Return a time as a text with three digits, in us, ms or s."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < _MAX_NUMBER:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.1f} s"


def _ranks_text(ranks: Iterable[int]) -> str:
    """Return `rank 3` or `ranks 0-3, 6`; a long list is cut."""
    numbers = tuple(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {spans(numbers)}"


def gpu_sharing_text(gpus: Sequence[str]) -> str:
    """Return which ranks use the same GPU as another rank, which NCCL refuses; `""` if none do. `gpus` is by rank."""
    ranks = [rank for rank, gpu in enumerate(gpus) if gpus.count(gpu) > 1]
    return f"{_ranks_text(ranks)} share GPUs, which NCCL does not take" if ranks else ""


def node_rows(environments: Mapping[int, RankEnvironment]) -> Iterator[CheckRow]:
    """Yield a row for each node: its host name, its address and its ranks."""
    nodes: dict[tuple[int, str, str], list[int]] = {}
    for rank, one in environments.items():
        nodes.setdefault((one.node, one.host, one.address), []).append(rank)
    for (node, host, address), ranks in sorted(nodes.items()):
        line = f"{host}, {address}, {_ranks_text(ranks)}"
        yield CheckRow(part="nodes", name=f"node {node}", status=CheckStatus.INFO, lines=(line,))


def version_rows(environments: Mapping[int, RankEnvironment]) -> Iterator[CheckRow]:
    """Yield a row of the versions that are the same on all nodes, then a row for each that differs."""
    names = list(dict.fromkeys(name for one in environments.values() for name in one.versions))
    found = {name: {rank: one.versions.get(name, "none") for rank, one in environments.items()} for name in names}
    shared = [f"{name} {next(iter(by_rank.values()))}" for name, by_rank in found.items() if _agree(by_rank)]
    yield CheckRow(
        part="versions", name="same on all nodes", status=CheckStatus.INFO, lines=(", ".join(shared) or "nothing",)
    )
    for name, by_rank in found.items():
        if not _agree(by_rank):
            hint = _VERSION_HINTS.get(name, "")
            status = CheckStatus.WRONG if hint else CheckStatus.WARNING
            lines = tuple(_lines_by_value(by_rank, environments))
            yield CheckRow(part="versions", name=name, status=status, lines=lines, hint=hint)


def env_rows(environments: Mapping[int, RankEnvironment]) -> Iterator[CheckRow]:
    """Yield a row for each variable of the backends. One that differs is a warning, unless it names devices."""
    for name in sorted({name for one in environments.values() for name in one.env}):
        by_rank = {rank: _value(one.env, name) for rank, one in environments.items()}
        is_fine = _agree(by_rank) or name.endswith(("_IFNAME", "_HCA", "_NET_DEVICES"))
        lines = (by_rank[0],) if _agree(by_rank) else tuple(_lines_by_value(by_rank, environments))
        status = CheckStatus.INFO if is_fine else CheckStatus.WARNING
        yield CheckRow(part="environment", name=name, status=status, lines=lines)


def _value(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "not set")
    return HIDDEN if name in env and is_secret(name) else value


def _agree(by_rank: Mapping[int, str]) -> bool:
    return len(set(by_rank.values())) == 1


def _lines_by_value(by_rank: Mapping[int, str], environments: Mapping[int, RankEnvironment]) -> Iterator[str]:
    owners: dict[str, list[int]] = {}
    for rank, value in sorted(by_rank.items()):
        owners.setdefault(value, []).append(rank)
    for value, ranks in owners.items():
        nodes = dict.fromkeys(f"node {environments[rank].node} {environments[rank].host}" for rank in ranks)
        yield f"{value} on {', '.join(nodes)}: {_ranks_text(ranks)}"
