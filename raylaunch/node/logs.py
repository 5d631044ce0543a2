"""Following log files as they grow, to show them elsewhere. Workers write them directly and never wait for us."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from raylaunch.core.contract import STDERR, STDOUT, rank_dir

_CHUNK = 1024 * 1024
_MOST_AT_THE_END = 4 * _CHUNK
"""Bytes: of a log that is further ahead than this when its worker ends, only the end is shown, and that is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Some bytes that a worker wrote, whole lines where possible."""

    rank: int
    stream: str
    """`stdout` or `stderr`."""
    data: bytes


@dataclass(slots=True)
class _Tail:
    rank: int
    stream: str
    path: Path
    offset: int = 0


class Tails:
    """The log files of one attempt's shown ranks on this node."""

    def __init__(self, run_dir: str, attempt: int, ranks: list[int]) -> None:
        self._tails = [
            _Tail(rank, stream, Path(rank_dir(run_dir, attempt, rank) / name))
            for rank in ranks
            for stream, name in (("stdout", STDOUT), ("stderr", STDERR))
        ]

    def read(self, *, to_the_end: bool = False) -> list[Output]:
        """What was written since the last time: whole lines, and at the end also a last one without its newline."""
        found = []
        for tail in self._tails:
            if to_the_end and (skipped := _skip(tail)):
                notice = f"[raylaunch: {skipped} bytes are not shown; all of it is in {tail.path}]\n"
                found.append(Output(rank=tail.rank, stream=tail.stream, data=notice.encode()))
            while data := _grown(tail, keep_partial=not to_the_end):
                found.append(Output(rank=tail.rank, stream=tail.stream, data=data))
                if not to_the_end:
                    break
        return found


def _grown(tail: _Tail, *, keep_partial: bool) -> bytes:
    try:
        fd = os.open(tail.path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        data = os.pread(fd, _CHUNK, tail.offset)
    finally:
        os.close(fd)
    if keep_partial and len(data) < _CHUNK:
        data = data[: data.rfind(b"\n") + 1]
    tail.offset += len(data)
    return data


def _skip(tail: _Tail) -> int:
    """Move on to the last part of a log that is far ahead; how many bytes that leaves out."""
    try:
        ahead = tail.path.stat().st_size - tail.offset
    except OSError:
        return 0
    skipped = max(0, ahead - _MOST_AT_THE_END)
    tail.offset += skipped
    return skipped
