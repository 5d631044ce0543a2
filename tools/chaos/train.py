"""A training job whose parameters end at the same bits whatever happens to it, and however large its worlds are.

Every step adds the gradients of the same samples in the same order: each rank computes its share, one sample at a
time, and all ranks gather all of them. Each process notes every step that it did; see `check_steps.py`.

Asked to by a fault it misbehaves: SIGUSR1 makes it ignore SIGTERM, SIGUSR2 makes it exit with 0 as if it were done,
and kills it before its first step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from raylaunch.worker import State, checkpointed, context, elastic, section, should_checkpoint

WIDTH = 16
KEEP = 3
Rows = list[list[float]]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for checkpoints, notes and the final parameters")
    parser.add_argument("--steps", type=int, default=400, help="unless a file `last` in the folder names fewer")
    parser.add_argument("--samples", type=int, default=24, help="in each step, over all ranks")
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps")
    parser.add_argument("--step-seconds", type=float, default=0.03, help="what a step takes at least")
    parser.add_argument("--state", action="store_true", help="commit in memory after each step, without checkpoints")
    parser.add_argument("--elastic", action="store_true", help="as --state, but commit as often as is cheap, and stay")
    return parser.parse_args()


class Samples(IterableDataset):
    """Those of each step, from this step on; as lists, which leave nothing behind where a loader is killed."""

    def __init__(self, done: int, count: int) -> None:
        self.done, self.count = done, count

    def __iter__(self) -> Iterator[Rows]:
        for step in itertools.count(self.done):
            generator = torch.Generator().manual_seed(step)
            yield torch.randn(self.count, WIDTH, dtype=torch.double, generator=generator).tolist()


def as_they_are(samples: Rows) -> Rows:
    return samples


class Trainer:
    """The model, its optimizer (with state of its own: Adam counts steps), and how many steps are done."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)).double()
        self.parameters = list(self.net.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-2, foreach=False)
        self.done = 0
        self.state = None
        if args.state or args.elastic:
            # Equal on all ranks, and large enough that the ranks of a node divide it among them.
            self.equal = DistributedDataParallel(nn.Linear(512, 601))
            every = "auto" if args.elastic else 1
            self.state = State(net=self.net, optimizer=self.optimizer, equal=self.equal, every=every)
        self.samples: Iterator[Rows] = iter(())

    def step(self) -> None:
        samples = torch.tensor(next(self.samples), dtype=torch.double)
        total = torch.zeros(sum(parameter.numel() for parameter in self.parameters), dtype=torch.double)
        for gradient in self.gradients(samples):
            total += gradient
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, total.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)
        self.optimizer.step()
        self.done += 1
        if self.state is not None:
            with torch.no_grad():
                for parameter in self.equal.parameters():
                    parameter.fill_(self.done)

    def last(self) -> int:
        """The last step to do, as rank 0 knows it."""
        try:
            return min(self.args.steps, int((self.args.folder / "last").read_text()))
        except FileNotFoundError:
            return self.args.steps

    def gradients(self, samples: Tensor) -> Tensor:
        """One row for each sample, on all ranks; a rank's share is a stretch of them, filled up with zeros."""
        world, rank = dist.get_world_size(), dist.get_rank()
        share = -(-len(samples) // world)
        rows = [self.gradient(sample) for sample in samples[rank * share :][:share]]
        length = sum(parameter.numel() for parameter in self.parameters)
        rows += [torch.zeros(length, dtype=torch.double)] * (share - len(rows))
        mine = torch.stack([*rows, torch.full((length,), float(self.last()), dtype=torch.double)])
        gathered = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(gathered, mine)
        self.args.steps = int(gathered[0][-1, 0])
        return torch.cat([part[:-1] for part in gathered])[: len(samples)]

    def gradient(self, sample: Tensor) -> Tensor:
        loss = (self.net(sample) - sample.prod().sign()).square().sum()
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss, self.parameters)])

    def save(self) -> None:
        if dist.get_rank() == 0:
            state = {"done": self.done, "net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
            write(self.args.folder / f"step-{self.done:06}.pt", lambda file: torch.save(state, file))
            for old in checkpoints(self.args.folder)[:-KEEP]:
                old.unlink(missing_ok=True)

    def load(self) -> None:
        """Rank 0 reads for all: they must not begin at different steps."""
        found = [None]
        if self.state is not None:
            self.done = self.state.restore()
            for parameter in self.equal.parameters():
                assert self.done == 0 or bool((parameter == self.done).all()), (self.done, parameter)
        elif dist.get_rank() == 0 and (known := checkpoints(self.args.folder)):
            found = [torch.load(known[-1], weights_only=True)]
        if self.state is None:
            dist.broadcast_object_list(found)
        if found[0] is not None:
            self.done = found[0]["done"]
            self.net.load_state_dict(found[0]["net"])
            self.optimizer.load_state_dict(found[0]["optimizer"])
        loaders = int(os.environ.get("LOCAL_RANK") == "0")  # one process more on each node
        samples = Samples(self.done, self.args.samples)
        self.samples = iter(DataLoader(samples, batch_size=None, num_workers=loaders, collate_fn=as_they_are))


def checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob("step-*.pt"))


def write(path: Path, fill) -> None:
    """Aside, then renamed, and on the disk before anybody is told of it."""
    aside = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    with open(aside, "wb") as file:
        fill(file)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def notes(folder: Path, kind: str) -> FileIO:
    """A file of notes of this process. `steps`: BEGAN ENDED ATTEMPT WORLD_SIZE RANK STEP, a line for each step.

    `commits`: ATTEMPT WORLD_SIZE RANK STEP, a line for each step when it is committed.
    """
    name = f"{context().attempt}-{dist.get_rank()}-{os.uname().nodename}-{os.getpid()}.{kind}"
    return open(folder / name, "ab", buffering=0)


def train(args: argparse.Namespace, trainer: Trainer) -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)  # in a section, the others would wait for it without a limit
    with section("start"):
        trainer.load()
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))
    with notes(args.folder, "steps") as log, notes(args.folder, "commits") as commits:
        do_steps(args, trainer, log, commits)
    if dist.get_rank() == 0:
        bits = torch.cat([parameter.detach().flatten() for parameter in trainer.parameters])
        write(args.folder / "final.bin", lambda file: file.write(bytes(bits.view(torch.uint8).tolist())))


def do_steps(args: argparse.Namespace, trainer: Trainer, log: FileIO, commits: FileIO) -> None:
    who = f"{context().attempt} {dist.get_world_size()} {dist.get_rank()}"
    while trainer.done < args.steps:
        began, clock = time.time_ns(), time.monotonic()
        trainer.step()
        log.write(f"{began} {time.time_ns()} {who} {trainer.done}\n".encode())
        if trainer.state is not None:
            trainer.state.commit(trainer.done - 1)
            if args.state:
                commits.write(f"{who} {trainer.done}\n".encode())
        elif should_checkpoint(trainer.done) or trainer.done % args.checkpoint_every == 0 or trainer.done == args.steps:
            trainer.save()
            checkpointed(trainer.done)
        time.sleep(max(0.0, args.step_seconds - (time.monotonic() - clock)))


def main() -> None:
    args = parse_args()
    signal.signal(signal.SIGUSR1, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    args.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    with section("start"):  # which takes longer than `hang_timeout` on a busy machine
        dist.init_process_group("gloo")
        trainer = Trainer(args)
    (elastic(train) if args.elastic else train)(args, trainer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
