"""Train a small character-level transformer on the source text of Python's own standard library.

A plain DDP script: it downloads nothing, and uses gloo on CPU and nccl on CUDA. It saves checkpoints and resumes from
the newest complete one, so it may be killed at any time and started again, by hand or by a launcher.

    python examples/train_charlm.py                                         # a single rank
    torchrun --nproc-per-node 2 examples/train_charlm.py --steps 50
    python -m raylaunch conf/job.yaml                                       # on every node of a Ray cluster
"""

import argparse
import gc
import math
import os
import random
import sysconfig
import time
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

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
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints"))
    parser.add_argument("--checkpoint-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints to keep")
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


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step-"))


def checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints in the folder, oldest first."""
    return sorted(folder.glob("step-*.pt"), key=step_of)


def write_checkpoint(state: dict[str, Any], folder: Path, keep: int) -> None:
    """Write to a temporary file, then rename it: a checkpoint is complete, or it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished, step = folder / "unfinished.tmp", state["progress"]["step"]
    with open(unfinished, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / f"step-{step:06}.pt")
    for old in [path for path in checkpoints(folder) if step_of(path) <= step][:-keep]:
        old.unlink()


def read_newest(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """Return the newest checkpoint that can be read."""
    for path in reversed(checkpoints(folder)):
        try:
            return path, torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001  a damaged file may fail in any way
            say(f"skipping {path}, which cannot be read ({type(error).__name__})")
    return None, {}


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
        self.shape = {name: getattr(args, name) for name in ("context", "layers", "heads", "width")}
        torch.manual_seed(args.seed)
        self.net = CharTransformer(**self.shape).to(device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=args.lr)
        self.scheduler = LambdaLR(self.optimizer, partial(lr_factor, steps=args.steps))

    def start(self) -> None:
        """Resume from the newest checkpoint, or start from scratch, and wrap the model in DDP."""
        self.ddp = DistributedDataParallel(self.net)
        # DDP settles the order in which it sums gradients in its first backward pass. With that behind us, a
        # resumed run adds the same numbers in the same order as one never stopped, and ends at the same bits.
        self.loss(self.ddp, self.train_windows[: self.args.batch_size]).backward()

        # Rank 0 reads for all: every rank has the same checkpoint, whatever its own disk would show it.
        rank, world = dist.get_rank(), dist.get_world_size()
        found = [read_newest(self.args.checkpoint_dir) if rank == 0 else (None, {})]
        dist.broadcast_object_list(found)
        path, state = found[0]
        if path is None:
            say("starting from scratch")
        elif state["shape"] != self.shape:
            message = f"{path} holds a model of another shape: {state['shape']}, not {self.shape}"
            raise SystemExit(message if rank == 0 else 1)
        else:
            self.progress = Progress(**state["progress"])
            self.net.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])
            say(f"resuming from {path} (epoch {self.progress.epoch}, step {self.progress.step})")

        # Random numbers of each rank's own; they go on where they were if the world is as large as it was.
        random.seed(f"{self.args.seed} {self.progress.step} {rank}")
        torch.manual_seed(random.getrandbits(63))
        if len(state.get("random", [])) == world:
            python, cpu, cuda = state["random"][rank]
            random.setstate(python)
            torch.set_rng_state(cpu)
            if cuda is not None and self.device.type == "cuda":
                torch.cuda.set_rng_state(cuda)

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

    def save(self) -> None:
        """Save a checkpoint: every rank contributes the state of its random number generators, rank 0 writes."""
        cuda = torch.cuda.get_rng_state() if self.device.type == "cuda" else None
        random_states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(random_states, (random.getstate(), torch.get_rng_state(), cuda))
        if dist.get_rank() == 0:
            state = {
                "shape": self.shape,
                "progress": asdict(self.progress),
                "model": self.net.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "random": random_states,
            }
            write_checkpoint(state, self.args.checkpoint_dir, self.args.keep)


def train(args: argparse.Namespace) -> None:
    # What can be done alone comes before the world: nobody waits for it, and modules that torch imports on
    # the way would otherwise keep hold of the process group, past destroy_process_group().
    trainer = Trainer(args, pick_device())
    join_world(trainer.device)
    trainer.start()
    at = trainer.progress
    if at.step >= args.steps:
        say(f"already finished: step {at.step} of {args.steps}; remove {args.checkpoint_dir} to begin anew")

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
        if last or at.step % args.checkpoint_every == 0:
            trainer.save()

    say(f"validation loss {trainer.validation_loss():.3f}")
    say("done")


def leave_world() -> None:
    gc.collect()  # DDP goes first, for it holds the process group, whose threads must end before Python does
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    try:
        train(parse_args())
    except SystemExit:
        leave_world()
        raise
    leave_world()


if __name__ == "__main__":
    main()
