"""What the notes of `train.py` prove: who did which step when, and what each restart cost.

python tools/chaos/check_steps.py FOLDER STEPS
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

_FIELDS = 6


@dataclass(frozen=True, slots=True, order=True)
class Note:
    """One step of one process. Times are nanoseconds of the machine's clock."""

    attempt: int
    rank: int
    step: int
    began: int
    ended: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSteps:
    """The steps of an attempt that did at least one."""

    attempt: int
    size: int
    first: int
    last: int
    """Steps; the last one is of the rank that was furthest."""
    began: int
    ended: int
    """When the first step began on any rank, and when the last one ended."""
    trained: int
    """When all of its ranks had done a step; 0 where that never came."""
    lost: int
    """Steps that had been done before it, and that it did again."""
    pause: float
    """Seconds between the last step of the attempts before it and its own first one."""


def read(folder: Path, after: int = 0) -> list[Note]:
    """All notes of attempts after that one, by attempt, rank and step. A line that a kill cut off is none."""
    found = []
    for file in folder.glob("*.steps"):
        if int(file.name.split("-")[0]) <= after:
            continue
        for line in file.read_text().splitlines(keepends=True):
            numbers = _numbers(line) if line.endswith("\n") else []
            if len(numbers) == _FIELDS:
                began, ended, attempt, size, rank, step = numbers
                found.append(Note(attempt=attempt, rank=rank, step=step, began=began, ended=ended, world_size=size))
    return sorted(found)


def committed(folder: Path) -> dict[int, int]:
    """By attempt: the last step that all of its ranks have noted as committed; without attempts that have none."""
    last: dict[int, dict[int, int]] = {}
    sizes: dict[int, int] = {}
    for file in folder.glob("*.commits"):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                attempt, size, rank, step = _numbers(line)
                sizes[attempt] = size
                last.setdefault(attempt, {})[rank] = step
    return {attempt: min(steps.values()) for attempt, steps in sorted(last.items()) if len(steps) == sizes[attempt]}


def _numbers(line: str) -> list[int]:
    return [int(word) for word in line.split()]


def attempts(notes: Sequence[Note]) -> list[AttemptSteps]:
    """The attempts in their order."""
    found: list[AttemptSteps] = []
    done, ended = 0, 0
    for attempt, group in groupby(notes, key=lambda note: note.attempt):
        own = list(group)
        first, began = min(note.step for note in own), min(note.began for note in own)
        last = max(note.step for note in own)
        found.append(
            AttemptSteps(
                attempt=attempt,
                size=own[0].world_size,
                first=first,
                last=last,
                began=began,
                ended=max(note.ended for note in own),
                trained=_trained(own),
                lost=max(0, min(done, last) - first + 1),
                pause=(began - ended) / 1e9 if found else 0.0,
            )
        )
        done, ended = max(done, last), max(ended, found[-1].ended)
    return found


def _trained(own: Sequence[Note]) -> int:
    first = {note.rank: note.ended for note in sorted(own, key=lambda note: -note.step)}
    return max(first.values()) if len(first) == own[0].world_size else 0


def problems(notes: Sequence[Note], steps: int) -> list[str]:
    """What must not be; none if the run was as it should be."""
    found = attempts(notes)
    return [*_at_the_same_time(found), *_left_out(found, steps), *_not_together(notes)]


def _at_the_same_time(found: Sequence[AttemptSteps]) -> Iterator[str]:
    """Attempts count up, so each must begin after all before it have done their last step."""
    for index, after in enumerate(found):
        for before in found[:index]:
            if before.ended > after.began:
                late = (before.ended - after.began) / 1e9
                yield f"attempt {before.attempt} did a step {late:.3f} s after attempt {after.attempt} had begun one"


def _left_out(found: Sequence[AttemptSteps], steps: int) -> Iterator[str]:
    """The last attempt must have come to the end: if it has lost the memory of all hosts, it has begun with step 1."""
    done = last = 0
    for one in found:
        if one.first > done + 1:
            yield f"attempt {one.attempt} begins with step {one.first}, but only {done} are done"
        done, last = max(done, one.last), one.last
    if last != steps:
        yield f"{last} of {steps} steps are done"


def _not_together(notes: Sequence[Note]) -> Iterator[str]:
    """In one attempt all ranks do the same steps, each once; only of the last may some not have come to tell."""
    for attempt, group in groupby(notes, key=lambda note: note.attempt):
        own = list(group)
        sizes = sorted({note.world_size for note in own})
        if len(sizes) > 1:
            yield f"attempt {attempt} has world sizes {' and '.join(map(str, sizes))}"
            continue
        first, last = min(note.step for note in own), max(note.step for note in own)
        by_rank = {rank: [note.step for note in own if note.rank == rank] for rank in range(sizes[0])}
        for rank, did in by_rank.items():
            if any(two != one + 1 for one, two in pairwise(did)) or (did and did[0] != first):
                yield f"rank {rank} of attempt {attempt} did not do one step after the other"
            elif (did[-1] if did else first - 1) < last - 1:
                yield f"rank {rank} of attempt {attempt} is {last - (did[-1] if did else first - 1)} steps behind"
    strangers = sorted({(note.attempt, note.rank) for note in notes if note.rank >= note.world_size})
    yield from (f"attempt {attempt} has a rank {rank}" for attempt, rank in strangers)


def table(found: Sequence[AttemptSteps]) -> str:
    """A line for each attempt."""
    lines = ["attempt  ranks  steps        lost  pause before"]
    for one in found:
        steps = f"{one.first}-{one.last}"
        lines.append(f"{one.attempt:7}  {one.size:5}  {steps:11}  {one.lost:4}  {one.pause:.3f} s")
    return "\n".join(lines)


def main() -> int:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    notes = read(folder)
    print(table(attempts(notes)))
    wrong = problems(notes, steps)
    print("\n".join(wrong or ["every step was done, and never by two attempts at once"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
