"""What people may request of a run: that it stops, restarts, has other nodes, or leaves a host."""

from __future__ import annotations

import signal as signals
from dataclasses import replace

from raylaunch.core.machine.events_and_actions import (
    Action,
    Finish,
    ForwardRequested,
    NodeDraining,
    RequestEvent,
    ResizeRequested,
    RestartRequested,
    Scale,
    Stop,
    StopRequested,
)
from raylaunch.core.machine.resizing import Resizing
from raylaunch.core.machine.state import Done, Gathering, Running, Saving, Starting, Stopping
from raylaunch.core.newtypes import assert_never
from raylaunch.core.text import count
from raylaunch.errors import signal_exit_code


def requested(event: StopRequested | RestartRequested | ResizeRequested) -> str:
    """Return what was requested and by whom, for a person: `ada@login-1 requested a restart`, `SIGTERM received`."""
    match event:
        case StopRequested(by=""):
            return f"{event.signal} received"
        case StopRequested():
            return f"{event.by} requested the stop"
        case RestartRequested():
            return f"{event.by} requested a restart"
        case ResizeRequested(min_nodes=low, max_nodes=high):
            return f"{event.by} requested {count(low, 'node') if low == high else f'{low} to {high} nodes'}"
        case _:
            return assert_never(event)


class Requests(Resizing):
    """The part of `Machine` that does what people request.

    A signal to the driver is a request too. Who requests something by a command can be told why it is refused; the
    driver asks for that first (`refusal`), and the machine does not see requests that are refused.
    """

    # Whether it is possible.

    def refusal(self, event: RequestEvent | NodeDraining) -> str:
        """Return why this request is not possible now, for a person; "" if it is."""
        if isinstance(self.state, Done):
            return f"the run has ended: {self.status}"
        match event:
            case StopRequested() | ForwardRequested():
                return ""
            case _ if self.is_ending:
                return f"the run is ending: {self.status}"
            case RestartRequested():
                return self._why_no_restart()
            case ResizeRequested():
                return self._why_no_resize(event)
            case NodeDraining():
                return "" if event.node in self.nodes else f"there is no {event.node} any more"
            case _:
                return assert_never(event)

    @property
    def is_ending(self) -> bool:
        """Whether the run ends as soon as its workers have."""
        return isinstance(self.state, Saving | Stopping) and self.state.ending is not None

    def _why_no_restart(self) -> str:
        if isinstance(self.state, Gathering) and self.state.backoff_until is None:
            return f"no workers run that could be restarted: {self.status}"
        if isinstance(self.state, Starting | Running) and not self.members.enough:
            return f"the nodes are too few for another attempt: {self.status}"
        return self._why_undisturbed()

    def _why_undisturbed(self) -> str:
        has_world = isinstance(self.state, Starting | Running)
        return "workers have finished, and the others are about to" if has_world and self.world.finishing else ""

    def _why_no_resize(self, event: ResizeRequested) -> str:
        low, high = event.min_nodes, event.max_nodes
        if not 1 <= low <= high:
            return f"{low}:{high} is no range of nodes: the least is 1, and MIN is at most MAX"
        if self.is_of_fixed_size:
            return "the job asks for a number of workers (`nprocs`), not of nodes"
        if high > 1 and self.is_of_one_node:
            return "it was started for one node, where its workers meet at an address of that node alone"
        if self.members.enough and low <= len(self.members):
            wanted = replace(self.job, nnodes=f"{low}:{high}")
            if not self.members.enough_within(wanted):
                size = f"a number of workers that is a multiple of {self.job.multiple_of}"
                return f"no {low} to {high} of the {count(len(self.members), 'node')} have {size}"
        return self._why_undisturbed()

    # What follows.

    def _requested(self, event: RequestEvent) -> list[Action]:
        match event:
            case ForwardRequested():
                return self._forward_requested(event)
            case StopRequested():
                return self._stop_requested(event)
            case _ if self.refusal(event):
                return []
            case RestartRequested():
                return self._restart_requested(event)
            case ResizeRequested():
                return self._resize_requested(event)
            case _:
                return assert_never(event)

    def _forward_requested(self, event: ForwardRequested) -> list[Action]:
        held = self.world.held_signals
        if isinstance(self.state, Running):
            return [self._forward(event.signal)]
        if isinstance(self.state, Starting) and event.signal not in held:
            held.append(event.signal)  # some workers may run already, and the sender may have seen them
        return []

    def _stop_requested(self, event: StopRequested) -> list[Action]:
        code = signal_exit_code(signals.Signals[event.signal])
        why = requested(event)
        ending = Finish(exit_code=code, why=f"stopped by {event.by or event.signal}")
        match self.state:
            case Gathering():
                return self._finish(ending.exit_code, ending.why)
            case Stopping() as stopping:
                return self._stop_requested_again(stopping, event, ending)
            case Running() if event.save_seconds:
                return self._save(why, seconds=event.save_seconds, ending=ending)
            case Saving() as saving if event.save_seconds:
                saving.deadline = min(saving.deadline, self.now + event.save_seconds)
                if saving.ending is None:
                    saving.status, saving.ending = why, ending
                return self._set_timer("all workers must have saved by then")
            case _:
                ending = (self.state.ending if isinstance(self.state, Saving) and event.by else None) or ending
                grace = 0.0 if event.now else self.job.shutdown_timeout
                return self._stop(why, grace=grace, ending=ending, signal=event.signal)

    def _stop_requested_again(self, state: Stopping, event: StopRequested, ending: Finish) -> list[Action]:
        """Make the run end after the present attempt. A second signal kills the workers, as `now` does."""
        is_second = state.ending is not None and not event.by
        state.ending = state.ending or ending
        if not (event.now or is_second):
            return []
        why = f"{requested(event)} now" if event.by else f"{event.signal} again"
        stop = Stop(attempt=self.world.attempt, nodes=self._present_nodes(), grace=0.0, why=why)
        return [stop, *self._finish(state.ending.exit_code, state.ending.why)]

    def _restart_requested(self, event: RestartRequested) -> list[Action]:
        why = requested(event)
        match self.state:
            case Gathering() as gathering:
                gathering.backoff_until, gathering.last_call = None, self.now
                return self._gather(gathering, why)
            case Stopping() as stopping:
                stopping.backoff_until = None
                return []
            case Running() if event.save_seconds:
                return self._save(why, seconds=event.save_seconds)
            case Starting() if event.save_seconds:
                return self._replace(why)
            case Saving() if not event.save_seconds:
                return self._stop(why, grace=0.0)
            case Starting() | Running():
                return self._restart(why, all_anew=True)
            case _:
                return []

    def _resize_requested(self, event: ResizeRequested) -> list[Action]:
        """Take the new bounds. MIN holds as soon as so many nodes are there: until then the run goes on with fewer."""
        low, high = event.min_nodes, event.max_nodes
        why = requested(event)
        self.wanted_nodes = low
        self._set_bounds(low if low <= len(self.members) else min(low, self.job.min_nodes), high)
        scale = Scale(nodes=high + self.job.spares, why=why)
        return [scale, *self._resized(why)]

    def _resized(self, why: str) -> list[Action]:
        match self.state:
            case Gathering() as gathering:
                return self._gather(gathering, why)
            case Starting() if self._is_too_large():
                return self._replace(why)
            case Running() if self._is_too_large():
                return self._resize(why)
            case Starting() | Running() as state:
                return [*self._release_surplus(), *self._plan_resize(state, why)]
            case _:
                return []

    def _is_too_large(self) -> bool:
        return len(self.world.roster) > self.job.max_nodes and self.members.enough
