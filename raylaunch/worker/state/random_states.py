"""The states of the random number generators of a process: those of Python, NumPy, torch and CUDA."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any


def collect() -> dict[str, Any]:
    """Return the states of the generators that this process has, by library."""
    found: dict[str, Any] = {"python": random.getstate()}
    if (numpy := sys.modules.get("numpy.random")) is not None:
        found["numpy"] = numpy.get_state()
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = torch.get_rng_state()
        if _uses_cuda(torch):
            found["cuda"] = torch.cuda.get_rng_state()
    return found


def restore(states: dict[str, Any]) -> None:
    """Set the generators to states that `collect` returned. A library that is not imported is left alone."""
    random.setstate(states["python"])
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy is not None and "numpy" in states:
        numpy.set_state(states["numpy"])
    if torch is not None and "torch" in states:
        torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])


def seed_from(states: dict[str, Any], rank: int) -> None:
    """Seed the generators for a rank that has no states yet: each from what `collect` returned on another rank.

    The same states and the same rank give the same seeds. A library that is not imported is left alone.
    """
    random.seed(_seed(repr(states["python"]).encode(), rank))
    numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy is not None and "numpy" in states:
        numpy.seed(_seed(repr((states["numpy"][0], states["numpy"][1].tolist())).encode(), rank) % 2**32)
    if torch is not None and "torch" in states:
        torch.default_generator.manual_seed(_seed(bytes(states["torch"].tolist()), rank))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.manual_seed(_seed(bytes(states["cuda"].tolist()), rank))


def _seed(state: bytes, rank: int) -> int:
    return int.from_bytes(hashlib.sha256(b"%d " % rank + state).digest()[:7], "big")


def _uses_cuda(torch: Any) -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())
