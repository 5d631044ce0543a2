"""What a person should know of nodes, said once and not for each node or attempt."""

from __future__ import annotations

from collections.abc import Callable, Collection

from raylaunch.node.protocol.node_status import AgentReady


class NodeWarnings:
    """The warnings of all nodes of a run."""

    def __init__(self, say: Callable[[str], None], said: Collection[str] = ()) -> None:
        """`said`: what an earlier driver has said."""
        self._say = say
        self.said = set(said)
        #: What matters as soon as there are several hosts.
        self._of_several_hosts: set[str] = set()

    def warn(self, text: str) -> None:
        """Say this unless it was said before; `""`: there is nothing to say."""
        if text and text not in self.said:
            self.said.add(text)
            self._say(text)

    def came_up(self, up: AgentReady, *, several_hosts: bool, shares_host: bool) -> None:
        """Say what the workers of a node get because of other nodes: on other hosts, or on its own."""
        if shares_host and not up.threads:
            self.warn(
                "nodes share a host, so each worker has one OpenMP thread, as if they shared a node; "
                "`cpus_per_worker` or OMP_NUM_THREADS gives it more"
            )
        if up.interface_env:
            pairs = ", ".join(f"{name}={value}" for name, value in up.interface_env.items())
            self._of_several_hosts.add(f"workers get {pairs}: other hosts cannot reach what they would use otherwise")
        if several_hosts:
            for text in sorted(self._of_several_hosts):
                self.warn(text)
