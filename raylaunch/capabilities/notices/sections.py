"""What an agent tells of the notices of its cloud."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeStatus:
    """What the metadata server of the agent's machine says."""

    left: float | None = None
    """Seconds until the machine is taken away; None: there is no notice. Clocks of two machines may differ."""
    problem: str = ""
    """Why the server cannot be asked."""


_STATUSES = msgspec.msgpack.Decoder(NoticeStatus)


def dump(section: NoticeStatus) -> bytes:
    """Return a section as bytes."""
    return msgspec.msgpack.encode(section)


def load(section: bytes) -> NoticeStatus:
    """Read a section of a status."""
    return _STATUSES.decode(section)
