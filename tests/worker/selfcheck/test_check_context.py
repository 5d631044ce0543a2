"""Connections of a check to the store, without torch."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import pytest

from raylaunch.worker.selfcheck.check_context import another_connection


class PrefixStore:
    def __init__(self, prefix: str, store: object) -> None:
        self.prefix, self.underlying_store = prefix, store
        self.timeout = timedelta(seconds=7)


def test_a_store_that_can_be_cloned() -> None:
    """Newer torches than 2.6 have the method."""
    assert another_connection(SimpleNamespace(clone=lambda: "clone")) == "clone"


def test_a_store_that_cannot_be_cloned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client of the server that is below all prefixes, which are the same on all ranks."""
    dist = ModuleType("torch.distributed")
    dist.PrefixStore = PrefixStore
    dist.TCPStore = lambda *args, **more: (args, more)
    torch = ModuleType("torch")
    torch.distributed = dist
    for module in (torch, dist):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    server = SimpleNamespace(host="10.0.0.1", port=29500)
    found = another_connection(PrefixStore("selfcheck", PrefixStore("/worker/attempt_0", server)))
    assert (found.prefix, found.underlying_store) == (
        "another_connection",
        (("10.0.0.1", 29500), {"is_master": False, "timeout": timedelta(seconds=7)}),
    )
