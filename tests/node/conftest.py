"""The fixtures of the harness, for this folder."""

from tests.node.harness import (
    either,
    mark,
    no_leaks,
    node,
    own_node,
    pipe,
    shared_forkserver_node,
    shared_spawn_node,
    shared_state_node,
    shared_torch_node,
    state_node,
    torch_either,
    torch_node,
)

__all__ = [
    "either",
    "mark",
    "no_leaks",
    "node",
    "own_node",
    "pipe",
    "shared_forkserver_node",
    "shared_spawn_node",
    "shared_state_node",
    "shared_torch_node",
    "state_node",
    "torch_either",
    "torch_node",
]
