"""`python -m tests.hosts.hole COMMAND...`: run it where nothing answers the DNS, and say what was asked.

On a network of its own, with a resolver that hears all questions and answers none, as the DNS of many a cluster does
for addresses without a name. It needs root. The last line of stdout is JSON: the addresses whose names were asked for,
and how long the command took. To compare, in it:

    python -m tests.hosts.hole raylaunch --nproc-per-node 8 train.py
    python -m tests.hosts.hole torchrun --nproc-per-node 8 train.py
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

RESOLVER = "127.0.0.53"
ADDRESS = "10.9.9.1"
"""This machine's address on the network of the hole."""
_INSIDE = "RAYLAUNCH_TEST_HOLE"
_APART = ["unshare", "--net", "--mount", "--propagation", "private"]


def why_not() -> str:
    """Return why no hole can be made here; `""`: it can."""
    if os.geteuid() or not shutil.which("unshare") or not shutil.which("ip"):
        return "a network of its own needs root, util-linux and iproute2"
    tried = subprocess.run([*_APART, "true"], check=False, capture_output=True, text=True)
    return tried.stderr.strip()


class Resolver:
    """Receives DNS questions, and does not answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((RESOLVER, 53))
        threading.Thread(target=self._hear, daemon=True).start()

    def _hear(self) -> None:
        while True:
            self.asked.append(_name(self._socket.recv(512)))


def _name(question: bytes) -> str:
    """Return the name in a DNS question: labels after a header of 12 bytes, each with its length before it."""
    parts, at = [], 12
    while length := question[at]:
        parts.append(question[at + 1 : at + 1 + length].decode())
        at += 1 + length
    return ".".join(parts)


def main() -> int:
    """Make the hole and run this module again in it."""
    if not os.environ.pop(_INSIDE, ""):
        command = [*_APART, sys.executable, "-m", "tests.hosts.hole", *sys.argv[1:]]
        return subprocess.run(command, check=False, env=os.environ | {_INSIDE: "1"}).returncode
    for words in ("link set lo up", f"address add {ADDRESS}/32 dev lo"):
        subprocess.run(["ip", *words.split()], check=True)
    with tempfile.TemporaryDirectory() as folder:
        conf = Path(folder, "resolv.conf")
        conf.write_text(f"nameserver {RESOLVER}\n")
        subprocess.run(["mount", "--bind", str(conf), "/etc/resolv.conf"], check=True)
        resolver, began = Resolver(), time.monotonic()
        code = subprocess.run(sys.argv[1:], check=False).returncode
        subprocess.run(["umount", "/etc/resolv.conf"], check=True)
    found = {"asked": sorted(set(resolver.asked)), "times": len(resolver.asked), "seconds": time.monotonic() - began}
    print(json.dumps(found), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
