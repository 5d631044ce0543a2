"""Train a small character-level transformer on the source text of Python's own standard library.

A plain DDP script: nothing to download, gloo on CPU, nccl on CUDA. It saves checkpoints and goes on from
the newest whole one, so it may be killed at any moment and started again, by hand or by a launcher.

    python examples/train_charlm.py                                         # a world of one
    torchrun --nproc-per-node 2 examples/train_charlm.py --steps 50
    python -m raylaunch conf/job.yaml                                       # on every node of a Ray cluster
"""

import argparse
import math
import os
import random
import sysconfig
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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
    args = parser.parse_args()
    for name in ("steps", "batch_size", "files", "context", "checkpoint_every", "keep", "log_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return args


# ── The model ──────────────────────────────────────────────────────────────────────────────────────────────


class Block(nn.Module):
    """Causal self-attention, then a feed-forward layer, each added to what came in."""

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
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.mix(attended.transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.feed(self.feed_norm(x)))


class CharTransformer(nn.Module):
    """Guesses each next character from the ones before it."""

    def __init__(self, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CHARACTERS))

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.blocks(self.characters(text) + self.positions))


# ── The text, and where we are in it ───────────────────────────────────────────────────────────────────────


@dataclass
class Progress:
    """How far the run is; the next batch follows from this alone, whatever the world size."""

    step: int = 0  # optimizer steps taken
    epoch: int = 0  # passes over the text completed
    window: int = 0  # windows of this epoch used up, by all ranks together


def read_windows(files: int, context: int) -> tuple[Tensor, Tensor]:
    """Windows of `context + 1` characters, one per row: nine tenths to train on, one tenth held out."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))[:files]
    text = "".join(path.read_text("utf-8", errors="replace") for path in modules)
    windows = torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8)
    windows = windows.unfold(0, context + 1, context)
    return windows[: len(windows) * 9 // 10], windows[len(windows) * 9 // 10 :]


@lru_cache(maxsize=1)
def shuffled(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))


def next_batch(windows: Tensor, progress: Progress, args: argparse.Namespace) -> Tensor:
    """This rank's windows of the next step; moves `progress` on, into a new epoch where this one is used up."""
    per_step = args.batch_size * dist.get_world_size()
    if per_step > len(windows):
        raise SystemExit(f"{per_step} windows a step, but the text has {len(windows)}: raise --files")
    if progress.window + per_step > len(windows):
        progress.epoch, progress.window = progress.epoch + 1, 0
    order = shuffled(len(windows), args.seed, progress.epoch)
    mine = order[progress.window + args.batch_size * dist.get_rank() :][: args.batch_size]
    progress.window += per_step
    return windows[mine]


# ── Checkpoints ────────────────────────────────────────────────────────────────────────────────────────────


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in the folder, oldest first."""
    return sorted(folder.glob("step-*.pt"), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step-"))


def write(state: dict[str, Any], folder: Path, keep: int) -> None:
    """Write aside, then rename: under a checkpoint's name there is a whole one or none."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished, step = folder / "unfinished.tmp", state["progress"]["step"]
    with open(unfinished, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, folder / f"step-{step:06}.pt")
    for old in [path for path in checkpoints(folder) if step_of(path) <= step][:-keep]:
        old.unlink()


def read_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that can be read."""
    for path in reversed(checkpoints(folder)):
        try:
            return path, torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file may fail in any way
            say(f"skipping {path}, it cannot be read: {str(error).splitlines()[0]}")
    return None


def random_state() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


# ── The run ────────────────────────────────────────────────────────────────────────────────────────────────


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def join_world() -> torch.device:
    """Join the world that the launcher describes, or make a world of one."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def mean_over_ranks(total: Tensor, count: int) -> float:
    """The sum of all ranks' totals, divided by the sum of their counts."""
    both = torch.stack([total, torch.tensor(float(count), device=total.device)])
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


class Trainer:
    """The model and all that changes while it learns."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device, self.progress = args, device, Progress()
        self.train_windows, self.held_out = read_windows(args.files, args.context)
        self.shape = {name: getattr(args, name) for name in ("context", "layers", "heads", "width")}
        torch.manual_seed(args.seed)
        self.net = CharTransformer(**self.shape).to(device)
        self.ddp = DistributedDataParallel(self.net, device_ids=[device] if device.type == "cuda" else None)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=args.lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.learning_rate)
        # DDP settles the order in which it sums gradients in its first backward pass. With that behind us, a
        # resumed run adds the same numbers in the same order as one never stopped, and ends at the same bits.
        self.loss(self.ddp, self.train_windows[: args.batch_size]).backward()
        self.seed_random()

    def learning_rate(self, step: int) -> float:
        """A short climb to the peak, then half a cosine down to a tenth of it."""
        climb = (step + 1) / max(1, self.args.steps // 10)
        return min(climb, 0.55 + 0.45 * math.cos(math.pi * step / self.args.steps))

    def loss(self, model: nn.Module, windows: Tensor, reduction: str = "mean") -> Tensor:
        windows = windows.long().to(self.device)
        logits = model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction=reduction)

    def step(self) -> Tensor:
        self.ddp.train()
        loss = self.loss(self.ddp, next_batch(self.train_windows, self.progress, self.args))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.progress.step += 1
        return loss.detach()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Over all of the held-out text, a part on each rank."""
        self.net.eval()
        mine = self.held_out[dist.get_rank() :: dist.get_world_size()]
        total = torch.zeros((), device=self.device)
        for windows in mine.split(self.args.batch_size):
            total += self.loss(self.net, windows, reduction="sum")
        return mean_over_ranks(total, mine.shape[0] * self.args.context)

    def seed_random(self) -> None:
        """Random numbers of this rank's own, where there is no saved state to go on from."""
        random.seed(f"{self.args.seed} {self.progress.step} {dist.get_rank()}")
        torch.manual_seed(random.getrandbits(63))

    def save(self) -> None:
        """Every rank takes part, for its random state; rank 0 writes."""
        random_states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(random_states, random_state())
        if dist.get_rank() == 0:
            state = {
                "shape": self.shape,
                "progress": asdict(self.progress),
                "model": self.net.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "random": random_states,
            }
            write(state, self.args.checkpoint_dir, self.args.keep)

    def resume(self) -> None:
        """Rank 0 finds and reads the newest checkpoint and hands it to all, so that all have the same."""
        found: list[Any] = [read_newest(self.args.checkpoint_dir) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found)
        if found[0] is None:
            return say("starting from scratch")
        path, state = found[0]
        if state["shape"] != self.shape:
            message = f"{path} holds a model of another shape: {state['shape']}, not {self.shape}"
            raise SystemExit(message if dist.get_rank() == 0 else 1)
        self.progress = Progress(**state["progress"])
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if len(state["random"]) == dist.get_world_size():
            restore_random_state(state["random"][dist.get_rank()])
        else:
            self.seed_random()
        say(f"resuming from {path} (epoch {self.progress.epoch}, step {self.progress.step})")


def train(args: argparse.Namespace, device: torch.device) -> None:
    trainer = Trainer(args, device)
    trainer.resume()
    now = trainer.progress
    if now.step >= args.steps:
        say(f"already finished: step {now.step} of {args.steps}")

    since, last_time = now.step, time.perf_counter()
    while now.step < args.steps:
        loss = trainer.step()
        if now.step % args.log_every == 0 or now.step == args.steps:
            mean_loss, speed = mean_over_ranks(loss, 1), (now.step - since) / (time.perf_counter() - last_time)
            since, last_time = now.step, time.perf_counter()
            say(
                f"step {now.step:4}/{args.steps}  epoch {now.epoch}  loss {mean_loss:.3f}  "
                f"lr {trainer.scheduler.get_last_lr()[0]:.1e}  {speed:.1f} steps/s"
            )
        if now.step % args.checkpoint_every == 0 or now.step == args.steps:
            trainer.save()

    say(f"validation loss {trainer.validation_loss():.3f}")
    say("done")


def main() -> None:
    args = parse_args()
    device = join_world()
    train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
