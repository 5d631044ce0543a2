"""What all benches run: a script as one writes it for torchrun, which notes the time at each of its stations.

`unchanged.py FOLDER DEATHS [options]`: each rank writes FOLDER/passed-GENERATION-RANK.json once it is past its first
`all_reduce`. Then, as long as fewer than DEATHS deaths have been died, everybody trains, and after a while rank 1
writes FOLDER/death-GENERATION and sends itself SIGKILL.

--stay      ranks of the last generation stay idle until FOLDER/leave is there
--width N   of the layers of the model of `unchanged_ddp.py`; what it takes falls with the square
--first S   train for this many seconds before the first death, 0.4 otherwise; `--each S`: before each other one

Times are CLOCK_MONOTONIC, which all processes of a machine share. Generations are counted by the deaths, not by
TORCHELASTIC_RESTART_COUNT: torchrun counts that for each agent by itself. Rank 1 knows how many there were, and the
first `all_reduce` tells the others.
"""

import time

entered = time.monotonic()

import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from argparse import ArgumentParser, Namespace  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

imported = time.monotonic()

LONGEST_STAY_SECONDS = 120.0
Training = Callable[[int], Callable[[], None]]
"""Makes a model with layers of this width, and returns its training step."""


def write(path: Path, text: str) -> None:
    """All of it or nothing is seen by whoever looks for the file."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text)
    aside.rename(path)


def reducing() -> Callable[[], None]:
    """A step without a model."""
    return lambda: dist.all_reduce(torch.ones(1024))


def note_passed(folder: Path, generation: int, *, joined: float, reduced: float, passed: float) -> None:
    """Write down when this rank came past each of its stations."""
    marks = {"entered": entered, "imported": imported, "joined": joined, "reduced": reduced, "passed": passed}
    write(folder / f"passed-{generation}-{dist.get_rank()}.json", json.dumps({**marks, "pid": os.getpid()}))


def die(folder: Path, generation: int) -> None:
    """Write down when, and do it."""
    write(folder / f"death-{generation}", str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_death(folder: Path, generation: int, seconds: float, step: Callable[[], None]) -> None:
    """Steps until rank 1 kills itself; the others' next one fails, or their launcher ends them first."""
    dies_at = time.monotonic() + seconds
    while True:
        step()
        if dist.get_rank() == 1 and time.monotonic() >= dies_at:
            die(folder, generation)
        time.sleep(0.02)


def work(args: Namespace, training: Training | None = None) -> None:
    """In a process group: pass, and then die, stay or leave. With `training`, pass its first step too."""
    joined = time.monotonic()
    rank = dist.get_rank()
    died = torch.tensor([len(list(args.folder.glob("death-*"))) if rank == 1 else 0])
    dist.all_reduce(died)
    reduced = time.monotonic()
    generation = int(died)
    step = training(args.width) if training else reducing()
    if training:
        step()
    passed = time.monotonic() if training else reduced
    note_passed(args.folder, generation, joined=joined, reduced=reduced, passed=passed)
    if generation < args.deaths:
        train_until_death(args.folder, generation, args.each if generation else args.first, step)
    leaves_at = time.monotonic() + LONGEST_STAY_SECONDS
    while args.stay and not (args.folder / "leave").exists() and time.monotonic() < leaves_at:
        time.sleep(0.1)


def argument_parser() -> ArgumentParser:
    """Of the options that all variants have."""
    parser = ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("deaths", type=int)
    parser.add_argument("--stay", action="store_true")
    parser.add_argument("--width", type=int, default=1024)
    for flag in ("--first", "--each"):
        parser.add_argument(flag, type=float, default=0.4)
    return parser


def arguments(words: list[str]) -> Namespace:
    """From the command line, or from whoever has none."""
    return argument_parser().parse_args(words)


def main(training: Training | None = None) -> None:
    """As torchrun starts it."""
    args = arguments(sys.argv[1:])
    dist.init_process_group("gloo")
    work(args, training)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
