"""The states of the random number generators of a process: those of Python, NumPy, torch and CUDA."""

from __future__ import annotations

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


def _uses_cuda(torch: Any) -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())
