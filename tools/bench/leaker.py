"""What the bench of leaks runs: in each attempt, rank 1 fails at once. One in four raises, the others are killed.

`leaker.py FOLDER STOP...`: attempt 0 is the first. In the attempts with these numbers it writes FOLDER/there-NUMBER and
goes on when FOLDER/go-NUMBER exists. The last of these attempts ends well.
"""

import os
import signal
import sys
import time
from pathlib import Path

_SECONDS = 600.0
_LINE = "step 1, loss 0.5\n" * 4


def main() -> None:
    """Print something, then fail, or be there until somebody else has."""
    folder, stops = Path(sys.argv[1]), [int(number) for number in sys.argv[2:]]
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
    print(_LINE, end="", flush=True)
    print(_LINE, end="", file=sys.stderr, flush=True)
    deadline = time.monotonic() + _SECONDS
    if attempt in stops:
        if rank == "0":
            (folder / f"there-{attempt}").touch()
        while not (folder / f"go-{attempt}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    if attempt == stops[-1]:
        return
    if rank != "1":
        time.sleep(_SECONDS)
    if attempt % 4 == 1:
        raise ValueError(f"loss is NaN in attempt {attempt}")
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    import omegaconf  # noqa: F401  # so that there is a zygote

    main()
