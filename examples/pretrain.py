"""Pretraining in the manner of nanoGPT: tokens in a file that is mapped into memory, a configuration of plain variables
that the command line overrides, accumulated gradients, a cosine schedule, and one checkpoint that rank 0 overwrites.

It knows nothing of raylaunch.

    raylaunch --nproc-per-node 2 --max-restarts 3 examples/pretrain.py
    torchrun --nproc-per-node 2 --max-restarts 3 examples/pretrain.py --max_iters=500 --out_dir=/shared/out
"""

import ast
import math
import os
import sys
import sysconfig
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

# --- configuration: --NAME=VALUE overrides any of these ---
out_dir = "out"
data_dir = "data"
eval_interval, eval_iters, log_interval = 25, 8, 5
batch_size, block_size, gradient_accumulation_steps = 8, 64, 4  # the last: of all ranks together
n_layer, n_head, n_embd, dropout = 2, 2, 64, 0.0
learning_rate, min_lr, weight_decay, grad_clip = 3e-3, 3e-4, 0.1, 1.0
max_iters, warmup_iters = 100, 10
seed = 1337
for argument in sys.argv[1:]:
    name, _, value = argument.removeprefix("--").partition("=")
    if name not in globals() or name.startswith("_"):
        sys.exit(f"there is no setting {name!r}")
    globals()[name] = value if isinstance(globals()[name], str) else ast.literal_eval(value)
# -----------------------------------------------------------

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, local_rank, world_size = dist.get_rank(), int(os.environ["LOCAL_RANK"]), dist.get_world_size()
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
is_master = rank == 0
if gradient_accumulation_steps % world_size:
    sys.exit(f"gradient_accumulation_steps, {gradient_accumulation_steps}, is no multiple of {world_size} ranks")
gradient_accumulation_steps //= world_size


def prepare() -> None:
    """Write the tokens: bytes of Python's own standard library."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))[:60]
    tokens = np.frombuffer(b"".join(module.read_bytes() for module in modules), dtype=np.uint8).astype(np.uint16)
    Path(data_dir).mkdir(exist_ok=True)
    for split, part in (("train", tokens[: len(tokens) * 9 // 10]), ("val", tokens[len(tokens) * 9 // 10 :])):
        part.tofile(f"{data_dir}/{split}.new")
        os.replace(f"{data_dir}/{split}.new", f"{data_dir}/{split}.bin")


def get_batch(split: str) -> tuple[Tensor, Tensor]:
    data = np.memmap(f"{data_dir}/{split}.bin", dtype=np.uint16, mode="r")
    begins = torch.randint(len(data) - block_size, (batch_size,), generator=generator).tolist()
    windows = torch.stack([torch.from_numpy(data[i : i + block_size + 1].astype(np.int64)) for i in begins]).to(device)
    return windows[:, :-1], windows[:, 1:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(self.ln_1(x)).unflatten(-1, (3, n_head, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.Sequential(*(Block() for _ in range(n_layer)))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, 256, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        return functional.cross_entropy(self.lm_head(self.ln_f(self.h(hidden))).flatten(0, 1), y.flatten())


def get_lr(it: int) -> float:
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / max(1, max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss() -> float:
    """Return the validation loss of the same batches each time, as the mean of all ranks."""
    model.eval()
    before = generator.get_state()
    generator.manual_seed(seed + rank)
    total = torch.stack([model(*get_batch("val")) for _ in range(eval_iters)]).mean()
    generator.set_state(before)
    model.train()
    dist.all_reduce(total)
    return total.item() / world_size


if is_master and not Path(data_dir, "val.bin").exists():
    prepare()
dist.barrier()
torch.manual_seed(seed)
generator = torch.Generator().manual_seed(seed + rank)
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay)
iter_num = 0
checkpoint_file = Path(out_dir, "ckpt.pt")
if checkpoint_file.exists():
    checkpoint = torch.load(checkpoint_file, map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num = checkpoint["iter_num"]
    generator.manual_seed(seed + rank + 1000 * iter_num)
    if is_master:
        print(f"resuming after step {iter_num}", flush=True)
ddp = DistributedDataParallel(model, device_ids=[local_rank] if device.type == "cuda" else None)

clock = time.perf_counter()
while True:
    if iter_num % eval_interval == 0 or iter_num == max_iters:
        val_loss = estimate_loss()
        generator.manual_seed(seed + rank + 1000 * iter_num)  # what follows depends on the checkpoint alone
        if is_master:
            Path(out_dir).mkdir(exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
            torch.save(state, checkpoint_file.with_suffix(".new"))
            os.replace(checkpoint_file.with_suffix(".new"), checkpoint_file)
            print(f"step {iter_num}: val loss {val_loss:.4f}, saved", flush=True)
    if iter_num == max_iters:
        break
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    for micro_step in range(gradient_accumulation_steps):
        is_last = micro_step == gradient_accumulation_steps - 1
        with nullcontext() if is_last else ddp.no_sync():
            loss = ddp(*get_batch("train")) / gradient_accumulation_steps
            loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    if is_master and iter_num % log_interval == 0:
        seconds, clock = time.perf_counter() - clock, time.perf_counter()
        milliseconds = 1000 * seconds / log_interval
        print(
            f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}, {milliseconds:.0f} ms", flush=True
        )

if is_master:
    print(f"final loss {val_loss!r}")
dist.barrier()  # meanwhile gloo's threads let go of tensors; they could not while this one waits for their end
dist.destroy_process_group()
