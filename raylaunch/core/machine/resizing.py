"""What replaces a healthy world by another: nodes that joined, and nodes that will be taken away."""

from __future__ import annotations

from dataclasses import replace

from raylaunch.core.machine.events_and_actions import Action, Cordon, NodeDraining, NodeJoined, Release
from raylaunch.core.machine.node_loss import NodeLosses
from raylaunch.core.machine.state import Gathering, ResizeTimes, Running, Saving, Starting
from raylaunch.core.machine.transitions import STOP_MARGIN
from raylaunch.core.placement.environment import Member

_EVACUATION_SHARE = 0.5
"""The part of a drain notice that is kept for saving and stopping at most; before, the world trains on."""


class Resizing(NodeLosses):
    """The part of `Machine` that changes which nodes take part, though no worker failed."""

    def _node_joined(self, event: NodeJoined) -> list[Action]:
        if event.host in self.health.excluded:
            return [Release(node=event.node, why="its host is left out at present")]
        if event.host in self.drained_hosts:
            return [Release(node=event.node, why="its host is drained")]
        self.members.add(Member(node=event.node, address=event.address, nproc=event.nproc, host=event.host))
        if len(self.members) >= self.wanted_nodes > self.job.min_nodes:
            self._set_bounds(self.wanted_nodes, self.job.max_nodes)
        match self.state:
            case Gathering() as gathering:
                return self._gather(gathering, f"{event.node} joined")
            case Starting() | Running() as state:
                return self._plan_resize(state, f"{event.node} joined")
            case _:
                return []

    def _set_bounds(self, low: int, high: int) -> None:
        self.is_resized = True
        self.job = replace(self.job, nnodes=f"{low}:{high}")
        self.members.set_bounds(self.job)

    def _plan_resize(self, state: Starting | Running, why: str) -> list[Action]:
        """Take in nodes that are ready: now if no other has to be waited for, else at last call."""
        resize = state.resize
        complete = len(self.members) >= self.job.max_nodes or resize.evacuate_at is not None
        if (resize.last_call is None or complete) and not self._could_improve(resize):
            return []
        if isinstance(state, Running) and complete:
            return self._resize(why)
        if resize.last_call is None or complete:
            resize.last_call = self.now + (0.0 if complete else self.job.last_call)
        return self._set_timer(f"{why}; more may come")

    def _could_improve(self, resize: ResizeTimes) -> bool:
        """Whether the members allow a better world. A world that has begun to finish is not disturbed for it."""
        if self.world.finishing:
            return False
        if resize.evacuate_at is not None:
            return self.members.enough
        if len(self.world.roster) >= self.job.max_nodes or len(self.members) < self.wanted_nodes:
            return False
        return sum(member.nproc for member in self.members.choose(self.world.roster)) > self.world.size

    def _node_draining(self, event: NodeDraining) -> list[Action]:
        cordon = self._leave_host(event) if event.by else []
        self.members.drain(event.node)
        why = f"{event.node} is being drained: {event.why}"
        if isinstance(self.state, Gathering):
            return [*cordon, *self._release_drained(), *self._gather(self.state, why)]
        released = [*cordon, *self._release_drained(kept=self.world.nodes)]
        return [*released, *self._world_drained(event, why)] if event.node in self.world.unfinished else released

    def _leave_host(self, event: NodeDraining) -> list[Action]:
        """Use the host of a node that a person drains no more."""
        member = self.nodes[event.node]
        if not member.host or member.host in self.drained_hosts:
            return []
        self.drained_hosts.add(member.host)
        return [
            Cordon(host=member.host, why=f"no node is used on the host of {event.node} ({member.address}) any more")
        ]

    def _world_drained(self, event: NodeDraining, why: str) -> list[Action]:
        """Plan to leave a node of the world before its deadline."""
        known = self.world.drain_deadline
        deadline = self.world.drain_deadline = event.deadline if known is None else min(event.deadline, known)
        match self.state:
            case Saving() as saving:
                saving.deadline = min(saving.deadline, self.now + self._seconds_to_save())
                return self._set_timer("all workers must have saved by then")
            case Running() if self.members.enough:
                return self._resize(why)
            case Starting() as starting if self.members.enough and self.world.known.uses_state:
                starting.resize.evacuate_at = self.now  # once it runs: what only this node holds must be restored first
                return self._set_timer(why)
            case Starting() if self.members.enough:
                return self._replace(why)
            case Starting() | Running() as state:
                state.status = f"{why}; the workers go on until another node comes"
                state.status += "" if event.by else ", or the time is short"
                wanted = 2 * self.job.shutdown_timeout + STOP_MARGIN
                latest = deadline - min(wanted, max(0.0, deadline - self.now) * _EVACUATION_SHARE)
                known_latest = state.resize.evacuate_at
                state.resize.evacuate_at = latest if known_latest is None else min(latest, known_latest)
                self.health.shorten_exclusions(self.now)
                return self._set_timer(state.status)
            case _:
                return []
