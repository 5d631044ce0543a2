"""A patch of torch, so that TCPStores that a script serves itself work under TORCHELASTIC_USE_AGENT_STORE.

With that variable, torch (2.13, `torch/distributed/rendezvous.py`, `_create_c10d_store`) makes every process a client
of every endpoint. A group of the script's own at `tcp://host:port` then waits for a server that nobody starts
(pytorch#192113). With the patch, only the MASTER_PORT that the worker was started with is served by raylaunch.

torchrun's store listens on all interfaces of its node, raylaunch's only on the address that the other nodes use. So
`tcp://localhost:$MASTER_PORT` is sent to that address.
"""

from __future__ import annotations

import types
from collections.abc import Mapping

from raylaunch.worker import torch_internals
from raylaunch.worker.heartbeats.import_hook import when_imported

_MODULE = "torch.distributed.rendezvous"
_LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))
_launch_store = {"address": "", "port": ""}
"""Where raylaunch serves the store of this attempt. A script may change MASTER_PORT for a group of its own."""


def remember(env: Mapping[str, str]) -> None:
    """Take the store's address from the worker's environment. Called before the user's code runs."""
    _launch_store.update(address=env.get("MASTER_ADDR", ""), port=env.get("MASTER_PORT", ""))


def apply() -> None:
    """Patch torch, now or when it is imported. A torch without the two functions is left as it is."""
    when_imported(_MODULE, _patch)


def _patch(module: types.ModuleType) -> None:
    torch_internals.patch_store_creation(module, _place)


def _place(hostname: str, port: int) -> tuple[str, bool]:
    is_launch_store = str(port) == _launch_store["port"]
    return _launch_store["address"] if is_launch_store and hostname in _LOOPBACK else hostname, is_launch_store
