"""The self-check's findings: what each rank met becomes one row for all of them, rows become a table and a verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from raylaunch.core.words import spans

_MOST_LINES = 6
_LARGEST_NUMBER = 999.5


class Status(StrEnum):
    """How a row ends."""

    OK = "ok"
    UNSUPPORTED = "not supported"
    SKIPPED = "skipped"
    WRONG = "wrong"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one rank met in one check."""

    status: Status
    text: str = ""
    seconds: float = 0.0
    late: bool = False
    """It ended by a timeout, or not at all."""
    stuck: bool = False
    """It has not come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What all ranks together met in one check. `part` is a backend, `nodes` or `versions`."""

    part: str
    name: str
    status: Status
    lines: tuple[str, ...] = ()
    seconds: float | None = None
    hint: str = ""

    @property
    def result(self) -> str:
        """The row's end in a few words."""
        if self.status is Status.OK and self.seconds is not None:
            return f"ok, {duration(self.seconds)}"
        short = len(self.lines) == 1 and self.status is not Status.WRONG
        if self.status is Status.INFO:
            return self.lines[0] if short else ""
        return f"{self.status}: {self.lines[0]}" if short else str(self.status)

    @property
    def details(self) -> tuple[str, ...]:
        """What does not fit into `result`."""
        short = len(self.lines) == 1 and self.status is not Status.WRONG
        return (*(() if short else self.lines), *([f"hint: {self.hint}"] if self.hint else []))


def merge(part: str, name: str, outcomes: Mapping[int, Outcome]) -> Row:
    """One row for what all ranks met in a check.

    Whatever the ranks do not agree on is wrong, and what came first stands first: where one rank raises, the others
    time out later. A check that went well and has something to tell is information.
    """
    statuses = {outcome.status for outcome in outcomes.values()}
    slowest = max(outcome.seconds for outcome in outcomes.values())
    if statuses == {Status.OK}:
        texts = tuple(dict.fromkeys(outcome.text for outcome in outcomes.values() if outcome.text))
        return Row(part=part, name=name, status=Status.INFO if texts else Status.OK, lines=texts, seconds=slowest)
    if len(statuses) == 1 and Status.WRONG not in statuses:
        return Row(part=part, name=name, status=statuses.pop(), lines=(next(iter(outcomes.values())).text,))
    return Row(
        part=part,
        name=name,
        status=Status.WRONG,
        lines=tuple(_accounts(outcomes)),
        seconds=slowest,
        hint=_hint(part, name, late=any(outcome.late for outcome in outcomes.values())),
    )


def _accounts(outcomes: Mapping[int, Outcome]) -> Iterator[str]:
    """Each different account once, with its ranks; those with nothing to say come last."""
    accounts: dict[tuple[Status, str], list[int]] = {}
    for rank in sorted(outcomes, key=lambda rank: (outcomes[rank].late, outcomes[rank].seconds)):
        accounts.setdefault((outcomes[rank].status, outcomes[rank].text), []).append(rank)
    told = sorted(accounts.items(), key=lambda item: item[0][0] is Status.OK)
    for (status, text), ranks in told[:_MOST_LINES]:
        said = text if status is Status.WRONG else f"{status}{f': {text}' if text else ''}"
        yield f"{ranks_text(ranks)}: {said}"
    if len(told) > _MOST_LINES:
        yield f"{ranks_text([rank for _, ranks in told[_MOST_LINES:] for rank in ranks])}: other accounts of it"


def absent_row(part: str, name: str, absent: Mapping[int, str]) -> Row:
    """For a check that some ranks did not come back from; `absent` says where each of them was heard of last."""
    last: dict[str, list[int]] = {}
    for rank, where in sorted(absent.items()):
        last.setdefault(where, []).append(rank)
    lines = tuple(f"did not arrive: {ranks_text(ranks)}, last heard of in `{where}`" for where, ranks in last.items())
    return Row(part=part, name=name, status=Status.WRONG, lines=lines, hint=_hint(part, name, late=True))


def _hint(part: str, name: str, *, late: bool) -> str:
    """What to look at. A wrong value has no hint: it has no usual cause."""
    interface = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}.get(part)
    named = f"name the interface that joins the nodes with {interface}" if interface else "look at the nodes' network"
    if name == "init tcp://":
        return f"rank 0's node must take connections on any port: look for a firewall between the nodes, or {named}"
    if name == "init file://":
        return "the file system must have locks (flock) that hold between nodes; give another with `--file`"
    if late and part == "nccl":
        return f"{named}; NCCL_DEBUG=INFO shows which way NCCL goes"
    if late or name == "init env://":
        return f"look for a firewall between the nodes, or {named}"
    return ""


def exit_code(rows: Iterable[Row]) -> int:
    """0 where nothing is wrong."""
    return int(any(row.status is Status.WRONG for row in rows))


def table(rows: Sequence[Row]) -> str:
    """All rows by part, and the verdict: plain text, ending in a newline."""
    width = max((len(row.name) for row in rows), default=0)
    lines: list[str] = []
    for part in dict.fromkeys(row.part for row in rows):
        lines.append(part)
        for row in rows:
            if row.part == part:
                lines.append(f"  {row.name.ljust(width)}  {row.result}".rstrip())
                lines += [f"      {detail}" for detail in row.details]
        lines.append("")
    return "\n".join([*lines, *_verdict(rows)]) + "\n"


def _verdict(rows: Sequence[Row]) -> Iterator[str]:
    counts = {status: sum(row.status is status for row in rows) for status in Status if status is not Status.INFO}
    yield (
        ", ".join(f"{count} {_noun(status, count)}" for status, count in counts.items() if count) or "nothing to check"
    )
    wrong = [f"{row.part}: {row.name}" for row in rows if row.status is Status.WRONG]
    if wrong:
        yield f"wrong: {'; '.join(wrong)}"


def _noun(status: Status, count: int) -> str:
    return "warnings" if status is Status.WARNING and count > 1 else str(status)


def duration(seconds: float) -> str:
    """A time in the unit that fits it."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < _LARGEST_NUMBER:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.1f} s"


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-3, 6`; a long list is cut."""
    numbers = tuple(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {spans(numbers)}"
