"""What the kernel tells of what another process is doing."""

from __future__ import annotations

import contextlib
from pathlib import Path

GONE = "X"
"""The state of a process that is no more, as the kernel writes it."""


def state(pid: int) -> str:
    """One letter, as in /proc: `R` running, `S` sleeping, `T` stopped, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0]
    except OSError:
        return GONE


def memory(pid: int) -> int:
    """Bytes in use, what is shared with other processes counted in part; 0: not known."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(errors="replace").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def holds_back(pid: int, number: int) -> bool:
    """Whether its main thread blocks the signal, as it does while it is in the handler."""
    return bool(_masks(pid).get("SigBlk", 0) >> (number - 1) & 1)


def answers(pid: int, number: int) -> bool:
    """Whether it has a handler for the signal, or ignores it: what the signal does otherwise is the kernel's choice."""
    masks = _masks(pid)
    return bool((masks.get("SigCgt", 0) | masks.get("SigIgn", 0)) >> (number - 1) & 1)


def _masks(pid: int) -> dict[str, int]:
    """What it does with signals, in the kernel's names; empty where it is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        fields = (line.partition(":") for line in lines)
        return {name: int(mask, 16) for name, _, mask in fields if name in {"SigBlk", "SigIgn", "SigCgt"}}
    return {}
