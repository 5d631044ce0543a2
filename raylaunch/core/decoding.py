"""Lets threads decode messages at the same time."""

from __future__ import annotations

from typing import Any

import msgspec


def prepare(*kinds: Any) -> None:
    """Let msgspec look at these types now, while the module that decodes them is imported.

    It does so when a dataclass is decoded for the first time. Until msgspec 0.22 at least, another thread that decodes
    the same class meanwhile reads what is not complete, and the process crashes.
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)
