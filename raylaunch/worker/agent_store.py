"""Telling the store that we serve from those that scripts serve themselves, which torch 2.13 does not."""

from __future__ import annotations

import types
from typing import Any

from raylaunch.worker.on_import import when_imported
from raylaunch.worker.spec import WorkerSpec

_RENDEZVOUS = "torch.distributed.rendezvous"
_LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))
_agents = {"address": "", "port": ""}
"""Where the agent's store is. Kept from the start: a script may set MASTER_PORT for a group of its own."""


def remember(spec: WorkerSpec) -> None:
    """To be called in the worker, before the user's code."""
    _agents.update(address=spec.env.get("MASTER_ADDR", ""), port=spec.env.get("MASTER_PORT", ""))


def mend_private_groups() -> None:
    """Let `tcp://` groups of the script's own have a server, and `tcp://localhost:$MASTER_PORT` find the agent's.

    TORCHELASTIC_USE_AGENT_STORE makes torch treat every endpoint as one that the agent serves, so that a private
    `tcp://host:port` group waits for a server that nobody starts (pytorch#192113). Only the MASTER_PORT that a worker
    was started with is the agent's. torchrun's store listens on all interfaces of its node, ours on the one address
    that other nodes use.
    """
    when_imported(_RENDEZVOUS, _mend)


def _mend(module: types.ModuleType) -> None:
    original = getattr(module, "_create_c10d_store", None)
    uses_agent_store = getattr(module, "_torchelastic_use_agent_store", None)
    if original is None or uses_agent_store is None or hasattr(original, "__wrapped__"):
        return  # another torch; it is left as it is

    def create_c10d_store(hostname: str, port: int, *args: Any, **kwargs: Any) -> Any:
        agents = str(port) == _agents["port"]
        if agents and hostname in _LOOPBACK:
            hostname = _agents["address"]
        module.__dict__["_torchelastic_use_agent_store"] = uses_agent_store if agents else lambda: False
        try:
            return original(hostname, port, *args, **kwargs)
        finally:
            module.__dict__["_torchelastic_use_agent_store"] = uses_agent_store

    create_c10d_store.__wrapped__ = original  # type: ignore[attr-defined]
    module.__dict__["_create_c10d_store"] = create_c10d_store
