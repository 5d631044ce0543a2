"""Which collective ranks wait in, and which rank has not called it, by what the Flight Recorder says of each."""

from __future__ import annotations

import pytest

from raylaunch.core.failures.stacks import GroupCalls, MissingCall, Stack, missing_call, report


def calls(called: int, ended: int, *, group: str = "default_pg", waits_in: str | None = None) -> GroupCalls:
    name = ("all_reduce" if called > ended else "") if waits_in is None else waits_in
    return GroupCalls(group=group, called=called, ended=ended, waits_in=name)


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        ({}, None),
        ({0: [calls(5, 5)], 1: [calls(4, 4)]}, None),  # nobody waits
        (
            {0: [calls(6, 5)], 1: [calls(5, 5)], 2: [calls(6, 5)]},
            (
                {1},
                "rank 1 has not called all_reduce, number 6 of default_pg, in which ranks 0, 2 wait",
            ),
        ),
        (
            {0: [calls(9, 5)], 1: [calls(5, 5)], 2: [calls(5, 5)], 3: []},  # one is ahead, as kernels are only launched
            ({1, 2}, "ranks 1-2 have not called all_reduce, number 6 of default_pg, in which rank 0 waits"),
        ),
        (
            {0: [calls(6, 5)], 1: [calls(6, 5)]},
            (set(), "all ranks have called all_reduce, number 6 of default_pg, and it does not end"),
        ),
        (  # rank 1 waits for rank 2, and only so has not called what rank 0 waits in
            {
                0: [calls(6, 5)],
                1: [calls(5, 5), calls(3, 2, group="pipeline", waits_in="broadcast")],
                2: [calls(5, 5), calls(2, 2, group="pipeline")],
            },
            ({2}, "rank 2 has not called broadcast, number 3 of pipeline, in which rank 1 waits"),
        ),
    ],
)
def test_who_has_not_called_what(found, missing):
    expected = MissingCall(frozenset(missing[0]), missing[1]) if missing is not None else None
    assert missing_call(found) == expected


def test_the_report_of_stacks_has_it():
    stacks = [Stack(rank=rank, state="R", text="", calls=(calls(6, 6 - rank),)) for rank in (0, 1)]
    said = "Flight Recorder: all ranks have called all_reduce, number 6 of default_pg, and it does not end\n"
    assert report(stacks, []).startswith(said)
