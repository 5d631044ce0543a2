"""All agents of a run: their places, their handles, and what is heard of them. The driver knows them by name only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from raylaunch.cluster.agent import AgentSettings, Words, actor_class
from raylaunch.cluster.placement import Reservation, Seat
from raylaunch.core.plan import Plan
from raylaunch.core.ranks import Assignment, Rendezvous
from raylaunch.errors import ClusterError

_CLOSE_SECONDS = 10.0
_VALUES_SECONDS = 600.0
_MOST_FALSE_STARTS = 3
_CONSTRUCTOR_FAILED = "creation task"
"""What Ray's message says where an actor's `__init__` raised: a restart would end the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """An agent said something."""

    node: str
    words: Words


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """An agent will not say anything more."""

    node: str
    why: str
    error: BaseException | None = None


Tell = Callable[[Heard | Gone], None]
"""Takes what is heard. It is called from Ray's threads, and must only put it away."""


class Fleet(Protocol):
    """What the driver needs of the agents. Orders go out at once and answer by way of `tell`."""

    def start(self, tell: Tell) -> None:
        """Ask for the nodes."""

    def launch(self, node: str, part: Assignment, meeting: Rendezvous) -> None:
        """Start a node's part of an attempt."""

    def stop(self, node: str, attempt: int, grace: float, signal: str) -> None:
        """End the attempt's workers on a node."""

    def forward(self, node: str, attempt: int, signal: str) -> None:
        """Send the attempt's workers on a node a signal that is not ours."""

    def open_store(self, node: str, attempt: int) -> None:
        """Have a store ready on a node."""

    def joined(self, node: str, node_id: str) -> bool:
        """A node is up, on the Ray node of that id; the next may be asked for. False: it was given up before."""

    def release(self, node: str) -> None:
        """Give a node up."""

    def replace(self, gone: Gone) -> None:
        """Another agent at the place of one that is gone. Raises ClusterError where that is hopeless."""

    def values(self, nodes: Mapping[str, Any]) -> dict[int, bytes]:
        """What functions returned, by rank."""

    def close(self) -> None:
        """End everything, on all nodes."""


@dataclass(slots=True)
class _Post:
    seat: Seat
    actor: Any
    node_id: str = ""


class RayFleet:
    """Agents as Ray actors. One call to `words` is always pending at each, so whatever happens is pushed to us."""

    def __init__(self, plan: Plan, told: AgentSettings) -> None:
        self._plan = plan
        self._told = told
        self._reservation = Reservation(plan)
        self._actor_class = actor_class()
        #: All and only the agents that were started and are neither gone nor given up.
        self._posts: dict[str, _Post] = {}
        self._tell: Tell = lambda _: None
        self._count = 0
        self._false_starts = 0

    def start(self, tell: Tell) -> None:
        """Reserve the gang; each agent starts as soon as its place is granted.

        Where agents may share a node, the others are asked for at once too; else each must know the nodes before it.
        """
        self._tell = tell
        for seat in self._reservation.gang():
            self._man(seat)
        if not self._plan.spread:
            for bundle in self._plan.bundles[self._plan.min_nodes :]:
                self._man(self._reservation.one_more(bundle, ()))

    def _man(self, seat: Seat) -> None:
        self._count += 1
        node = f"node-{self._count}"
        told = replace(self._told, nproc=seat.bundle.nproc, settings=replace(self._told.settings, node=node))
        actor = self._actor_class.options(**seat.options()).remote(told)
        self._posts[node] = _Post(seat, actor)
        self._listen(node)

    def _listen(self, node: str) -> None:
        post = self._posts.get(node)
        if post is None:
            return

        def heard(future: Any) -> None:
            error = future.exception()
            if error is not None:
                self._tell(Gone(node=node, why=_in_words(error), error=error))
                return
            self._tell(Heard(node=node, words=future.result()))
            self._listen(node)

        post.actor.words.remote().future().add_done_callback(heard)

    def launch(self, node: str, part: Assignment, meeting: Rendezvous) -> None:
        """One message to the node."""
        self._order(node, "launch", part, meeting)

    def stop(self, node: str, attempt: int, grace: float, signal: str) -> None:
        """One message to the node."""
        self._order(node, "stop", attempt, grace, signal)

    def forward(self, node: str, attempt: int, signal: str) -> None:
        """One message to the node."""
        self._order(node, "forward", attempt, signal)

    def open_store(self, node: str, attempt: int) -> None:
        """One message to the node."""
        self._order(node, "open_store", attempt)

    def _order(self, node: str, name: str, *args: Any) -> None:
        post = self._posts.get(node)
        if post is None:
            return

        def done(future: Any) -> None:
            error = future.exception()
            if error is not None and not isinstance(error, RayActorError):  # of a death, `words` tells
                self._tell(Gone(node=node, why=_in_words(error), error=error))

        getattr(post.actor, name).remote(*args).future().add_done_callback(done)

    def joined(self, node: str, node_id: str) -> bool:
        """Remember where it is; ask for one more beyond the gang while the job may use it."""
        if node not in self._posts:
            return False
        self._posts[node].node_id = node_id
        everybody = all(post.node_id for post in self._posts.values())
        if everybody and len(self._posts) < self._plan.max_nodes:
            bundle = self._plan.bundles[len(self._posts)]
            self._man(self._reservation.one_more(bundle, [post.node_id for post in self._posts.values()]))
        return True

    def release(self, node: str) -> None:
        """Kill the agent, whose fork server then ends its workers; its place is manned anew."""
        post = self._posts.pop(node, None)
        if post is not None:
            ray.kill(post.actor)
            self._man(post.seat)

    def replace(self, gone: Gone) -> None:
        """The place stays ours; where its node has gone too, Ray finds it another."""
        post = self._posts.pop(gone.node, None)
        if post is None:
            return
        with contextlib.suppress(Exception):  # dead already, or of no use any more
            ray.kill(post.actor)
        if not post.node_id:  # it never came up
            self._false_starts += 1
            if self._false_starts >= _MOST_FALSE_STARTS or _CONSTRUCTOR_FAILED in str(gone.error):
                raise _cannot_start(gone)
        self._man(post.seat)

    def values(self, nodes: Mapping[str, Any]) -> dict[int, bytes]:
        """Collect the results of the last attempt."""
        refs = [self._posts[node].actor.values.remote() for node in nodes if node in self._posts]
        try:
            parts = ray.get(refs, timeout=_VALUES_SECONDS)
        except RayError as error:
            msg = f"the results could not be fetched from the nodes: {_in_words(error)}"
            raise ClusterError(msg) from error
        return {rank: value for part in parts for rank, value in part.items()}

    def close(self) -> None:
        """Have each agent end its processes and wait for that, within seconds; then kill it and give its place back."""
        posts, self._posts = self._posts, {}
        up = [post.actor.close.remote() for post in posts.values() if post.node_id]
        with contextlib.suppress(RayError, GetTimeoutError):
            ray.get(up, timeout=_CLOSE_SECONDS)
        for post in posts.values():
            with contextlib.suppress(Exception):
                ray.kill(post.actor)
        self._reservation.cancel()


def _in_words(error: BaseException) -> str:
    """One line; Ray's own messages go on for many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, RayActorError) and lines:
        return lines[-1] if _CONSTRUCTOR_FAILED in str(error) else "its agent died"
    return lines[-1] if lines else type(error).__name__


def _cannot_start(gone: Gone) -> ClusterError:
    if "No module named 'raylaunch'" in str(gone.error):
        return ClusterError(
            "raylaunch is not installed on the nodes of the cluster",
            hint="install it there, or name it in the `pip` of the job's runtime environment",
        )
    return ClusterError(f"the agent of {gone.node} cannot start: {gone.why}")
