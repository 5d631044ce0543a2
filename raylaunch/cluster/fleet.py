"""What the driver needs of the agents of a run, which it knows by name only, and what it hears of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from raylaunch.cluster.agent import Words
from raylaunch.core.ranks import Assignment, Rendezvous
from raylaunch.errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """The cluster gave a place on a host (Ray's node id), where the agent starts. It will be heard, or be gone."""

    node: str
    host: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """An agent said something. `at` is the time.monotonic() at which it arrived."""

    node: str
    words: Words
    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """An agent will not say anything more. `silent`: that is the driver's own view, since nothing came for long."""

    node: str
    why: str
    error: BaseException | None = None
    silent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """A host (Ray's node id) goes at `deadline`, in time.monotonic() seconds."""

    host: str
    deadline: float
    why: str
    ours: bool = False
    """This process runs there too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hopeless:
    """The run cannot go on, whatever its nodes do."""

    error: ClusterError


Item = Granted | Heard | Gone | Draining | Hopeless
Tell = Callable[[Item], None]
"""Takes what is heard. It is called from several threads, and must only put it away."""


class Fleet(Protocol):
    """All agents of the run. Orders go out at once and answer by way of `tell`; nothing here waits for a host."""

    def start(self, tell: Tell) -> None:
        """Ask for the nodes: as many as the plan has bundles. From here on, whatever is missing is asked for."""

    def launch(self, node: str, part: Assignment, meeting: Rendezvous) -> None:
        """Start a node's part of an attempt."""

    def stop(self, node: str, attempt: int, grace: float, signal: str) -> None:
        """End the attempt's workers on a node."""

    def forward(self, node: str, attempt: int, signal: str) -> None:
        """Send the attempt's workers on a node a signal that is not ours."""

    def open_store(self, node: str, attempt: int) -> None:
        """Have a store ready on a node."""

    def ask_checkpoint(self, node: str, attempt: int, step: int) -> None:
        """Propose to the attempt's workers on a node to save when they have done this step."""

    def settle(self, node: str, attempt: int, step: int) -> None:
        """Have them save at the step that was proposed."""

    def dump_stacks(self, node: str, attempt: int) -> None:
        """Have a node tell what the attempt's workers are doing."""

    def joined(self, node: str, node_id: str) -> bool:
        """A node is up, on the Ray node of that id. False: it is not wanted there, and was ended."""

    def release(self, node: str) -> None:
        """Give a node up; others are asked for in its stead."""

    def replace(self, gone: Gone) -> None:
        """A node is gone; others are asked for in its stead. Raises ClusterError where that is hopeless."""

    def shun(self, host: str) -> None:
        """Ask for no more nodes on this host. One that is up there stays, and another is asked for beside it."""

    def readmit(self, host: str) -> None:
        """The host may be used again."""

    def values(self, nodes: Mapping[str, Any]) -> dict[int, bytes]:
        """What functions returned, by rank."""

    def rest(self) -> None:
        """The run is over: have agents wait for the next one, where that is wanted."""

    def close(self) -> None:
        """End everything that does not rest, on all nodes."""
