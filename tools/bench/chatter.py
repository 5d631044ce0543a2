"""What the bench of logs runs: a script that prints, as unbuffered as `python -u` does.

`chatter.py FOLDER LINES [DIES]`: all ranks wait for each other, print, and write FOLDER/printed-ATTEMPT-RANK: when the
first line was begun and when the last was done (CLOCK_MONOTONIC), and what that took of the CPU. With DIES, rank 1 exits with code 1 after that in
its first attempt, and the others stay until they are ended.
"""

import os
import sys
import time
from pathlib import Path

WAIT_SECONDS = 60.0
_PADDING = "the quick brown fox jumps over the lazy dog and then sleeps"


def line(rank: int, number: int) -> str:
    """The text of a line, 60 to 98 characters with its end."""
    return f"rank {rank} step {number:06d} loss {1 / (number + 1):.6f} {_PADDING[: 22 + number % 37]}"


def write(path: Path, text: str) -> None:
    """All of it or nothing is seen by whoever looks for the file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.rename(path)


def wait_for_all(folder: Path, attempt: int, rank: int, world: int) -> None:
    """Until every rank is there."""
    write(folder / f"there-{attempt}-{rank}", "")
    deadline = time.monotonic() + WAIT_SECONDS
    while not all((folder / f"there-{attempt}-{other}").exists() for other in range(world)):
        if time.monotonic() > deadline:
            sys.exit("some ranks did not come")
        time.sleep(0.01)


def main() -> None:
    """Print."""
    folder, lines = Path(sys.argv[1]), int(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    wait_for_all(folder, attempt, rank, world)
    began, used = time.monotonic(), time.process_time()
    for number in range(lines):
        print(line(rank, number))
    write(folder / f"printed-{attempt}-{rank}", f"{began} {time.monotonic()} {time.process_time() - used}")
    if "DIES" in sys.argv and attempt == 0:
        if rank == 1:
            sys.exit(1)
        time.sleep(WAIT_SECONDS)


if __name__ == "__main__":
    main()
