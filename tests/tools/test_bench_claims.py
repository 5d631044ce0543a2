"""`make bench` says which figures of docs/benchmarks.md it did not reproduce, and each figure says where it is from."""

from __future__ import annotations

import re
import subprocess

import pytest

from tools.bench import claims
from tools.bench.__main__ import BENCHES
from tools.bench.claims import Claim
from tools.bench.contenders import RAYLAUNCH, TORCHRUN
from tools.bench.figures import Figure, Outcome
from tools.docs import blocks

CLAIMS = claims.claims()


def figure(name: str, *, ours: float, torchrun: float | None = None, more_is_better: bool = False) -> Figure:
    samples = {RAYLAUNCH: (ours,)} | ({} if torchrun is None else {TORCHRUN: (torchrun,)})
    return Figure(name=name, what="", unit="s", samples=samples, more_is_better=more_is_better)


def test_each_row_names_a_bench_and_no_row_is_there_twice() -> None:
    assert {claim.bench for claim in CLAIMS} <= set(BENCHES)
    assert len({claim.title for claim in CLAIMS}) == len(CLAIMS)


def test_each_row_names_a_commit_of_this_project() -> None:
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=blocks.ROOT, capture_output=True, text=True, check=False)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("there is no history of Git here")
    assert [claim.title for claim in CLAIMS if git("cat-file", "-e", f"{claim.commit}^{{commit}}").returncode] == []


def test_figures_of_the_readme_are_those_of_the_page() -> None:
    """Each time of raylaunch in its table is the median of a row."""
    table = (blocks.ROOT / "README.md").read_text(encoding="utf-8").partition("## Why")[2].partition("\n\nThese")[0]
    shown = [float(number) for number in re.findall(r"\*\*([\d.]+)\*\*", table)]
    assert shown
    assert [number for number in shown if number not in {claim.ours for claim in CLAIMS}] == []


@pytest.mark.parametrize(
    ("found", "is_reproduced"),
    [
        (figure("restart", ours=0.1, torchrun=6.7), True),  # slower, and so is the peer
        (figure("restart", ours=0.1, torchrun=4.0), False),
        (figure("restart", ours=0.09), True),
        (figure("restart", ours=0.2), False),
    ],
)
def test_a_row_is_reproduced_by_its_ratio_or_else_by_its_median(found: Figure, *, is_reproduced: bool) -> None:
    claim = Claim(bench="restart", figure="", ours=0.065, torchrun=4.34, commit="")
    assert (claims.problem(claim, found) == "") == is_reproduced


def test_where_more_is_better_less_is_not_reproduced() -> None:
    claim = Claim(bench="goodput", figure="", ours=0.972, torchrun=0.558, commit="")
    assert claims.problem(claim, figure("goodput", ours=0.9, torchrun=0.6, more_is_better=True)) == ""
    assert claims.problem(claim, figure("goodput", ours=0.7, torchrun=0.6, more_is_better=True)) != ""


def test_what_was_not_reproduced_is_named_and_what_was_not_run_is_counted() -> None:
    cold = [figure(f"cold, {size}", ours=4.0, torchrun=6.0) for size in ("2 x 2", "2 x 2 with DDP")]
    text = claims.text(
        {"restart": Outcome(figures=(figure("restart", ours=1.0),)), "cold": Outcome(figures=tuple(cold))}
    )
    assert text.startswith(f"benchmarks.md: 2 of 4 rows reproduced, {len(CLAIMS) - 4} not tried\nnot reproduced:\n")
    (restart,) = [claim.ours for claim in CLAIMS if claim.title == "restart"]
    assert f"  restart: 1, {restart} there" in text
    assert "  cold: 1 x 8: there is no such figure" in text
