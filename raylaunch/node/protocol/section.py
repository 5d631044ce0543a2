"""What the parts of a capability in the driver and on a node tell each other, which the kernel does not read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilitySection:
    """A capability's section of a goal or a status, which replaces the one before; see `cluster/capability.py`."""

    capability: str
    body: bytes = field(repr=False)
