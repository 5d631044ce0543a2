"""The fixtures of the harness, for this folder."""

from tests.node.harness import ears, either, mark, no_leaks, node, own, warm_forking, warm_spawning

__all__ = ["ears", "either", "mark", "no_leaks", "node", "own", "warm_forking", "warm_spawning"]
