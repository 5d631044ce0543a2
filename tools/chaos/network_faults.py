"""Faults of the network between hosts: strangers at all ports of a job, and hosts that do not reach each other."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from tests.hosts.host import Host
from tools.chaos.job import Job

_LISTENS = "0A"
_FLOOD = """
import contextlib, os, socket, struct, sys, time
strangers = []
deadline = time.monotonic() + 10
for place in sys.argv[1:]:
    address, _, port = place.rpartition(":")
    for number in range(150):
        if time.monotonic() > deadline:
            break
        with contextlib.suppress(OSError):
            strangers.append(socket.create_connection((address, int(port)), timeout=1))
            if number % 5 == 0:
                strangers[-1].sendall(os.urandom(500))
            if number % 7 == 0:
                strangers[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                strangers.pop().close()
print(len(strangers), flush=True)
time.sleep(3)
"""
"""Most connections are silent, some send garbage, some are reset."""


def flood(job: Job, host: Host) -> tuple[str, ...]:
    """From one host, connect to the ports of the driver, the agents and the stores on all hosts."""
    places = sorted(place for other in job.hosts.hosts for place in ports(job, other))
    command = [sys.executable, "-ISc", _FLOOD, *places]
    strangers = job.hosts.popen(host, command, stdout=subprocess.PIPE)
    assert strangers.stdout is not None
    strangers.stdout.readline()
    return ()


def ports(job: Job, host: Host) -> set[str]:
    """Return `address:port` of whatever of the driver, agents and stores listens for others on this host.

    Ports of gloo are left out: workers believe whoever connects.
    """
    driver = job.driver
    pids = [*job.agents(host), *job.stores(host), *([driver[0]] if driver and driver[1] is host else [])]
    ours = {inode for pid in pids for inode in _sockets(pid)}
    with contextlib.suppress(OSError):
        rows = [line.split() for line in Path(f"/proc/{host.init}/net/tcp").read_text().splitlines()[1:]]
        found = [row[1].split(":") for row in rows if row[3] == _LISTENS and row[9] in ours]
        places = [(socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in found]
        return {f"{host.address}:{port}" for address, port in places if address in (host.address, "0.0.0.0")}
    return set()


def _sockets(pid: int) -> set[str]:
    """Return the inodes of the sockets of a process."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}"))
                found |= {match[1]} if match else set()
    return found


def cut_one_way(job: Job, host: Host) -> tuple[str, ...]:
    """Lose all that a host sends to another one of the attempt, which is not the driver's.

    It is the nearest by rank: gloo's ring connects neighbours, and would not miss the others.
    """
    roster = job.roster
    places = {other: roster.index(node) for other in job.hosts.hosts for node in job.nodes_on(other) if node in roster}
    others = {other: place for other, place in places.items() if other not in (host, job.hosts.head)}
    if host in places and others:
        away = {other: (place - places[host]) % len(roster) for other, place in others.items()}
        job.hosts.cut(host, to=min(away, key=lambda other: min(away[other], len(roster) - away[other])))
    return ("PeersUnreachable",)
