"""Ray's provider of nodes for tests, whose nodes are as lean as their head: see `lean_ray.py`."""

from __future__ import annotations

from typing import Any

from lean_ray import make_lean
from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class LeanProvider(FakeMultiNodeProvider):
    def __init__(self, config: dict[str, Any], *args: Any) -> None:
        make_lean(config["workers"])
        super().__init__(config, *args)
