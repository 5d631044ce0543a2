"""A bad link: a program that passes frames between two network devices, delays them and drops some.

`link.py ONE OTHER MILLISECONDS JITTER LOSS`: it makes both devices, says so by an empty line, and takes them along when
its stdin ends. Linux has `netem` for it, which not every kernel is built with.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x1002
_MOST_BYTES = 1 << 16


def device(name: str) -> int:
    """Make a tap device. What is written to it arrives at the device; what the device sends can be read."""
    fd = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", name.encode(), _TAP_WITHOUT_HEADER))
    return fd


def main() -> None:
    ends = [device(name) for name in sys.argv[1:3]]
    delay, jitter, loss = float(sys.argv[3]) / 1e3, float(sys.argv[4]) / 1e3, float(sys.argv[5])
    others = dict(zip(ends, reversed(ends), strict=True))
    waiting: list[tuple[float, int, int, bytes]] = []
    print(flush=True)
    count = 0
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = select.select([*ends, 0], [], [], timeout)[0]
        if 0 in ready:
            return
        for end in ready:
            frame = os.read(end, _MOST_BYTES)
            if random.random() >= loss:
                count += 1
                due = time.monotonic() + delay + jitter * random.uniform(-1.0, 1.0)
                heapq.heappush(waiting, (due, count, others[end], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # a device that is not up yet takes nothing
                os.write(end, frame)


if __name__ == "__main__":
    main()
