"""The figures of docs/benchmarks.md, and which of them a run of the benches did not reproduce."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.bench.contenders import RAYLAUNCH, TORCHRUN
from tools.bench.figures import Figure, Outcome

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
LEAST_RATIO = 0.75
"""Of a claimed ratio to torchrun: one that is less is not reproduced. Ratios change less than times."""
MOST_TIMES = 1.5
"""Of a claimed median that has no peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One row. `figure`: the end of the figure's name; "" is the bench's own. `torchrun`: None, where it has no part."""

    bench: str
    figure: str
    ours: float
    torchrun: float | None
    commit: str

    @property
    def title(self) -> str:
        return f"{self.bench}: {self.figure}" if self.figure else self.bench

    def is_of(self, figure: Figure) -> bool:
        """Whether this is the figure of the row."""
        name = figure.name.strip(" +")
        return (
            re.fullmatch(rf"(.*[:,] )?{re.escape(self.figure)}", name) is not None
            if self.figure
            else name == self.bench
        )


def claims() -> list[Claim]:
    """All rows of the page's table."""
    body = PAGE.read_text(encoding="utf-8").partition("<!-- figures -->\n")[2].partition("<!-- /figures -->")[0]
    return [_claim(line) for line in body.splitlines()[2:]]


def _claim(row: str) -> Claim:
    _, name, ours, torchrun, _, _, commit = (cell.strip() for cell in row.strip().strip("|").split("|"))
    bench, figure = re.fullmatch(r"`([a-z-]+)` ?(.*)", name).groups()  # type: ignore[union-attr]
    value = _number(ours)
    assert value is not None, row
    return Claim(bench=bench, figure=figure, ours=value, torchrun=_number(torchrun), commit=commit)


def _number(cell: str) -> float | None:
    match = re.match(r"[\d.]+", cell)
    return float(match[0]) if match else None


def problem(claim: Claim, figure: Figure) -> str:
    """Return why a figure does not reproduce a row; "" if it does."""
    ours = figure.median(RAYLAUNCH)
    if ours is None:
        return "not measured"
    better, there, here = figure.more_is_better, claim.ours, figure.times_better(TORCHRUN)
    if claim.torchrun and there and here is not None:
        claimed = there / claim.torchrun if better else claim.torchrun / there
        return "" if here >= LEAST_RATIO * claimed else f"{here:.3g} times better than torchrun, {claimed:.3g} there"
    is_met = ours * MOST_TIMES >= there if better else ours <= there * MOST_TIMES
    return "" if is_met else f"{ours:.3g}, {there:.3g} there"


def text(outcomes: Mapping[str, Outcome]) -> str:
    """What became of the rows whose bench was run, and how many others there are."""
    run = [claim for claim in claims() if claim.bench in outcomes]
    found = {}
    for claim in run:
        figures = [figure for figure in outcomes[claim.bench].figures if claim.is_of(figure)]
        found[claim.title] = problem(claim, figures[0]) if figures else "there is no such figure"
    missed = [f"  {title}: {why}" for title, why in found.items() if why]
    head = f"{PAGE.name}: {len(run) - len(missed)} of {len(run)} rows reproduced, {len(claims()) - len(run)} not tried"
    return "\n".join([head, *(["not reproduced:"] if missed else []), *missed])
