"""Which part of a job's time counts, from what its rank 0 has noted."""

from __future__ import annotations

import pytest

from tools.bench.goodput import goodput, steps_of


def noted(*numbers: int, at: float, each: float = 0.1, step: float = 0.1) -> str:
    """Steps one after the other. The first ends at a time."""
    ends = [at + index * each for index in range(len(numbers))]
    return "".join(
        f"{number} {end - step} {end} {end + each - step}\n" for number, end in zip(numbers, ends, strict=True)
    )


def test_steps_that_are_done_again_count_once(tmp_path):
    """Nothing is lost before the death but the first step, from whose end on the time counts."""
    (tmp_path / "7.steps").write_text(noted(*range(51), at=0.0) + "51 5.0 5.")
    found = goodput(steps_of(tmp_path), 5.0)
    assert (found.useful, found.again, found.goodput) == (50, 0, pytest.approx(1.0))
    (tmp_path / "9.steps").write_text(noted(*range(41, 81), at=6.0))
    found = goodput(steps_of(tmp_path), 10.0)
    assert (found.useful, found.again) == (80, 10)
    assert found.goodput == pytest.approx(0.8)


def test_the_first_step_of_an_attempt_is_not_part_of_the_mean(tmp_path):
    """Others are, also one that took long by chance."""
    (tmp_path / "7.steps").write_text(noted(*range(51), at=0.0))
    (tmp_path / "9.steps").write_text("51 5.25 5.75 5.75\n52 5.75 5.95 5.95\n" + noted(*range(53, 120), at=6.05))
    found = goodput(steps_of(tmp_path), 10.0)
    assert found.step_seconds == pytest.approx((90 * 0.1 + 0.2) / 91)
    assert (found.useful, found.goodput) == (92, pytest.approx(0.93, rel=0.01))


def test_what_comes_after_a_step_is_no_time_of_it(tmp_path):
    (tmp_path / "7.steps").write_text(noted(*range(41), at=0.0, each=0.125))
    found = goodput(steps_of(tmp_path), 5.0)
    assert (found.useful, found.goodput) == (40, pytest.approx(0.8))
