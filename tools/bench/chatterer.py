"""What the bench of takeovers runs: each rank prints 100 lines a second until there is a file `end` in the folder."""

import os
import sys
import time
from pathlib import Path


def main() -> None:
    """Note the process in a file, to which a restarted rank would add another one."""
    folder = Path(sys.argv[1])
    with (folder / f"pids-{os.environ['RANK']}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    step = 0
    while not (folder / "end").exists():
        for _ in range(10):
            print("step", step, flush=True)
            step += 1
        time.sleep(0.1)


if __name__ == "__main__":
    main()
