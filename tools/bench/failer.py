"""What the bench of detection runs: in each attempt, rank 1 fails after a while, at a moment that nobody knows.

`failer.py FOLDER COUNT HOW...`: attempt 0 fails in the first of these ways, attempt 1 in the second, and so on around,
COUNT times; then all end well. `exit`: with code 1; `kill`: SIGKILL; `hang`: it stops itself (SIGSTOP) after some
steps; `stay`: nobody fails. Just before, it writes FOLDER/event-ATTEMPT: how, and when (CLOCK_MONOTONIC). The other ranks write
FOLDER/signalled-ATTEMPT when they get a SIGTERM, as torchrun sends it when it has noticed.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

FIRST, SPREAD = 0.1, 0.3
"""Seconds before the failure, and how far they vary: launchers that look now and then look at any time before it."""
_STEPS, _STEP_SECONDS = 30, 0.02
_LONGEST = 120.0


def write(path: Path, text: str) -> None:
    """All of it or nothing is seen by whoever looks for the file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.rename(path)


def train() -> None:
    """Steps that a launcher can see."""
    import torch

    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(_STEPS):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
        time.sleep(_STEP_SECONDS)
    time.sleep(random.random() * SPREAD)
    optimizer.step()


def fail(folder: Path, attempt: int, how: str) -> None:
    """Wait for rank 0, and a little; then do it."""
    deadline = time.monotonic() + _LONGEST
    while not (folder / f"there-{attempt}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    if how == "hang":
        train()
    else:
        time.sleep(FIRST + random.random() * SPREAD)
    write(folder / f"event-{attempt}", f"{how} {time.monotonic()}")
    if how == "exit":
        os._exit(1)
    os.kill(os.getpid(), signal.SIGSTOP if how == "hang" else signal.SIGKILL)


def main() -> None:
    """Fail, or be there until somebody else has."""
    folder, count, ways = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt >= count:
        return
    how = ways[attempt % len(ways)]
    if os.environ["RANK"] == "1" and how != "stay":
        fail(folder, attempt, how)
    else:

        def signalled(_number: int, _frame: object) -> None:
            write(folder / f"signalled-{attempt}", str(time.monotonic()))
            os._exit(0)

        signal.signal(signal.SIGTERM, signalled)
        write(folder / f"there-{attempt}", "")
        time.sleep(_LONGEST)


if __name__ == "__main__":
    main()
