"""What all benches run: a script as one writes it for torchrun, which notes the time at each of its stations.

`unchanged.py FOLDER DEATHS [--stay]`: each rank writes FOLDER/passed-GENERATION-RANK.json once it is past its first
`all_reduce`. Then, as long as fewer than DEATHS deaths have been died, everybody trains, and after a while rank 1
writes FOLDER/death-GENERATION and sends itself SIGKILL. With `--stay`, ranks of the last generation stay idle until
FOLDER/leave is there.

Generations are counted by the deaths, not by TORCHELASTIC_RESTART_COUNT: torchrun counts that for each agent by
itself. Rank 1 knows how many there were, and the first `all_reduce` tells the others.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

entered = time.time()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

imported = time.time()

TRAINING_SECONDS = 0.4
"""Before a death, so that every rank of the generation is well past its first `all_reduce`."""
LONGEST_STAY_SECONDS = 120.0


def write(path: Path, text: str) -> None:
    """All of it or nothing is seen by whoever looks for the file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.rename(path)


def train_until_death(folder: Path, generation: int) -> None:
    """Steps until rank 1 kills itself; the others' next `all_reduce` fails, or their launcher ends them first."""
    dies_at = time.monotonic() + TRAINING_SECONDS
    while True:
        dist.all_reduce(torch.ones(1024))
        if dist.get_rank() == 1 and time.monotonic() >= dies_at:
            write(folder / f"death-{generation}", str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)


def main() -> None:
    """Join, pass, and then die, stay or leave."""
    folder, deaths = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    joined = time.time()
    died = torch.tensor([len(list(folder.glob("death-*"))) if dist.get_rank() == 1 else 0])
    dist.all_reduce(died)
    passed = time.time()
    generation = int(died)
    marks = {"entered": entered, "imported": imported, "joined": joined, "passed": passed, "pid": os.getpid()}
    write(folder / f"passed-{generation}-{dist.get_rank()}.json", json.dumps(marks))
    if generation < deaths:
        train_until_death(folder, generation)
    leaves_at = time.monotonic() + LONGEST_STAY_SECONDS
    while "--stay" in sys.argv and not (folder / "leave").exists() and time.monotonic() < leaves_at:
        time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
