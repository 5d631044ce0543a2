"""What the bench of followers runs: steps that compute for a moment and print many lines, ten times a second.

`printer.py FOLDER`: all ranks wait for each other, and make steps until there is FOLDER/end. Then each writes
FOLDER/steps-RANK: doubles, the time at which each step began (CLOCK_MONOTONIC) and the seconds that it took.
"""

import os
import sys
import time
from array import array
from pathlib import Path

from tools.bench.chatter import line, wait_for_all

STEPS_PER_SECOND = 10
LINES_PER_STEP = 100
COMPUTED = 5_000
"""Additions in each step."""


def main() -> None:
    """Make steps. Ranks begin theirs at different moments of a tenth of a second."""
    folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    wait_for_all(folder, 0, rank, world)
    steps, end = array("d"), folder / "end"
    due = time.monotonic() + rank / world / STEPS_PER_SECOND
    number = 0
    while not end.exists():
        time.sleep(max(0.0, due - time.monotonic()))
        due += 1 / STEPS_PER_SECOND
        began = time.monotonic()
        sum(range(COMPUTED))
        for _ in range(LINES_PER_STEP):
            print(line(rank, number))
            number += 1
        steps.extend((began, time.monotonic() - began))
    (folder / f"steps-{rank}").write_bytes(steps.tobytes())


if __name__ == "__main__":
    main()
