"""Train a small character-level transformer on the source text of Python's own standard library.

It downloads nothing, and uses gloo on CPU and nccl on CUDA. `state.commit` keeps what training needs in the nodes'
memory, and `state.restore` goes on from there in the next attempt, with as many ranks as there are then. With
`@elastic`, ranks that did not fail go on in the same process. Under other launchers nothing is kept, unless
RAYLAUNCH_DURABLE names a folder on disk.

    raylaunch conf/job.yaml                                                 # on two nodes of a Ray cluster
    raylaunch --nnodes 1:4 --nproc-per-node 2 --max-restarts 3 examples/train_charlm.py
    python examples/train_charlm.py                                         # a single rank
    RAYLAUNCH_DURABLE=/shared/charlm torchrun --nproc-per-node 2 examples/train_charlm.py --steps 50
"""

import argparse
import gc
import math
import os
import random
import sysconfig
import time
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from raylaunch.worker import State, elastic

CHARACTERS = 128  # ASCII; anything else is read as "?"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a character model on the standard library's source.")
    parser.add_argument("--steps", type=int, default=200, help="length of the whole run")
    parser.add_argument("--batch-size", type=int, default=16, help="windows of text per rank and step")
    parser.add_argument("--files", type=int, default=24, help="modules of the standard library to read")
    parser.add_argument("--context", type=int, default=64, help="characters the model sees at once")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="file for the parameters at the end")
    parser.add_argument("--log-every", type=int, default=10, help="steps between lines of progress")
    return parser.parse_args()


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, both with residual connections."""

    def __init__(self, width: int, heads: int, dropout: float = 0.05) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.mix(attended.transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.feed(self.feed_norm(x)))


class CharTransformer(nn.Module):
    """A transformer that predicts each character from those before it."""

    def __init__(self, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CHARACTERS))

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.blocks(self.characters(text) + self.positions))


@dataclass
class Progress:
    """The position of the run, which alone determines the next batch, whatever the world size."""

    step: int = 0  # optimizer steps taken
    epoch: int = 0  # passes over the text completed
    window: int = 0  # windows of this epoch used up, by all ranks together


def read_windows(files: int, context: int) -> tuple[Tensor, Tensor]:
    """Return windows of `context + 1` characters, one per row: nine tenths for training, one tenth for validation."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))[:files]
    text = "".join(path.read_text("utf-8", errors="replace") for path in modules)
    windows = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8)
    windows = windows.unfold(0, context + 1, context)
    return windows[: len(windows) * 9 // 10], windows[len(windows) * 9 // 10 :]


@lru_cache(maxsize=1)
def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))


def next_batch(windows: Tensor, progress: Progress, args: argparse.Namespace) -> Tensor:
    """Return this rank's windows of the next step, and advance `progress`, into a new epoch if needed."""
    per_step = args.batch_size * dist.get_world_size()
    if per_step > len(windows):
        raise SystemExit(f"{per_step} windows a step, but the text has {len(windows)}: raise --files")
    if progress.window + per_step > len(windows):
        progress.epoch, progress.window = progress.epoch + 1, 0
    order = shuffled(len(windows), args.seed, progress.epoch)
    mine = order[progress.window + args.batch_size * dist.get_rank() :][: args.batch_size]
    progress.window += per_step
    return windows[mine]


def pick_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cuda", torch.cuda.current_device())


def join_world(device: torch.device) -> None:
    """Initialize the process group that the launcher describes, or one with a single rank."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def mean_over_ranks(total: Tensor, count: int) -> float:
    """Return the sum of all ranks' totals divided by the sum of their counts."""
    both = torch.stack([total, torch.tensor(float(count), device=total.device)])
    dist.all_reduce(both)
    return float(both[0] / both[1])


def lr_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate: a linear warm-up, then a cosine decay to a tenth."""
    return min((step + 1) / max(1, steps // 10), 0.55 + 0.45 * math.cos(math.pi * step / steps))


class Trainer:
    """The model and all state that training changes."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.progress = args, device, Progress()
        self.train_windows, self.held_out = read_windows(args.files, args.context)
        torch.manual_seed(args.seed)
        self.net = CharTransformer(args.context, args.layers, args.heads, args.width).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=args.lr)
        self.scheduler = LambdaLR(self.optimizer, partial(lr_factor, steps=args.steps))

    def start(self) -> None:
        """Wrap the model in DDP, and resume from the newest commit, or start from scratch."""
        self.ddp = DistributedDataParallel(self.net)
        # DDP settles the order in which it sums gradients in its first backward pass. With that behind us, a
        # resumed run adds the same numbers in the same order as one never stopped, and ends at the same bits.
        self.loss(self.ddp, self.train_windows[: self.args.batch_size]).backward()

        # Random numbers of each rank's own; `restore` sets them to where they were.
        random.seed(f"{self.args.seed} {dist.get_rank()}")
        torch.manual_seed(random.getrandbits(63))
        self.state = State(model=self.net, optimizer=self.optimizer, scheduler=self.scheduler)
        self.state["progress"] = self.progress
        done = self.state.restore()
        self.progress = self.state["progress"]
        say(f"resuming after step {done} (epoch {self.progress.epoch})" if done else "starting from scratch")

    def loss(self, model: nn.Module, windows: Tensor) -> Tensor:
        windows = windows.long().to(self.device)
        return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def step(self) -> Tensor:
        loss = self.loss(self.ddp, next_batch(self.train_windows, self.progress, self.args))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.progress.step += 1
        return loss.detach()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the loss over all of the validation text, of which each rank computes a part."""
        self.net.eval()
        mine = self.held_out[dist.get_rank() :: dist.get_world_size()]
        total = torch.zeros((), device=self.device)
        for windows in torch.split(mine, self.args.batch_size):
            total += self.loss(self.net, windows) * len(windows)
        return mean_over_ranks(total, len(mine))


@elastic
def train(trainer: Trainer) -> None:
    args = trainer.args
    trainer.start()
    at = trainer.progress
    if at.step >= args.steps:
        say(f"already finished: step {at.step} of {args.steps}")

    logged, clock = at.step, time.perf_counter()
    while at.step < args.steps:
        loss = trainer.step()
        last = at.step == args.steps
        if last or at.step % args.log_every == 0:
            average, lr = mean_over_ranks(loss, 1), trainer.scheduler.get_last_lr()[0]
            speed = (at.step - logged) / (time.perf_counter() - clock)
            logged, clock = at.step, time.perf_counter()
            progress = f"step {at.step:4}/{args.steps}  epoch {at.epoch}"
            say(f"{progress}  loss {average:.3f}  lr {lr:.1e}  {speed:.1f} steps/s")
        trainer.state.commit(at.step - 1)  # the number of the step just done, from 0 on
    trainer.state.finish()

    loss = trainer.validation_loss()
    say(f"validation loss {loss:.3f}")
    if args.save and dist.get_rank() == 0:
        torch.save(trainer.net.state_dict(), args.save)
    say(f"final loss {loss!r}")


def leave_world() -> None:
    gc.collect()  # DDP goes first, for it holds the process group, whose threads must end before Python does
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    # What can be done alone comes before the world: nobody waits for it, and modules that torch imports on
    # the way would otherwise keep hold of the process group, past destroy_process_group().
    args = parse_args()
    trainer = Trainer(args, pick_device())
    join_world(trainer.device)
    try:
        train(trainer)
    except SystemExit:
        leave_world()
        raise
    del trainer  # else DDP would be the last that holds the process group, and would wait for threads that need the GIL
    leave_world()


if __name__ == "__main__":
    main()
